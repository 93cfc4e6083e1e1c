"""One line on stderr that says what takes its time, and is gone when it is done."""

from __future__ import annotations

import time

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.units import size

_REDRAW_SECONDS = 0.1
_QUIET_SECONDS = 2.0  # what takes less needs no estimate
_WIDTH = 24
_ERASE = "\r\x1b[2K"


class ProgressLine:
    """Call it with (what, done, total): a bar at a terminal; elsewhere a line for each `what` that moves bytes."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._what = ""
        self._drawn = 0.0
        self._begun = time.monotonic()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        self._erase()

    def __call__(self, what: str, done: int, total: int | None, unit: str = "bytes") -> None:
        if self._terminal.quiet:
            return
        if what != self._what:
            self._what, self._begun, self._drawn = what, time.monotonic(), 0.0
            if not self._terminal.err_tty and unit == "bytes" and total:
                self._terminal.note(f"{what} ({size(total)})")
        if self._terminal.err_tty:
            self._draw(done, total, unit)

    def _draw(self, done: int, total: int | None, unit: str) -> None:
        now = time.monotonic()
        if now - self._drawn < _REDRAW_SECONDS and done != total:
            return
        self._drawn = now
        self._terminal.err.write(f"{_ERASE}{self._row(done, total, unit, now)}")
        self._terminal.err.flush()

    def _row(self, done: int, total: int | None, unit: str, now: float) -> str:
        """In a narrow window without the bar, then with a shorter name: what wraps to a second row cannot be erased."""
        columns = self._terminal.columns
        if not total:
            return f"{_cut(self._what, columns - 5)} ..."
        filled = min(_WIDTH, _WIDTH * done // total)
        bar, state = f" [{'#' * filled}{'.' * (_WIDTH - filled)}]", self._state(done, total, unit, now)
        whole = f"{self._what}{bar} {state}"
        return whole if len(whole) < columns else f"{_cut(self._what, columns - 2 - len(state))} {state}"[: columns - 1]

    def _state(self, done: int, total: int, unit: str, now: float) -> str:
        if unit != "bytes":
            return f"{done}/{total} {unit}{self._left(done, total, now)}"
        rate = done / (now - self._begun) if now > self._begun else 0.0
        return f"{size(done)} of {size(total)}" + (f", {size(rate)}/s" if rate else "")

    def _left(self, done: int, total: int, now: float) -> str:
        """How long it will still take, once that can be told and is worth telling."""
        elapsed = now - self._begun
        if not done or elapsed < _QUIET_SECONDS:
            return ""
        minutes, seconds = divmod(round(elapsed * (total - done) / done), 60)
        return f", {minutes}:{seconds:02} left"

    def _erase(self) -> None:
        if self._drawn:
            self._terminal.err.write(_ERASE)
            self._terminal.err.flush()
            self._drawn = 0.0


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"
