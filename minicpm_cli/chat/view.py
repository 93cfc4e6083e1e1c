"""How a reply appears while it comes: as it is, or as markdown of which only the last block is ever redrawn."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from minicpm_cli.chat.markdown import Blocks
from minicpm_cli.chat.terminal import Terminal, neutral
from minicpm_cli.types import Channel

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.markdown import Markdown

_REDRAW_SECONDS = 0.08


class View(Protocol):
    def show(self, channel: Channel, text: str) -> None: ...
    def end(self) -> None: ...


def view_for(terminal: Terminal) -> View:
    return MarkdownView(terminal) if terminal.fancy else PlainView(terminal)


class PlainView:
    """Text as it comes; thinking on stderr, and a line break where one ends and the other begins."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._open: dict[Channel, bool] = {"think": False, "answer": False}  # the last line has no newline yet

    def show(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel == "answer":
            self._end_thought()
            self._terminal.answer(text)
        else:
            self._terminal.thought(text)
        self._open[channel] = not text.endswith("\n")

    def end(self) -> None:
        self._end_thought()
        if self._open["answer"]:
            self._terminal.answer("\n")
            self._open["answer"] = False

    def _end_thought(self) -> None:
        if self._open["think"]:
            self._terminal.line("")
            self._open["think"] = False


class MarkdownView:
    """Finished blocks are printed once and stay; the open one is drawn anew, cut to what fits the screen."""

    def __init__(self, terminal: Terminal) -> None:
        from rich.console import Console

        color = terminal.color
        self._console = Console(file=terminal.out, highlight=False, markup=False, emoji=False, no_color=not color)
        self._thinking = PlainView(terminal)
        self._blocks = Blocks()
        self._live: Live | None = None
        self._drawn = 0.0
        self._printed = False

    def show(self, channel: Channel, text: str) -> None:
        if channel == "think":
            self._finish("")
            self._thinking.show(channel, text)
            return
        self._thinking.end()
        for block in self._blocks.feed(neutral(text)):
            self._finish(block)
        if time.monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def end(self) -> None:
        self._thinking.end()
        self._finish(self._blocks.close())
        self._printed = False

    def _draw(self) -> None:
        from rich.live import Live

        self._drawn = time.monotonic()
        if not self._blocks.rest.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(_Tail(self._blocks.rest, gap=self._printed), refresh=True)

    def _finish(self, block: str) -> None:
        """Takes the live region away and prints the finished block where it was."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if not block.strip():
            return
        if self._printed:
            self._console.print()
        self._console.print(_markdown(block))
        self._printed = True

    def __del__(self) -> None:  # a view dropped half-way leaves the cursor visible
        with suppress(Exception):
            if self._live is not None:
                self._live.stop()


class _Tail:
    """The last lines of a block that is still being written, never more than fit the screen."""

    def __init__(self, text: str, *, gap: bool) -> None:
        self._text, self._gap = text, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(_markdown(self._text), options, pad=False)
        room = max(1, console.size.height - 2)
        shown = [[], *lines] if self._gap and len(lines) < room else lines[-room:]
        for line in shown:
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Markdown:
    from rich.markdown import Markdown

    return Markdown(text, hyperlinks=False)
