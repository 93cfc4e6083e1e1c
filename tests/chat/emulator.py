"""A terminal that remembers: its screen, and what scrolled off it, as a person finds it by scrolling up."""

from __future__ import annotations

import io
import re

import pyte


class _Screen(pyte.Screen):
    """Rows that scroll off the top are kept."""

    def __init__(self, columns: int, rows: int) -> None:
        self.scrolled: list[str] = []
        super().__init__(columns, rows)

    def index(self) -> None:
        if self.cursor.y == self.lines - 1:
            self.scrolled.append("".join(self.buffer[0][x].data for x in range(self.columns)).rstrip())
        super().index()

    def draw(self, data: str) -> None:
        for part in re.split("(\u200d)", data):  # pyte drops what follows a joiner in one call
            super().draw(part)

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


class Emulator(io.StringIO):
    """Write to it as to a terminal. With `reflow`, a narrower window breaks long rows in two, as VTE does."""

    def __init__(self, rows: int = 24, columns: int = 80, *, reflow: bool = False) -> None:
        super().__init__()
        self._screen = _Screen(columns, rows)
        self._stream = pyte.Stream(self._screen)
        self._reflow = reflow
        self.written = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written += len(text)
        self._stream.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))  # as the line discipline does
        return len(text)

    def size(self) -> tuple[int, int]:
        return self._screen.columns, self._screen.lines

    def resize(self, rows: int, columns: int) -> None:
        if self._reflow and columns < self._screen.columns:
            above = [*self._screen.scrolled, *self.screen[: self._screen.cursor.y + 1]]
            self._screen = _Screen(columns, rows)
            self._stream = pyte.Stream(self._screen)
            self._stream.feed("\r\n".join(above))
        else:
            self._screen.resize(rows, columns)

    @property
    def cursor_hidden(self) -> bool:
        return bool(self._screen.cursor.hidden)

    @property
    def screen(self) -> list[str]:
        return [row.rstrip() for row in self._screen.display]

    @property
    def text(self) -> str:
        """All rows, from the first that scrolled off to the last on the screen."""
        return "\n".join([*self._screen.scrolled, *self.screen]).rstrip()
