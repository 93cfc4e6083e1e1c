"""How a reply appears while it comes: as it is, or as markdown of which only what is still open is ever redrawn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TextIO

from minicpm_cli.chat.markdown import Blocks, Piece
from minicpm_cli.chat.terminal import Terminal, neutral
from minicpm_cli.types import Channel

if TYPE_CHECKING:
    from rich.live import Live

Size = Callable[[], tuple[int, int]]  # columns, rows
Clock = Callable[[], float]  # seconds
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
    """Finished pieces are printed once and stay; below them the open one is drawn anew, cut to half the screen.

    Drawing takes at most a fifth of the time, also where the terminal or the machine is slow.
    """

    def __init__(self, terminal: Terminal, *, size: Size | None = None, clock: Clock = time.monotonic) -> None:
        from rich.console import Console

        from minicpm_cli.chat.rendering import Rows, Tail

        color = terminal.color
        self._console = Console(file=terminal.out, highlight=False, markup=False, emoji=False, no_color=not color)
        self._thinking = PlainView(terminal)
        self._size = size or partial(_size, terminal.out)
        self._clock = clock
        self._blocks = Blocks()
        self._finished: list[Piece] = []  # and not printed yet
        self._rows, self._tail = Rows(), Tail()
        self._live: Live | None = None
        self._due = clock()  # when to draw next

    def show(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel == "think":
            self._lift()
            self._thinking.show(channel, text)
            return
        self._thinking.end()
        self._finished += self._blocks.feed(neutral(text))
        if self._clock() >= self._due:
            self._draw()

    def end(self) -> None:
        from minicpm_cli.chat.rendering import Rows

        self._thinking.end()
        self._finished += self._blocks.close()
        self._lift()
        self._rows = Rows()

    def _draw(self) -> None:
        """One write: the open piece goes, what is finished takes its place, what is open now comes below."""
        from rich.console import Group

        start = self._clock()
        self._console.size = self._size()
        if self._live is None:
            self._live = self._started()
        printed, self._finished = self._rows.of(self._finished), []
        self._tail.rows = self._rows.copy().of(self._blocks.preview())
        if printed:
            self._console.print(Group(*printed))
        else:
            self._live.refresh()
        end = self._clock()
        self._due = end + max(_REDRAW_SECONDS, 4 * (end - start))

    def _started(self) -> Live:
        from rich.live import Live

        live = Live(self._tail, console=self._console, auto_refresh=False, transient=True)
        live.start()
        self._console.show_cursor(True)  # a process that is killed or stopped leaves it as it is
        return live

    def _lift(self) -> None:
        """Takes the open piece off the screen; what is finished stays."""
        if self._finished:
            self._draw()
        live, self._live = self._live, None
        self._tail.rows = []
        if live is not None:
            live.stop()


def _size(out: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal itself; the variables COLUMNS and LINES do not change with its window."""
    try:
        columns, rows = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24
