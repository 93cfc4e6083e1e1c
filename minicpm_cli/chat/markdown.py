"""Cuts a markdown text that is still being written into pieces that can no longer change, as early as that is known.

Prose and code are given on word by word, a table once its first rows tell how wide its columns are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from minicpm_cli.chat.inline import chunks
from minicpm_cli.chat.pieces import (
    CODE_INDENT,
    Code,
    Fence,
    Piece,
    Prose,
    Rule,
    Table,
    alignment,
    cells,
    dedented,
    in_quote,
    joined,
    untabbed,
)

_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)]) +(?=\S)")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *$")
_HEADING = re.compile(r" {0,3}(#{1,6})(?: +|$)(.*?)(?: +#+)? *$")
_QUOTE = re.compile(r" {0,3}> ?")
_ROW = re.compile(r" *\|")
_DELIMITERS = re.compile(r" *\|(?: *:?-+:? *\|)* *:?-+:? *\|? *$")
# The beginning of a line whose role may still change: of a rule, an item, a fence, a heading, a quote, a table.
_UNDECIDED = re.compile(r" *(?:[-*_][-*_ ]*|\+ *|\d{1,9}(?:[.)] *)?|`+|`{3,}[^`]*|~.*|#{1,6}(?: .*)?|>.*|\|.*|\t.*)?")
ROWS_TO_MEASURE = 10  # of a table, before the width of its columns is settled


@dataclass(slots=True)
class Blocks:
    """Feed it text, get the pieces that are finished. What they are does not depend on how the text is cut."""

    _line: str = ""  # the line whose role is not known yet
    _text: str = ""  # prose whose marks still wait for those that close them
    _prose: Prose | None = None  # the paragraph that is open, as its next piece will be
    _column: int = 0  # where its text begins
    _flowing: Literal["", "prose", "quote"] = ""  # what the line that comes is known to belong to
    _fence: Fence | None = None
    _inside: bool = False  # whether the first words of this line of code were given on
    _header: str | None = None  # a line that is one of a table or prose: the next one tells
    _table: Table | None = None  # its rows that were not given on yet
    _quote: Blocks | None = None
    _blank: bool = False  # a blank line came since the last piece
    _last: str = ""  # what came last: "item", "indented" code, or anything else
    _list_column: int | None = None  # where the text of the last item began, while its list may go on

    def feed(self, text: str) -> list[Piece]:
        return list(joined(self._feed(text)))

    def close(self) -> list[Piece]:
        """The pieces that were still open. What is fed next begins a new text."""
        line, self._line = self._line, ""
        pieces = [*(self._take(line) if line else ()), *self._end_header(), *self._end()]
        self._fence, self._inside, self._flowing = None, False, ""
        self._blank, self._last, self._list_column = False, "", None
        return list(joined(pieces))

    @property
    def rows(self) -> int:
        """How many rows of a table are waiting."""
        return len(self._table.rows) if self._table else 0

    def _feed(self, text: str) -> Iterator[Piece]:
        while text:
            head, newline, text = text.partition("\n")
            if self._flowing == "prose":
                self._text += head.replace("\t", " " * CODE_INDENT) + newline
                yield from self._settled()
            elif self._flowing == "quote":
                yield from self._quoted(head + newline)
            else:
                yield from self._of_line(head, newline)
            self._flowing = "" if newline else self._flowing

    def _of_line(self, text: str, newline: str) -> Iterator[Piece]:
        """More of a line whose role is not known yet, or that is code."""
        self._line += text
        line = self._line
        if newline:
            self._line = ""
            yield from self._take(line)
        elif self._fence:
            yield from self._code_words(self._fence)
        elif self._decided():
            self._line, self._flowing = "", "prose"
            yield from self._flow(line)
        elif quote := self._begins_quote():
            self._line, self._flowing = "", "quote"
            yield from self._quoted(line[quote.end() :])

    def _decided(self) -> bool:
        """Whether the line that comes is prose whatever follows."""
        line = untabbed(self._line)
        if self._quote or self._table or self._header is not None or self._begins_code(line):
            return False
        match = _ITEM.match(line)
        body = line[match.end() :] if match else line
        return not _UNDECIDED.fullmatch(body)

    def _take(self, line: str) -> Iterator[Piece]:
        if self._fence:
            yield self._code_line(self._fence, line)
            return
        if self._header is not None and self._opens_table(line):
            yield from self._open_table(line)
            return
        yield from self._end_header()
        if self._quote and not _QUOTE.match(line):
            yield from self._end_quote()
        if self._table and not _ROW.match(line):
            yield from self._end_table()
        if quote := _QUOTE.match(line):
            yield from self._quoted(line[quote.end() :] + "\n")
        elif _ROW.match(line):
            yield from self._row(untabbed(line))
        elif fence := Fence.opened_by(line):
            yield from self._open(fence)
        elif not line.strip():
            yield from self._end()
            self._blank = True
        else:
            yield from self._prose_line(untabbed(line))

    def _prose_line(self, line: str) -> Iterator[Piece]:
        if self._begins_code(line):
            yield self._indented(line[CODE_INDENT:])
        elif _RULE.match(line):
            yield from self._end()
            self._list_column = None
            yield Rule(self._gap(""))
        elif heading := _HEADING.match(line):
            yield from self._end()
            self._list_column = None
            yield Prose((heading[2],), gap=self._gap(""), level=len(heading[1]))
        else:
            yield from self._flow(line)
            self._text += "\n"

    def _flow(self, line: str) -> Iterator[Piece]:
        """Prose, whose line may not have ended yet."""
        line = untabbed(line)
        if self._prose is None or self._begins_item(line):
            yield from self._end()
            line = self._begin(line)
        self._text += dedented(line, self._column)
        yield from self._settled()

    def _begin(self, line: str) -> str:
        """Opens the prose that `line` begins; returns the line without its marker."""
        match = self._item(line)
        if match is None:
            self._column = indent = self._indent(line)
            self._prose = Prose((), closes=False, gap=self._gap(""), indent=indent)
            return line
        gap = self._gap("item")
        self._column = self._list_column = match.end()
        self._prose = Prose((), closes=False, gap=gap, indent=len(match[1]), marker=match[2])
        return line[match.end() :]

    def _settled(self) -> Iterator[Piece]:
        parts, self._text = chunks(self._text)
        if parts and self._prose:
            yield replace(self._prose, parts=tuple(parts))
            self._prose = replace(self._prose, opens=False)

    def _end(self) -> Iterator[Piece]:
        """Ends the block that is open, a fence apart."""
        yield from self._end_quote()
        yield from self._end_table()
        text, self._text = self._text.rstrip(), ""
        if self._prose:
            parts, rest = chunks(text)
            yield replace(self._prose, parts=(*parts, rest) if rest else tuple(parts), closes=True)
            self._prose = None

    def _begins_item(self, line: str) -> bool:
        """Whether `line` ends the prose before it; only a list that begins with 1 may interrupt a paragraph."""
        match = self._item(line)
        in_list = self._list_column is not None
        return match is not None and (in_list or not match[2][0].isdigit() or match[2][:-1] == "1")

    def _item(self, line: str) -> re.Match[str] | None:
        match = _ITEM.match(line)
        return match if match and (len(match[1]) < CODE_INDENT or self._list_column is not None) else None

    def _gap(self, kind: str) -> bool:
        """Whether a blank line stands before what begins now, which is of that `kind`."""
        gap = self._blank or kind == "" or kind != self._last
        self._blank, self._last = False, kind
        return gap

    def _indent(self, line: str) -> int:
        """Columns by which a paragraph stands inside a list; one that is not inside ends the list."""
        spaces = len(line) - len(line.lstrip(" "))
        if not spaces or self._list_column is None:
            self._list_column = None
            return 0
        return self._list_column if spaces >= self._list_column + CODE_INDENT else spaces

    # Code

    def _open(self, fence: Fence) -> Iterator[Piece]:
        yield from self._end()
        if fence.item:
            yield Prose((), gap=self._gap("item"), indent=fence.column - len(fence.item) - 1, marker=fence.item)
        if not fence.column:
            self._list_column = None
        self._fence, self._blank, self._last = fence, False, ""
        yield Code("", fence.language, fence.column, opens=True)

    def _code_line(self, fence: Fence, line: str) -> Code:
        inside, self._inside = self._inside, False
        if not inside and fence.closed_by(line):
            self._fence = None
            return Code("", fence.language, fence.column, closes=True)
        return Code((line if inside else fence.body(line)) + "\n", fence.language, fence.column)

    def _code_words(self, fence: Fence) -> Iterator[Piece]:
        """All but the last word of a line of code that is being written."""
        line = self._line if self._inside else fence.body(self._line)
        if not self._inside and (not line.strip() or line.lstrip()[0] == fence.mark[0]):
            return  # it may be the end of the code
        end = line.rfind(" ")
        if end > 0 and line[:end].strip():
            yield Code(line[:end], fence.language, fence.column)
            self._line, self._inside = line[end:], True

    def _begins_code(self, line: str) -> bool:
        """By its indentation alone."""
        return self._list_column is None and self._prose is None and line.startswith(" " * CODE_INDENT)

    def _indented(self, line: str) -> Code:
        return Code(line + "\n", "", 0, opens=self._gap("indented"))

    # Quotes

    def _begins_quote(self) -> re.Match[str] | None:
        """Whether the line that comes is known to be one of a quote; what follows its mark is there."""
        match = _QUOTE.match(self._line)
        known = match is not None and self._table is None and self._header is None
        return match if known and len(self._line.lstrip()) > 1 else None

    def _quoted(self, text: str) -> Iterator[Piece]:
        if self._quote is None:
            yield from self._end()
            self._gap("")
            self._quote = Blocks()
        yield from in_quote(self._quote.feed(text))

    def _end_quote(self) -> Iterator[Piece]:
        quote, self._quote = self._quote, None
        if quote:
            yield from in_quote(quote.close())

    # Tables

    def _row(self, line: str) -> Iterator[Piece]:
        table = self._table
        if table is None:
            self._header = line
            return
        table = replace(table, rows=(*table.rows, cells(line, len(table.aligned))))
        if not table.opens or len(table.rows) > 1 + ROWS_TO_MEASURE:
            yield table
            table = replace(table, rows=(), opens=False)
        self._table = table

    def _opens_table(self, line: str) -> bool:
        header = cells(self._header or "")
        return _DELIMITERS.match(line) is not None and len(header) == len(cells(line))

    def _open_table(self, line: str) -> Iterator[Piece]:
        header, self._header = self._header or "", None
        yield from self._end()
        indent = self._indent(header)
        self._gap("")
        self._table = Table((cells(header),), alignment(line), closes=False, indent=indent)

    def _end_header(self) -> Iterator[Piece]:
        """It was prose after all."""
        header, self._header = self._header, None
        if header is not None:
            yield from self._prose_line(header)

    def _end_table(self) -> Iterator[Piece]:
        table, self._table = self._table, None
        if table:
            yield replace(table, closes=True)
