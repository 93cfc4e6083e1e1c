"""Cuts a markdown text that is still being written into pieces that can no longer change.

Prose is finished by a blank line, a list by its next item, code line by line: what is left open stays short.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

_FENCE = re.compile(r"( *)((?:[-*+]|\d{1,9}[.)]) +)?(`{3,}(?=[^`]*$)|~{3,})(.*)")
_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)]) +(?=\S)")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *$")
_HEADING = re.compile(r" {0,3}#{1,6}(?: |$)")
_CODE_INDENT = 4  # spaces that make code of a paragraph


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
        if match is None or match[2] or match.start(3) >= self.column + _CODE_INDENT:
            return False
        return match[3].startswith(self.mark) and not match[4].strip()

    def body(self, line: str) -> str:
        """A line of code without the fence's indentation."""
        return _dedented(line, self.column)


@dataclass(frozen=True, slots=True)
class Prose:
    """Markdown of one block, without its list marker and indentation; `gap`: a blank line stands before it."""

    text: str
    gap: bool = True
    indent: int = 0
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """Whole lines of a code fence, and whether its beginning and its end are among them."""

    lines: tuple[str, ...]
    language: str
    indent: int
    opens: bool = False
    closes: bool = False


Piece = Prose | Code


@dataclass(slots=True)
class Blocks:
    """Feed it text, get the pieces that are finished. What they are does not depend on how the text is cut."""

    _line: str = ""  # the line that has no end yet
    _text: str = ""  # whole lines of the prose that is still open
    _fence: Fence | None = None
    _blank: bool = False  # a blank line came since the last piece
    _last_is_item: bool = False
    _list_column: int | None = None  # where the text of the last item began, while its list may go on

    def feed(self, text: str) -> list[Piece]:
        *lines, self._line = (self._line + text).split("\n")
        return list(_joined(piece for line in lines for piece in self._take(line)))

    def preview(self) -> list[Piece]:
        """What is still open, as it would be if the text ended here."""
        return replace(self).close()

    def close(self) -> list[Piece]:
        """The pieces that were still open. What is fed next begins a new text."""
        pieces = [*(self._take(self._line) if self._line else ()), *self._end()]
        self._line, self._fence, self._blank, self._last_is_item, self._list_column = "", None, False, False, None
        return list(_joined(pieces))

    def _take(self, line: str) -> Iterator[Piece]:
        if self._fence:
            yield self._code(self._fence, line)
        elif fence := Fence.opened_by(line):
            yield from self._open(fence)
        elif not line.strip():
            yield from self._end()
            self._blank = True
        else:
            line = line.expandtabs(4)
            if self._text and self._begins_block(line):
                yield from self._end()
            self._text += line + "\n"

    def _open(self, fence: Fence) -> Iterator[Piece]:
        yield from self._end()
        if fence.item:
            yield Prose("", self._gap(item=True), fence.column - len(fence.item) - 1, fence.item)
        if not fence.column:
            self._list_column = None
        self._fence, self._blank, self._last_is_item = fence, False, False
        yield Code((), fence.language, fence.column, opens=True)

    def _code(self, fence: Fence, line: str) -> Code:
        if fence.closed_by(line):
            self._fence = None
            return Code((), fence.language, fence.column, closes=True)
        return Code((fence.body(line),), fence.language, fence.column)

    def _begins_block(self, line: str) -> bool:
        """Whether `line` ends the prose before it; only a list that begins with 1 may interrupt a paragraph."""
        if _RULE.match(line):
            return "-" not in line or self._item(self._text) is not None  # --- makes a heading of a paragraph
        if _HEADING.match(line):
            return True
        match = self._item(line)
        in_list = self._list_column is not None or self._item(self._text) is not None
        return match is not None and (in_list or not match[2][0].isdigit() or match[2][:-1] == "1")

    def _item(self, text: str) -> re.Match[str] | None:
        match = None if _RULE.match(text.split("\n", 1)[0]) else _ITEM.match(text)
        return match if match and (len(match[1]) < _CODE_INDENT or self._list_column is not None) else None

    def _end(self) -> Iterator[Piece]:
        text, self._text = self._text, ""
        if not text:
            return
        match = self._item(text)
        gap = self._gap(item=match is not None)
        self._blank, self._last_is_item = False, match is not None
        if match:
            self._list_column = match.end()
            yield Prose(_dedented_all(text[match.end() :], match.end()), gap, len(match[1]), match[2])
        else:
            indent = self._indent(text)
            yield Prose(_dedented_all(text, indent), gap, indent)

    def _gap(self, *, item: bool) -> bool:
        return self._blank or not (item and self._last_is_item)

    def _indent(self, text: str) -> int:
        """Columns by which a paragraph stands inside a list; one that is not inside ends the list."""
        spaces = len(text) - len(text.lstrip(" "))
        if not spaces or self._list_column is None:
            self._list_column = None
            return 0
        return self._list_column if spaces >= self._list_column + _CODE_INDENT else spaces


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same, code that belongs together in one piece."""
    code: Code | None = None
    for piece in pieces:
        if code and isinstance(piece, Code) and not piece.opens:
            code = replace(code, lines=code.lines + piece.lines, closes=piece.closes)
            continue
        if code:
            yield code
        code = piece if isinstance(piece, Code) else None
        if not isinstance(piece, Code):
            yield piece
    if code:
        yield code


def _dedented(line: str, columns: int) -> str:
    """`line` without its first spaces, at most `columns` of them."""
    return line[min(columns, len(line) - len(line.lstrip(" "))) :]


def _dedented_all(text: str, columns: int) -> str:
    return "".join(_dedented(line, columns) for line in text.splitlines(keepends=True))


def last_code_block(text: str) -> str | None:
    """The body of the last fenced code block, without its fences; an unclosed one counts, since answers get cut."""
    fence: Fence | None = None
    body: list[str] | None = None
    for line in text.split("\n"):
        if fence is None:
            fence = Fence.opened_by(line)
            body = [] if fence else body
        elif fence.closed_by(line):
            fence = None
        elif body is not None:
            body.append(fence.body(line))
    return None if body is None else "\n".join(body)
