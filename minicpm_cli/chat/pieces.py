"""The pieces that a markdown text is cut into: prose, code, tables and rules, each as it is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

CODE_INDENT = 4  # spaces that make code of a paragraph
_FENCE = re.compile(r"( *)((?:[-*+]|\d{1,9}[.)]) +)?(`{3,}(?=[^`]*$)|~{3,})(.*)")
_CELL_END = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True, slots=True)
class Fence:
    """An open code fence; `column` is where its mark stands."""

    mark: str
    column: int
    language: str
    item: str  # the list marker before it, "" where it has a line of its own

    @classmethod
    def opened_by(cls, line: str) -> Fence | None:
        match = _FENCE.match(line)
        if match is None:
            return None
        language = match[4].strip().partition(" ")[0]
        return cls(match[3], match.start(3), language, (match[2] or "").strip())

    def closed_by(self, line: str) -> bool:
        match = _FENCE.match(line)
        if match is None or match[2] or match.start(3) >= self.column + CODE_INDENT:
            return False
        return match[3].startswith(self.mark) and not match[4].strip()

    def body(self, line: str) -> str:
        """A line of code without the fence's indentation."""
        return dedented(line, self.column)


@dataclass(frozen=True, slots=True)
class Prose:
    """Parts of a paragraph, an item or (`level` 1 to 6) a heading, and whether its beginning and its end are here.

    Each part is inline markdown that is whole by itself. `gap`: a blank line stands before it.
    """

    parts: tuple[str, ...]
    opens: bool = True
    closes: bool = True
    gap: bool = True
    indent: int = 0
    marker: str = ""
    level: int = 0
    quotes: int = 0


@dataclass(frozen=True, slots=True)
class Code:
    """Text of a code block, a line break after each of its lines, and whether its beginning and its end are here."""

    text: str
    language: str
    indent: int
    opens: bool = False
    closes: bool = False
    quotes: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, all of them with as many as `aligned`; the first is the header where the table `opens`."""

    rows: tuple[tuple[str, ...], ...]
    aligned: tuple[str, ...]
    opens: bool = True
    closes: bool = True
    indent: int = 0
    quotes: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    gap: bool = True
    quotes: int = 0


Piece = Prose | Code | Table | Rule


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same, where prose and code that belong together are in one piece."""
    open_: Prose | Code | None = None
    for piece in pieces:
        if isinstance(open_, Prose) and isinstance(piece, Prose) and not piece.opens:
            open_ = replace(open_, parts=open_.parts + piece.parts, closes=piece.closes)
            continue
        if isinstance(open_, Code) and isinstance(piece, Code) and not piece.opens:
            open_ = replace(open_, text=open_.text + piece.text, closes=piece.closes)
            continue
        if open_:
            yield open_
        open_ = piece if isinstance(piece, Prose | Code) else None
        if open_ is None:
            yield piece
    if open_:
        yield open_


def in_quote(pieces: Iterable[Piece]) -> Iterator[Piece]:
    return (replace(piece, quotes=piece.quotes + 1) for piece in pieces)


def cells(line: str, count: int | None = None) -> tuple[str, ...]:
    """The cells of a table's row. Where there must be `count`, more go into the last one; missing ones are empty."""
    body = line.strip().removeprefix("|")
    found = [cell.strip().replace("\\|", "|") for cell in _CELL_END.split(body)]
    if not found[-1]:
        found.pop()
    if count is None:
        return tuple(found)
    found += [""] * (count - len(found))
    return (*found[: count - 1], " | ".join(found[count - 1 :]))


def alignment(line: str) -> tuple[str, ...]:
    """How the columns are aligned that a line such as |:--|--:| describes."""
    return tuple(_ALIGNED[cell.startswith(":"), cell.endswith(":")] for cell in cells(line))


_ALIGNED = {(False, False): "left", (True, False): "left", (False, True): "right", (True, True): "center"}


def dedented(line: str, columns: int) -> str:
    """`line` without its first spaces, at most `columns` of them."""
    return line[min(columns, len(line) - len(line.lstrip(" "))) :]


def untabbed(line: str) -> str:
    """Any part of a line gives the same part, its indentation apart."""
    body = line.lstrip(" \t")
    return line[: len(line) - len(body)].expandtabs(CODE_INDENT) + body.replace("\t", " " * CODE_INDENT)
