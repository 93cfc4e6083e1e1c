r"""Input lines, read lazily and split on the byte \n alone: U+2028 or NEL inside a string never splits a row.

Nothing here looks at the whole input, so a file of any size, a pipe and a terminal all work.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1 and counts blank lines too; `offset` is that of `data`'s first byte in the input."""

    number: int
    offset: int
    data: bytes


def raw_lines(source: BinaryIO, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of the first `limit` bytes; None reads to the end."""
    offset = 0
    while limit is None or offset < limit:
        raw = source.readline(-1 if limit is None else limit - offset)
        if not raw:
            return
        yield offset, raw
        offset += len(raw)


def trimmed(number: int, offset: int, raw: bytes) -> Line | None:
    """The line without newline, CR and BOM; None when nothing but white space is left."""
    data = raw.rstrip()
    if data.startswith(codecs.BOM_UTF8):
        data, offset = data[len(codecs.BOM_UTF8) :], offset + len(codecs.BOM_UTF8)
    return Line(number, offset, data) if data else None


def read_lines(source: BinaryIO, limit: int | None = None) -> Iterator[Line]:
    """The lines that are not blank."""
    for number, (offset, raw) in enumerate(raw_lines(source, limit), 1):
        line = trimmed(number, offset, raw)
        if line is not None:
            yield line
