"""Who is who: a row's key, its 64-bit hash, a set of such hashes at 8 bytes each, and the row's own seed."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from json.encoder import encode_basestring_ascii

import numpy as np
from numpy.typing import NDArray

Id = str | int | float

_RECENT = 1 << 16  # members kept in a plain set before they are merged into the sorted array


def id_key(id_: Id) -> bytes:
    """1 and "1" are two ids: the JSON type is part of the key."""
    return (encode_basestring_ascii(id_) if isinstance(id_, str) else json.dumps(id_)).encode("ascii")


def line_key(number: int) -> bytes:
    """The key of a line whose id cannot be read. No `id_key` starts with '#'."""
    return b"#%d" % number


def key_hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


def row_seed(seed: int, key: bytes) -> int:
    """53 bits, so that the recorded number survives readers that keep numbers as doubles."""
    digest = blake2b(key, digest_size=8, salt=seed.to_bytes(8, "little"), person=b"row-seed").digest()
    return int.from_bytes(digest, "little") >> 11


class HashSet:
    """A set of 64-bit hashes: a sorted array and a small set of newcomers. 1,000,000 members take 8 MB."""

    def __init__(self, members: Iterable[int] = ()) -> None:
        self._sorted = _distinct(np.array(members if isinstance(members, array) else array("Q", members), np.uint64))
        self._recent: set[int] = set()

    def add(self, value: int) -> None:
        if value in self:
            return
        self._recent.add(value)
        if len(self._recent) >= max(_RECENT, len(self._sorted) // 32):
            self._merge()

    def __contains__(self, value: int) -> bool:
        if value in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(value)))
        return at < len(self._sorted) and int(self._sorted[at]) == value

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def flags(self, values: array[int]) -> bytes:
        """A bit for each value, the highest of a byte first: whether it is a member."""
        self._merge()
        if not len(self._sorted):
            return bytes(-(-len(values) // 8))
        asked, flags = np.frombuffer(values, np.uint64), []
        for start in range(0, len(asked), _RECENT):
            part = asked[start : start + _RECENT]
            places = np.searchsorted(self._sorted, part)
            places[places == len(self._sorted)] = 0
            flags.append(np.packbits(self._sorted[places] == part).tobytes())
        return b"".join(flags)

    def _merge(self) -> None:
        if self._recent:
            newcomers = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = _distinct(np.concatenate((self._sorted, newcomers)))
            self._recent.clear()


def _distinct(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Sorted in place. np.unique takes 60 MB for a million."""
    values.sort()
    return values if not np.any(same := values[1:] == values[:-1]) else values[np.concatenate(([True], ~same))]


def repeated(hashes: array[int]) -> set[int]:
    """The values that occur more than once, 0 aside."""
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    return set(ordered[1:][ordered[1:] == ordered[:-1]].tolist()) - {0}
