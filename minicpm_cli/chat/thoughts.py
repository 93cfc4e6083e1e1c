"""What a model thinks before it answers: dimmed on stderr, or folded into a row that says how much it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from minicpm_cli.chat.breaks import atoms
from minicpm_cli.chat.terminal import DIM, RESET, Terminal, neutral

if TYPE_CHECKING:
    from minicpm_cli.chat.rows import Rows

_COUNT_SECONDS = 0.2
_ERASE = "\r\x1b[K"


class Thoughts:
    """`show` what comes, `end` when an answer does. At a terminal rows end between words."""

    def __init__(self, terminal: Terminal, size: Callable[[], tuple[int, int]], clock: Callable[[], float]) -> None:
        self._terminal, self._size, self._clock = terminal, size, clock
        self._fancy = terminal.err_tty and not terminal.plain
        self._held = ""  # the word that is not complete
        self._words = 0
        self._begun: float | None = None
        self._counted = 0.0  # when the count was shown
        self._rows: Rows | None = None
        self._open = False  # the last row has no end yet

    def show(self, text: str) -> None:
        if self._begun is None:
            self._begun = self._clock()
        self._held += text
        *whole, (start, _) = atoms(self._held) if self._held else [(0, 0)]
        done, self._held = self._held[:start], self._held[start:]
        self._words += len(whole)
        if self._terminal.folded:
            self._count()
        elif self._fancy:
            self._append(done)
        else:
            self._terminal.thought(text)
            self._open = not text.endswith("\n")

    def end(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            return
        held, self._held = self._held, ""
        if self._terminal.folded:
            self._sum_up(self._clock() - begun, self._words + bool(held.strip()))
        elif self._fancy:
            self._append(held.rstrip())
        if self._open:
            self._terminal.line("")
        self._rows, self._words, self._counted, self._open = None, 0, 0.0, False

    def _append(self, text: str) -> None:
        from rich.text import Text

        from minicpm_cli.chat.rows import Rows

        if not text:
            return
        rows = self._rows = self._rows or Rows()
        rows.resize(self._size()[0])
        rows.write(Text(neutral(text)))
        self._open = rows.column > 0
        written = rows.take().plain.split("\n")
        self._write("\n".join(f"{DIM}{row}{RESET}" if row else "" for row in written))

    def _count(self) -> None:
        now = self._clock()
        if self._fancy and not self._terminal.quiet and now - self._counted >= _COUNT_SECONDS:
            self._counted = now
            self._write(f"{_ERASE}{DIM}thinking: {self._words} words{RESET}")

    def _sum_up(self, seconds: float, words: int) -> None:
        if self._counted:
            self._write(_ERASE)
        self._terminal.note(f"thought for {seconds:.1f} s, {words} words (/think show)")

    def _write(self, text: str) -> None:
        self._terminal.err.write(text)
        self._terminal.err.flush()
