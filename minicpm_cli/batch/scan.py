"""The one pass over an input file before anything loads: its fingerprint, its number of rows, no id twice."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from minicpm_cli.batch.files import failed
from minicpm_cli.batch.keys import key_hash, repeated
from minicpm_cli.batch.lines import Line, raw_lines, read_lines, trimmed
from minicpm_cli.batch.records import in_shard, read_id
from minicpm_cli.errors import UsageError

if TYPE_CHECKING:
    from hashlib import _Hash

_SHOWN = 5  # pairs of lines with the same id


@dataclass(frozen=True, slots=True)
class Scan:
    """`size` bytes were read; lines appended later belong to the next run. `rows` counts those of the shard.

    `prefix_sha256` is that of the first `mark` bytes. `split_line` is the line in whose middle the mark fell, if what
    stood there then was a row; `grown_line` is that line if it was none yet, as when a writer was in the middle of it.
    `keys` has the hash of the key of each line that is not blank, 0 where it cannot be read.
    """

    size: int
    sha256: str
    rows: int
    prefix_sha256: str | None
    split_line: int | None
    grown_line: int | None = None
    keys: array[int] = field(default_factory=lambda: array("Q"), repr=False, compare=False)


def scan_input(source: BinaryIO, path: Path, shard: tuple[int, int] | None = None, mark: int | None = None) -> Scan:
    """Reads `source` from its start and goes back there. Raises UsageError that names both lines of an id that occurs
    twice, FileError.
    """
    try:
        hashes = array("Q")  # 8 bytes a row: a million rows take 8 MB
        scan = _Pass(source, hashes, shard, mark).run()
        _refuse_repeated(source, scan.size, repeated(hashes), path)
        source.seek(0)
        return scan
    except OSError as e:
        raise failed("read", path, e) from e


class _Pass:
    def __init__(self, source: BinaryIO, hashes: array[int], shard: tuple[int, int] | None, mark: int | None) -> None:
        self._source, self._hashes, self._shard, self._mark = source, hashes, shard, mark
        self._digest = hashlib.sha256()
        self._prefix: _Hash | None = None
        self._split: int | None = None
        self._grown: int | None = None
        self._number = 0

    def run(self) -> Scan:
        rows = size = 0
        if self._mark == 0:
            self._prefix = self._digest.copy()
        for number, offset, raw in raw_lines(self._source):
            self._number = number or self._number
            self._hash(number, offset, raw)
            size = offset + len(raw)
            line = trimmed(number, offset, raw)
            if line is not None:
                rows += in_shard(number, self._shard)
                self._note_id(line)
        prefix = None if self._prefix is None else self._prefix.hexdigest()
        return Scan(size, self._digest.hexdigest(), rows, prefix, self._split, self._grown, self._hashes)

    def _note_id(self, line: Line) -> None:
        key = read_id(line)
        self._hashes.append(0 if key is None else key_hash(key))

    def _hash(self, number: int, offset: int, raw: bytes) -> None:
        cut = -1 if self._mark is None else self._mark - offset
        if not 0 < cut <= len(raw):
            self._digest.update(raw)
            return
        self._digest.update(raw[:cut])
        self._prefix = self._digest.copy()
        self._digest.update(raw[cut:])
        if raw[cut:].strip():
            before = trimmed(number, offset, raw[:cut])
            if before is None or read_id(before) is None:
                self._grown = self._number
            else:
                self._split = self._number


def _refuse_repeated(source: BinaryIO, size: int, suspects: set[int], path: Path) -> None:
    """Hashes may collide, so the lines themselves are read again and their keys compared."""
    if not suspects:
        return
    source.seek(0)
    pairs = list(_pairs(source, size, suspects))
    if pairs:
        shown = "; ".join(f"lines {a} and {b} ({_clipped(key)})" for a, b, key in pairs[:_SHOWN])
        more = f"; {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
        raise UsageError(
            f"{path} uses an id more than once: {shown}{more}. "
            "Give each line its own id; a line without one takes its line number."
        )


def _pairs(source: BinaryIO, size: int, suspects: set[int]) -> Iterator[tuple[int, int, bytes]]:
    first: dict[bytes, int] = {}
    for line in read_lines(source, size):
        key = read_id(line)
        if key is None or key_hash(key) not in suspects:
            continue
        if key in first:
            yield first[key], line.number, key
        first.setdefault(key, line.number)


def _clipped(key: bytes) -> str:
    """The key's JSON, short enough for a message."""
    text = key.decode("ascii")
    return f"id {text if len(text) <= 60 else text[:60] + '...'}"
