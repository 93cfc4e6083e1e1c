"""Reads the header of a GGUF file (ggml's single-file format: metadata, tensor table, tensor data).

Written for start-up time: the `gguf` package needs seconds for a vocabulary of 49,000 tokens, this takes
milliseconds. Nothing in the file is believed before it is checked against the file's size.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from minicpm_cli.errors import WeightsError

# ggml type -> (name, weights a block, bytes a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMS = 4
_length = struct.Struct("<Q").unpack_from


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One row of the tensor table: `shape` in torch order (rows first), `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class Strings(Sequence[str]):
    """An array of strings of the metadata, decoded when first looked at: most runs need few of them."""

    __slots__ = ("_count", "_items", "_raw")

    def __init__(self, raw: bytes, count: int) -> None:
        self._raw, self._count = raw, count
        self._items: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _decoded(self) -> list[str]:
        if self._items is None:
            self._items = list(self._split())
            self._raw = b""
        return self._items

    def _split(self) -> Iterator[str]:
        raw, pos = self._raw, 0
        for _ in range(self._count):
            (size,) = _length(raw, pos)
            yield raw[pos + 8 : pos + 8 + size].decode("utf-8", "replace")
            pos += 8 + size


def read_header(path: Path) -> GGUFHeader:
    """Reads and checks everything before the tensor data.

    Raises WeightsError, naming the file and the numbers, for anything that is not a whole, consistent file.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise WeightsError(f"{path}: {size} bytes are too few for a GGUF file; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(path, data, size))
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.pos = path, data, size, 0

    def fail(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: {what}. The file is damaged or incomplete; fetch it again.")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            raise self.fail(
                f"{what} at byte {self.pos} expects {count} bytes, the file has "
                f"{self.size - self.pos} left of {self.size}"
            )

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))
        return value

    def text(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode("utf-8", "replace")

    def name(self, what: str) -> str:
        raw = self.take(self.number("Q", what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} at byte {self.pos - len(raw)} is not text") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what)
        if kind not in SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        return self.number(SCALARS[kind], what)

    def array(self, what: str) -> Sequence[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == STRING:
            return self.strings(count, what)
        if kind not in SCALARS:
            raise self.fail(f"{what} is an array of the unsupported value type {kind}")
        width = struct.calcsize("<" + SCALARS[kind])
        return list(struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * width, what)))

    def strings(self, count: int, what: str) -> Strings:
        self.need(count * 8, what)
        data, pos = self.data, self.pos
        try:
            for _ in range(count):
                pos += 8 + _length(data, pos)[0]
        except (struct.error, OverflowError):
            pos = self.size + 1
        if pos > self.size:
            raise self.fail(f"{what} holds {count} strings that do not end within the file's {self.size} bytes")
        start, self.pos = self.pos, pos
        return Strings(data[start:pos], count)


def _parse(cur: _Cursor) -> GGUFHeader:
    version = _version(cur)
    tensors, pairs = cur.number("Q", "tensor count"), cur.number("Q", "metadata count")
    for count, least, what in ((tensors, 24, "tensors"), (pairs, 13, "metadata entries")):
        if count * least > cur.size:
            raise cur.fail(f"claims {count} {what}, which cannot fit in its {cur.size} bytes")
    metadata = _metadata(cur, pairs)
    _refuse_split(cur, metadata)
    table = [_tensor_info(cur) for _ in range(tensors)]
    return GGUFHeader(cur.path, version, metadata, _place(cur, table, _alignment(cur, metadata)))


def _version(cur: _Cursor) -> int:
    magic = cur.take(4, "magic")
    if magic != b"GGUF":
        raise WeightsError(f"{cur.path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version: int = cur.number("I", "version")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        what = "is big-endian" if big else f"has version {version}"
        raise WeightsError(f"{cur.path} {what}; only little-endian GGUF versions 2 and 3 are supported")
    return version


def _metadata(cur: _Cursor, pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cur.name("a metadata key")
        if key in metadata:
            raise cur.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cur.value(cur.number("I", key), f"metadata {key!r}")
    return metadata


def _refuse_split(cur: _Cursor, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise WeightsError(
            f"{cur.path} is one of {parts} parts of a split GGUF, which is not supported; "
            "join them first with llama.cpp's `llama-gguf-split --merge FIRST_PART OUTPUT`"
        )


def _alignment(cur: _Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 0 < value <= 1 << 20 or value & (value - 1):
        raise cur.fail(f"general.alignment is {value!r}, not a power of two")
    return value


def _tensor_info(cur: _Cursor) -> GGUFTensor:
    """A row of the table; its offset still counts from the start of the data."""
    name = cur.name("a tensor's name")
    rank = cur.number("I", name)
    if not 1 <= rank <= MAX_DIMS:
        raise cur.fail(f"tensor {name!r} has {rank} dimensions, expected 1 to {MAX_DIMS}")
    dims = struct.unpack(f"<{rank}Q", cur.take(8 * rank, name))
    kind, offset = cur.number("I", name), cur.number("Q", name)
    if kind not in GGML_TYPES:
        raise WeightsError(f"{cur.path}: tensor {name!r} has the unknown ggml type {kind}; update minicpm-cli")
    type_name, block, block_bytes = GGML_TYPES[kind]
    if dims[0] % block or 0 in dims:
        raise cur.fail(
            f"tensor {name!r} has shape {dims[::-1]}; {type_name} needs rows of a multiple of {block} weights"
        )
    return GGUFTensor(name, dims[::-1], type_name, offset, math.prod(dims) // block * block_bytes)


def _place(cur: _Cursor, table: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
    """Makes offsets absolute; checks alignment, the end of the file, overlaps and double names."""
    start = -(-cur.pos // alignment) * alignment
    placed: dict[str, GGUFTensor] = {}
    for t in table:
        if t.offset % alignment:
            raise cur.fail(f"tensor {t.name!r} is at offset {t.offset}, not a multiple of the alignment {alignment}")
        if t.name in placed:
            raise cur.fail(f"tensor {t.name!r} appears twice")
        placed[t.name] = GGUFTensor(t.name, t.shape, t.type, start + t.offset, t.nbytes)
    _check_extents(cur, sorted(placed.values(), key=lambda t: t.offset))
    return placed


def _check_extents(cur: _Cursor, tensors: list[GGUFTensor]) -> None:
    for t in tensors:
        if t.offset + t.nbytes > cur.size:
            raise cur.fail(f"tensor {t.name!r} expects {t.offset + t.nbytes} bytes, the file has {cur.size}")
    for a, b in pairwise(tensors):
        if a.offset + a.nbytes > b.offset:
            raise cur.fail(f"tensors {a.name!r} and {b.name!r} overlap at byte {b.offset}")
