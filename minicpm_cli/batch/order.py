"""--ordered: rows leave in input order, however they finish. While running, finished rows wait for their
predecessors in a window of fixed size; a file that was begun unordered is put in order at the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from minicpm_cli.batch.files import failed, replace_file
from minicpm_cli.batch.journal import Output, read_row, rows_of
from minicpm_cli.batch.keys import key_hash
from minicpm_cli.batch.lines import read_lines
from minicpm_cli.batch.records import read_keys

WINDOW = 1024  # rows; more than any engine seats at once
BYTES = 64 << 20  # of finished rows; with log-probabilities one may take megabytes


class InOrder:
    """Every row `enter`s in order and `leave`s in any; `output` gets them as they entered."""

    def __init__(self, output: Output, window: int = WINDOW, size: int = BYTES) -> None:
        self._output, self._window, self._size = output, window, size
        self._waiting: deque[int] = deque()
        self._ready: dict[int, bytes] = {}
        self._bytes = 0

    @property
    def full(self) -> bool:
        """No further row may enter until the oldest has left."""
        return len(self._waiting) >= self._window or self._bytes >= self._size

    @property
    def held(self) -> int:
        """Finished rows that are not in the output yet."""
        return len(self._ready)

    def enter(self, line: int) -> None:
        self._waiting.append(line)

    def leave(self, line: int, row: bytes) -> None:
        self._ready[line] = row
        self._bytes += len(row)
        while self._waiting and self._waiting[0] in self._ready:
            first = self._ready.pop(self._waiting[0])
            self._bytes -= len(first)
            self._output.append(first)
            self._waiting.popleft()


class AsFinished:
    """The same, without waiting."""

    full = False
    held = 0

    def __init__(self, output: Output) -> None:
        self._output = output

    def enter(self, line: int) -> None:
        pass

    def leave(self, line: int, row: bytes) -> None:
        self._output.append(row)


def restore_order(out: Path, source: Path, size: int) -> bool:
    """Puts the rows of `out` in the order of the first `size` bytes of `source`; True if they were not.

    Rows that no input line stands for go to the end. Memory: none to find out, 40 bytes a row to do it. Raises
    FileError.
    """
    try:
        if _in_order(out, source, size):
            return False
    except OSError as e:
        raise failed("read", out, e) from e
    replace_file(out, lambda f: _copy_in_order(out, source, size, f))
    return True


def _in_order(out: Path, source: Path, size: int) -> bool:
    """Both are read side by side."""
    with open(source, "rb") as f:
        lines = read_lines(f, size)
        for _, raw in rows_of(out):
            row = read_row(raw)
            if row is None or not any(row[0] in read_keys(line) for line in lines):
                return False
    return True


def _copy_in_order(out: Path, source: Path, size: int, target: IO[bytes]) -> None:
    rows = _Rows.of(out)
    with open(out, "rb") as f, open(source, "rb") as asked:
        for line in read_lines(asked, size):
            for key in read_keys(line):
                for offset in rows.take(key_hash(key)):
                    target.write(_row_at(f, offset))
        for offset in rows.left():
            target.write(_row_at(f, offset))


def _row_at(file: IO[bytes], offset: int) -> bytes:
    file.seek(offset)
    return file.readline()


class _Rows:
    """Where the rows of a file begin, by the hashes of their keys; each is taken once."""

    def __init__(self, hashes: NDArray[np.uint64], offsets: NDArray[np.uint64]) -> None:
        self._hashes, self._offsets = hashes, offsets
        self._taken = np.zeros(len(hashes), np.bool_)

    @classmethod
    def of(cls, path: Path) -> _Rows:
        hashes, offsets = array("Q"), array("Q")
        for offset, raw in rows_of(path):
            row = read_row(raw)
            offsets.append(offset)
            hashes.append(0 if row is None else key_hash(row[0]))
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        ordered = np.frombuffer(hashes, np.uint64)[order]
        del hashes
        return cls(ordered, np.frombuffer(offsets, np.uint64)[order])

    def take(self, key: int) -> Iterator[int]:
        at = int(np.searchsorted(self._hashes, np.uint64(key)))
        while at < len(self._hashes) and int(self._hashes[at]) == key:
            if not self._taken[at]:
                self._taken[at] = True
                yield int(self._offsets[at])
            at += 1

    def left(self) -> Iterator[int]:
        yield from map(int, np.sort(self._offsets[~self._taken]))
