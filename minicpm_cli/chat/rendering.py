"""Pieces of markdown as rows of the terminal: everything the model wrote is shown, nothing of it is obeyed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.markdown import Markdown
from rich.padding import Padding
from rich.segment import ControlType, Segment
from rich.syntax import PygmentsSyntaxTheme, Syntax
from rich.text import Text

from minicpm_cli.chat.markdown import Code, Piece, Prose
from minicpm_cli.chat.terminal import neutral

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_CONTEXT = 40  # lines before the new ones that the highlighter reads; all of a block of 300 took it 7 times as long
_THEME = "monokai"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"


class Rows:
    """Renders the pieces of one text in order; knows what was printed before, for blank lines and for colours."""

    def __init__(self, code: Sequence[str] = (), *, first: bool = True) -> None:
        self._code = list(code)  # the last lines of the fence that is open
        self._first = first

    def copy(self) -> Rows:
        return Rows(self._code, first=self._first)

    def of(self, pieces: Iterable[Piece]) -> list[RenderableType]:
        rows: list[RenderableType] = []
        for piece in pieces:
            rows += self._of_code(piece) if isinstance(piece, Code) else self._of_prose(piece)
        return rows

    def _of_prose(self, prose: Prose) -> Iterator[RenderableType]:
        yield from self._gap(prose.gap)
        text = markdown(prose.text)
        if not prose.marker and not prose.indent:
            yield text
        else:
            bullet = "•" if prose.marker in ("-", "*", "+") else prose.marker
            yield Indented(text, prose.indent + 1, bullet and f"{bullet} ")

    def _of_code(self, code: Code) -> Iterator[RenderableType]:
        """The lines on the theme's background, a row of which stands before the first and after the last."""
        edge = Padding("", style=PygmentsSyntaxTheme(_THEME).get_background_style())
        rows: list[RenderableType] = []
        if code.opens:
            yield from self._gap(True)
            self._code = []
            rows.append(edge)
        if code.lines:
            rows.append(self._highlighted(code))
        if code.closes:
            rows.append(edge)
        yield from (Indented(row, code.indent + 1) if code.indent else row for row in rows)

    def _highlighted(self, code: Code) -> Syntax:
        lines = [*self._code, *code.lines]
        new = (len(self._code) + 1, len(lines))
        self._code = lines[-_CONTEXT:]
        text, language = "\n".join(lines), code.language or "text"
        return Syntax(text, language, theme=_THEME, word_wrap=True, padding=(0, 1), line_range=new)

    def _gap(self, wanted: bool) -> Iterator[RenderableType]:
        if wanted and not self._first:
            yield Text("")
        self._first = False


class Indented:
    """What stands inside a list: `columns` of space, and the item's bullet on the first row."""

    def __init__(self, inner: RenderableType, columns: int, bullet: str = "") -> None:
        self._inner, self._columns, self._bullet = inner, columns, bullet

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = " " * min(self._columns, options.max_width // 2) + self._bullet
        room = max(1, options.max_width - cell_len(first))
        for line in console.render_lines(self._inner, options.update(width=room), pad=False) or [[]]:
            yield Segment(first, console.get_style("markdown.item.bullet"))
            yield from line
            yield Segment.line()
            first = " " * cell_len(first)


class Tail:
    """The last rows of what is still open, never more than half the screen, so that a smaller window still holds them.

    While they are drawn the terminal does not wrap: a row stays one row, whatever width a terminal gives an emoji.
    """

    def __init__(self) -> None:
        self.rows: list[RenderableType] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [line for row in self.rows for line in console.render_lines(row, options, pad=False)]
        shown = lines[-max(1, console.size.height // 2) :]
        for number, line in enumerate(shown):
            if number == 0:
                yield _control(_WRAP_OFF)
            yield from line
            if number == len(shown) - 1:
                yield _control(_WRAP_ON)
            yield Segment.line()


def _control(code: str) -> Segment:
    return Segment(code, None, [(ControlType.CARRIAGE_RETURN,)])  # rich passes on what it takes for a control code


def markdown(text: str) -> Markdown:
    """Markdown in which tags, link definitions and line breaks are text: rich would leave them out."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("reference")
    rendered = Markdown("", hyperlinks=False)
    rendered.parsed = parser.parse(text)
    _settle(rendered.parsed)
    return rendered


def _settle(tokens: Iterable[Token]) -> None:
    """Line breaks stay, and entities such as &#x202e; are made harmless once they are characters."""
    for token in tokens:
        token.content = neutral(token.content)
        if token.type == "softbreak":
            token.type, token.tag = "hardbreak", "br"
        _settle(token.children or ())
