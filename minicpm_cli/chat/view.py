"""How a reply appears while it comes: as it is, or as markdown. What was written is never taken back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TextIO

from minicpm_cli.chat.markdown import Blocks
from minicpm_cli.chat.terminal import Terminal, neutral
from minicpm_cli.chat.thoughts import Thoughts
from minicpm_cli.chat.waiting import Waiting
from minicpm_cli.types import Channel

Size = Callable[[], tuple[int, int]]  # columns, rows
Clock = Callable[[], float]  # seconds
_REDRAW_SECONDS = 0.04


class View(Protocol):
    def show(self, channel: Channel, text: str) -> None: ...
    def end(self) -> None: ...


def view_for(terminal: Terminal) -> View:
    """The view of a reply that is awaited from now on."""
    return Awaited(MarkdownView(terminal) if terminal.fancy else PlainView(terminal), Waiting(terminal))


class Awaited:
    """Until a view has something to show, it is said that it is waited for."""

    def __init__(self, view: View, waiting: Waiting) -> None:
        self._view, self._waiting = view, waiting
        waiting.start()

    def show(self, channel: Channel, text: str) -> None:
        if text:
            self._waiting.stop()
        self._view.show(channel, text)

    def end(self) -> None:
        self._waiting.stop()
        self._view.end()


class PlainView:
    """Text as it comes; thinking on stderr, and a line break where one ends and the other begins."""

    def __init__(self, terminal: Terminal, *, clock: Clock = time.monotonic) -> None:
        self._terminal = terminal
        self._thoughts = Thoughts(terminal, partial(_size, terminal.err), clock)
        self._open = False  # the last line of the answer has no newline yet

    def show(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel == "think":
            self._thoughts.show(text)
            return
        self._thoughts.end()
        self._terminal.answer(text)
        self._open = not text.endswith("\n")

    def end(self) -> None:
        self._thoughts.end()
        if self._open:
            self._terminal.answer("\n")
            self._open = False


class MarkdownView:
    """Pieces are appended as soon as they can change no more, and the window wraps or scrolls them as it likes.

    All that is ever erased is the number of a table's rows that wait: a terminal may tell only after a while that its
    window changed, and what is erased then may be elsewhere. Drawing takes at most a fifth of the time, also where the
    terminal or the machine is slow.
    """

    def __init__(self, terminal: Terminal, *, size: Size | None = None, clock: Clock = time.monotonic) -> None:
        from rich.console import Console

        from minicpm_cli.chat.rendering import Page

        color = terminal.color
        self._console = Console(file=terminal.out, highlight=False, markup=False, emoji=False, no_color=not color)
        self._size, self._clock = size or partial(_size, terminal.out), clock
        self._thoughts = Thoughts(terminal, size or partial(_size, terminal.err), clock)
        self._text = ""  # what came since the last drawing
        self._blocks, self._page = Blocks(), Page(self._console)
        self._status = ""  # what stands in the row and is to be erased
        self._due = clock()  # when to draw next

    def show(self, channel: Channel, text: str) -> None:
        if not text:
            return
        if channel == "think":
            self._leave_row()
            self._thoughts.show(text)
            return
        self._thoughts.end()
        self._text += neutral(text)
        if self._clock() >= self._due:
            self._draw()

    def end(self) -> None:
        from minicpm_cli.chat.rendering import Page

        self._thoughts.end()
        self._draw(close=True)
        self._page = Page(self._console)

    def _draw(self, *, close: bool = False) -> None:
        from minicpm_cli.chat.rendering import Segments

        start = self._clock()
        erase = f"\x1b[{len(self._status)}D\x1b[K" if self._status else ""
        text, self._text = self._text, ""
        self._page.rows.resize(self._size()[0])
        self._page.write([*self._blocks.feed(text), *(self._blocks.close() if close else ())])
        rows = self._blocks.rows
        self._status = f"... {rows} rows" if rows and not self._page.rows.column else ""
        self._console.print(Segments(erase, self._page.rows.take(), self._status), crop=False, end="")
        end = self._clock()
        self._due = end + max(_REDRAW_SECONDS, 4 * (end - start))

    def _leave_row(self) -> None:
        """What is thought in the middle of an answer begins in a row of its own."""
        if self._text:
            self._draw()
        if self._page.rows.column:
            self._page.rows.end()
            self._draw()


def _size(out: TextIO) -> tuple[int, int]:
    """Columns and rows of the terminal itself; the variables COLUMNS and LINES do not change with its window."""
    try:
        columns, rows = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        columns, rows = 0, 0
    return columns or 80, rows or 24
