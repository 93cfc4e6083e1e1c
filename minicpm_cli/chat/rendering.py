"""Pieces of markdown as rows of the terminal: everything the model wrote is shown, nothing of it is obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.segment import ControlType, Segment
from rich.syntax import Syntax
from rich.text import Text

from minicpm_cli.chat.inline import inline
from minicpm_cli.chat.pieces import Code, Piece, Prose, Rule, Table
from minicpm_cli.chat.rows import Rows
from minicpm_cli.chat.tables import Columns
from minicpm_cli.chat.terminal import neutral

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_CONTEXT = 40  # lines before the new ones that the highlighter reads; all of a block of 300 took it 7 times as long
_THEME = "ansi_dark"  # the terminal's own colours, on its own background
_CODE_MARGIN = "  "
_BAR = "▌ "


class Page:
    """Writes the pieces of one text in order; knows what was written before, for blank rows and for colours."""

    def __init__(self, console: Console) -> None:
        self.rows = Rows()
        self._console = console
        self._before = ""  # the last lines of the code block that is open
        self._columns: Columns | None = None  # of the table that is open
        self._quotes = 0  # around what was written last
        self._first = True

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Prose):
                self._prose(piece)
            elif isinstance(piece, Code):
                self._code(piece)
            elif isinstance(piece, Table):
                self._table(piece)
            else:
                self._rule(piece)
            self._quotes = piece.quotes

    def _prose(self, prose: Prose) -> None:
        rows = self.rows
        if prose.opens:
            self._gap(prose, prose.gap)
            bars, space = _bars(prose.quotes), " " * (prose.indent + bool(prose.marker or prose.indent))
            bullet = "• " if prose.marker in ("-", "*", "+") else prose.marker and f"{prose.marker} "
            hanging = space + " " * len(bullet)
            rows.begin(Text.assemble(bars, space, (bullet, "bold cyan")), Text.assemble(bars, hanging))
        for part in prose.parts:
            text = inline(part)
            if prose.level:
                text.stylize_before(_heading(prose.level))
            rows.write(text)
        if prose.closes:
            rows.close()

    def _code(self, code: Code) -> None:
        if code.opens:
            self._gap(code, True)
            self._before = ""
        margin = Text(_bars(code.quotes) + " " * code.indent + _CODE_MARGIN)
        if code.opens and code.language:
            room = max(1, self.rows.width - len(margin))
            self.rows.line(Text.assemble(margin, (set_cell_size(neutral(code.language), room).rstrip(), "dim")))
        for line in self._highlighted(code).split("\n", include_separator=True):
            if line.plain != "\n" and not self.rows.column:
                self.rows.code(margin)
            self.rows.code(line[: len(line.plain.rstrip("\n"))])
            if line.plain.endswith("\n"):
                self.rows.end()

    def _highlighted(self, code: Code) -> Text:
        """The new part of it, with colours that depend on what came before; those of a word on what follows, too."""
        text = self._before + code.text
        self._before = "".join(text.splitlines(keepends=True)[-_CONTEXT:])
        coloured = _syntax(code.language).highlight(text) if code.text else Text()
        if not coloured.plain.startswith(text):
            return Text(code.text)
        return coloured[len(text) - len(code.text) : len(text)]

    def _table(self, table: Table) -> None:
        if table.opens:
            self._gap(table, True)
            self._columns = Columns.measured(table)
        if self._columns:
            room = self.rows.width - len(_bars(table.quotes)) - table.indent
            for row in self._columns.rows(self._console, table, room):
                self.rows.line(Text.assemble(_bars(table.quotes), " " * table.indent, row))

    def _rule(self, rule: Rule) -> None:
        self._gap(rule, rule.gap)
        self.rows.line(Text.assemble(_bars(rule.quotes), ("─" * max(1, min(40, self.rows.width // 2)), "dim")))

    def _gap(self, piece: Piece, wanted: bool) -> None:
        if wanted and not self._first:
            self.rows.line(Text(_bars(min(piece.quotes, self._quotes)).rstrip()))
        self._first = False


class Segments:
    """Text for `Console.print` that is written as it is: nothing is wrapped, cut or filled."""

    def __init__(self, *parts: Text | str) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self._parts:
            if isinstance(part, Text):
                yield from part.render(console)
            elif part:
                yield Segment(part, None, [(ControlType.CARRIAGE_RETURN,)])  # to rich a control code


def _bars(quotes: int) -> str:
    return _BAR * quotes


def _heading(level: int) -> str:
    return {1: "bold underline", 2: "bold", 3: "bold"}.get(level, "italic")


@cache
def _syntax(language: str) -> Syntax:
    return Syntax("", language or "text", theme=_THEME, tab_size=0)
