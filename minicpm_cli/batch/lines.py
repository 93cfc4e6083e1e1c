r"""Input lines, read lazily and split on the byte \n alone: U+2028 or NEL inside a string never splits a row.

Nothing here looks at the whole input, so a file of any size, a pipe and a terminal all work; nor at the whole of a line
that never ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from minicpm_cli.errors import FileError

LONGEST = 64 << 20  # bytes of a line, with its newline; no context holds as much text
_PIECE = 1 << 20  # of the rest of a longer one
_ENDLESS = 1 << 30  # bytes of a stream without a new line: it will have none, as /dev/zero


class Line(NamedTuple):
    """`number` counts from 1 and counts blank lines too; `offset` is that of `data`'s first byte in the input.

    Of a line that is `too_long` there is no data.
    """

    number: int
    offset: int
    data: bytes
    too_long: bool = False


def raw_lines(source: BinaryIO, limit: int | None = None, *, stream: bool = False) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line with its newline) of the first `limit` bytes; None reads to the end.

    A line of more than LONGEST bytes comes in pieces: the first is longer than that, the others have the number 0.
    Raises FileError for a `stream` that is one line without end.
    """
    number = offset = begun = 0
    whole = True
    while limit is None or offset < limit:
        most = LONGEST + 1 if whole else _PIECE
        raw = source.readline(most if limit is None else min(most, limit - offset))
        if not raw:
            return
        number, begun = number + whole, offset if whole else begun
        if stream and offset - begun > _ENDLESS:
            raise FileError(f"line {number} has no end within {_ENDLESS >> 30} GiB, so this is no input of lines.")
        yield number if whole else 0, offset, raw
        offset += len(raw)
        whole = raw.endswith(b"\n") or (whole and len(raw) <= LONGEST)


def trimmed(number: int, offset: int, raw: bytes) -> Line | None:
    """The line without newline, CR and BOM; None when only white space is left, and for the rest of a long one."""
    if not number:
        return None
    if len(raw) > LONGEST:
        return Line(number, offset, b"", too_long=True)
    data = raw.rstrip()
    if data.startswith(codecs.BOM_UTF8):
        data, offset = data[len(codecs.BOM_UTF8) :], offset + len(codecs.BOM_UTF8)
    return Line(number, offset, data) if data else None


def read_lines(source: BinaryIO, limit: int | None = None) -> Iterator[Line]:
    """The lines that are not blank."""
    for number, offset, raw in raw_lines(source, limit):
        line = trimmed(number, offset, raw)
        if line is not None:
            yield line
