"""A terminal that remembers: its screen, and what scrolled off it, as a person finds it by scrolling up."""

from __future__ import annotations

import io
import re

import pyte

UNFINISHED = re.compile(r"(\r|\x1b(\[[0-?]*[ -/]*|\][^\x07\x1b]*)?)\Z")  # a sequence whose end may be yet to come


class _Screen(pyte.Screen):
    """Rows that scroll off the top are kept, each with whether it goes on in the next one."""

    def __init__(self, columns: int, rows: int) -> None:
        self.scrolled: list[tuple[str, bool]] = []
        self.wraps: dict[int, bool] = {}
        self._drawing = False
        super().__init__(columns, rows)

    def row(self, y: int, columns: int | None = None) -> str:
        return "".join(self.buffer[y][x].data for x in range(self.columns if columns is None else columns))

    def linefeed(self) -> None:
        self.wraps[self.cursor.y] = self._drawing
        super().linefeed()

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.scrolled.append((self.row(0), self.wraps.get(0, False)))
            self.wraps = {y - 1: wraps for y, wraps in self.wraps.items() if y}
        super().index()

    def draw(self, data: str) -> None:
        self._drawing = True
        for part in re.split("(\u200d)", data):  # pyte drops what follows a joiner in one call
            super().draw(part)
        self._drawing = False

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """As xterm does: rows above the cursor scroll off where there is no room, columns are cut."""
        lines, columns = lines or self.lines, columns or self.columns
        while self.cursor.y >= lines:
            row, self.cursor.y = self.cursor.y, self.lines - 1
            self.index()
            self.cursor.y = row - 1
        x, y = self.cursor.x, self.cursor.y
        for below in range(lines, self.lines):
            self.buffer.pop(below, None)
        if lines < self.lines:
            self.lines = lines  # nothing is left below to be cut from the top
        super().resize(lines, columns)
        self.cursor.x, self.cursor.y = min(x, columns), y

    def logical_lines(self) -> list[str]:
        """The rows up to the cursor, those together that the terminal itself had wrapped."""
        here = self.cursor.y
        rows = [*self.scrolled, *((self.row(y), self.wraps.get(y, False)) for y in range(here))]
        rows.append((self.row(here, self.cursor.x), False))
        lines, before = [""], False
        for number, (text, wraps) in enumerate(rows):
            last = number == len(rows) - 1
            text = text if wraps or last else text.rstrip()
            lines[-1:] = [lines[-1] + text] if before or not number else [lines[-1], text]
            before = wraps
        return lines


class Emulator(io.StringIO):
    """Write to it as to a terminal. With `reflow`, lines are wrapped anew in another window, as most terminals do."""

    def __init__(self, rows: int = 24, columns: int = 80, *, reflow: bool = False) -> None:
        super().__init__()
        self._screen = _Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._reflow, self._held = reflow, ""
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += len(text)
        whole = self._held + text
        begun = UNFINISHED.search(whole)  # a change of the window between its halves must not tear it
        whole, self._held = (whole[: begun.start()], begun[0]) if begun else (whole, "")
        self._stream.feed(whole.replace("\r\n", "\n").replace("\n", "\r\n"))  # as the line discipline does
        return len(text)

    def size(self) -> tuple[int, int]:
        return self._screen.columns, self._screen.lines

    def resize(self, rows: int, columns: int) -> None:
        if self._reflow:
            lines = self._screen.logical_lines()
            self._screen = _Screen(columns, rows)
            self._stream = pyte.Stream(self._screen)
            self._stream.feed("\r\n".join(lines))
        else:
            self._screen.resize(rows, columns)

    @property
    def cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    @property
    def cursor(self) -> tuple[int, int]:
        """Its column and row on the screen, from 0."""
        return self._screen.cursor.x, self._screen.cursor.y

    @property
    def screen(self) -> list[str]:
        return [row.rstrip() for row in self._screen.display]

    @property
    def text(self) -> str:
        """All rows, from the first that scrolled off to the last on the screen."""
        return "\n".join([*(row.rstrip() for row, _ in self._screen.scrolled), *self.screen]).rstrip()

    @property
    def lines(self) -> str:
        """The same, rows that the terminal wrapped as one line: what a person copies."""
        return "\n".join(line.rstrip() for line in self._screen.logical_lines()).rstrip()
