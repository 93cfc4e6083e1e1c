"""What a safetensors file says of its tensors: the header, checked against the size of the file. No torch here."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from minicpm_cli.errors import WeightsError
from minicpm_cli.model.shards import Shards, unreadable

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a header; `begin` and `end` count bytes from the start of the data."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def all_entries(shards: Shards) -> dict[str, Entry]:
    """The headers of all files of a checkpoint, held against its index."""
    entries: dict[str, Entry] = {}
    for file in shards.files:
        found = read_entries(file)
        shards.check(file, set(found))
        for name in found.keys() & entries.keys():
            raise WeightsError(f"tensor {name} is in both {entries[name].file} and {file.name}; remove one of the two")
        entries |= found
    return entries


def read_entries(file: Path) -> dict[str, Entry]:
    """The header of a safetensors file, checked: whole, contiguous, and exactly as long as the file.

    Raises WeightsError naming the file and both numbers.
    """
    try:
        raw, payload = _read_header(file)
    except OSError as error:
        raise WeightsError(f"cannot read {file}: {error.strerror or error}") from error
    return parse_entries(file, raw, payload)


def parse_entries(file: Path, raw: bytes, payload: int) -> dict[str, Entry]:
    """`read_entries` of a header that was read already, with `payload` bytes behind it; `file` need not be here."""
    try:
        header = json.loads(raw, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise unreadable(file, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise unreadable(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, row) for name, row in header.items()}
    _check_extents(file, entries, payload, 8 + len(raw))
    return entries


def _read_header(file: Path) -> tuple[bytes, int]:
    """The header's bytes and the number of bytes behind it."""
    with open(file, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        if size < 8:
            raise unreadable(file, f"expects at least 8 bytes, the file has {size}")
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > min(MAX_HEADER, size - 8):
            raise unreadable(file, f"its header expects {length} bytes, the file has {size - 8} behind the length")
        return opened.read(length), size - 8 - length


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _entry(file: Path, name: str, row: Any) -> Entry:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise unreadable(file, f"tensor {name} lacks a dtype, a shape or two data_offsets") from None
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise unreadable(file, f"tensor {name} has a shape or offsets that are not whole numbers")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise WeightsError(f"{file}: tensor {name} has the unknown dtype {dtype!r}")
    want = math.prod(shape) * BITS[dtype]
    if want != (end - begin) * 8:
        raise unreadable(
            file, f"tensor {name} ({dtype} {list(shape)}) expects {want // 8} bytes, its offsets span {end - begin}"
        )
    return Entry(file, dtype, shape, begin, end)


def _check_extents(file: Path, entries: dict[str, Entry], payload: int, ahead: int) -> None:
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    if ordered and ordered[0][1].begin != 0:
        raise unreadable(file, f"the data starts at byte {ordered[0][1].begin} instead of 0")
    for (a, left), (b, right) in pairwise(ordered):
        if left.end != right.begin:
            what = "overlap" if left.end > right.begin else "leave a gap"
            raise unreadable(file, f"tensors {a} and {b} {what}: {left.end} is followed by {right.begin}")
    total = ordered[-1][1].end if ordered else 0
    if total != payload:
        raise unreadable(file, f"expects {ahead + total} bytes, the file has {ahead + payload}")
