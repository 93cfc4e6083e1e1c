"""--ordered: rows leave in input order, however they finish. While running, finished rows wait for their
predecessors in a window of fixed size; a file that was begun unordered is put in order at the end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from minicpm_cli.batch.files import replace_file
from minicpm_cli.batch.journal import Output, read_row, rows_of
from minicpm_cli.batch.keys import key_hash
from minicpm_cli.batch.lines import read_lines
from minicpm_cli.batch.records import read_keys

WINDOW = 1024  # rows; more than any engine seats at once


class InOrder:
    """Every row `enter`s in order and `leave`s in any; `output` gets them as they entered."""

    def __init__(self, output: Output, window: int = WINDOW) -> None:
        self._output, self._window = output, window
        self._waiting: deque[int] = deque()
        self._ready: dict[int, bytes] = {}

    @property
    def full(self) -> bool:
        """No further row may enter until the oldest has left."""
        return len(self._waiting) >= self._window

    def enter(self, line: int) -> None:
        self._waiting.append(line)

    def leave(self, line: int, row: bytes) -> None:
        self._ready[line] = row
        while self._waiting and self._waiting[0] in self._ready:
            self._output.append(self._ready.pop(self._waiting[0]))
            self._waiting.popleft()


class AsFinished:
    """The same, without waiting."""

    full = False

    def __init__(self, output: Output) -> None:
        self._output = output

    def enter(self, line: int) -> None:
        pass

    def leave(self, line: int, row: bytes) -> None:
        self._output.append(row)


def restore_order(out: Path, source: Path, size: int) -> bool:
    """Puts the rows of `out` in the order of the first `size` bytes of `source`; True if they were not.

    Rows that no input line stands for go to the end. Memory: about 100 bytes a row. Raises FileError.
    """
    offsets, lengths, hashes = array("Q"), array("Q"), array("Q")
    for offset, raw in rows_of(out):
        row = read_row(raw)
        offsets.append(offset)
        lengths.append(len(raw))
        hashes.append(0 if row is None else key_hash(row[0]))
    places = _places(hashes, source, size)
    if bool(np.all(places[1:] >= places[:-1])):
        return False
    replace_file(out, lambda f: _copy(out, f, offsets, lengths, np.argsort(places, kind="stable")))
    return True


def _places(hashes: array[int], source: Path, size: int) -> NDArray[np.uint64]:
    """For each hash the input line that it belongs to."""
    keys, lines = array("Q"), array("Q")
    with open(source, "rb") as f:
        for line in read_lines(f, size):
            for key in read_keys(line):
                keys.append(key_hash(key))
                lines.append(line.number)
    wanted, known = np.frombuffer(hashes, np.uint64), np.frombuffer(keys, np.uint64)
    by_hash = np.argsort(known, kind="stable")
    known, numbers = known[by_hash], np.frombuffer(lines, np.uint64)[by_hash]
    at = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    if not len(known):
        return np.zeros(len(wanted), np.uint64)
    return np.where(known[at] == wanted, numbers[at], np.iinfo(np.uint64).max)


def _copy(out: Path, target: IO[bytes], offsets: array[int], lengths: array[int], order: Iterable[int]) -> None:
    with open(out, "rb") as f:
        for i in order:
            f.seek(offsets[i])
            target.write(f.read(lengths[i]))
