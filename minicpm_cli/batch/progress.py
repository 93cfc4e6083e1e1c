"""How far a run is, on stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from minicpm_cli.batch.summary import Counts

LINE_SECONDS = 10.0
_BAR_SECONDS = 0.1


class Progress(Protocol):
    def start(self) -> None: ...
    def update(self, counts: Counts) -> None: ...
    def stop(self) -> None: ...
    def say(self, text: str) -> None: ...


def choose_progress(wanted: bool, stream: TextIO | None = None) -> Progress:
    stream = sys.stderr if stream is None else stream
    if not wanted:
        return Quiet()
    return Bar(stream) if stream.isatty() else Lines(stream)


class Quiet:
    def start(self) -> None: ...
    def update(self, counts: Counts) -> None: ...
    def stop(self) -> None: ...
    def say(self, text: str) -> None: ...


class Lines:
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._begun = self._said = clock()

    def start(self) -> None:
        self._begun = self._said = self._clock()

    def update(self, counts: Counts) -> None:
        now = self._clock()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self.say(status(counts, now - self._begun))

    def stop(self) -> None:
        self._stream.flush()

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Bar:
    """rich is imported here, where a terminal needs it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._clock, self._begun, self._drawn = clock, clock(), -_BAR_SECONDS
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = RichProgress(*columns, console=Console(file=stream), transient=True, auto_refresh=True)
        self._task = self._bar.add_task("", total=None)

    def start(self) -> None:
        self._begun = self._clock()
        self._bar.start()

    def update(self, counts: Counts) -> None:
        now = self._clock()
        if now - self._drawn < _BAR_SECONDS:
            return
        self._drawn = now
        done = counts.skipped + counts.finished
        self._bar.update(self._task, total=counts.total, completed=done, description=status(counts, now - self._begun))

    def stop(self) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


def status(counts: Counts, seconds: float) -> str:
    """'120/500 rows, 3 failed, 1,234 tok/s in, 456 tok/s out, 0:01:40 left'."""
    done = counts.skipped + counts.finished
    rows = f"{done:,} rows" if counts.total is None else f"{done:,}/{counts.total:,} rows"
    rate = 1 / seconds if seconds > 0 else 0.0
    parts = [
        rows,
        f"{counts.failed:,} failed",
        f"{counts.prompt_tokens * rate:,.0f} tok/s in",
        f"{counts.completion_tokens * rate:,.0f} tok/s out",
    ]
    return ", ".join(parts + _left(counts, done, rate))


def _left(counts: Counts, done: int, rate: float) -> list[str]:
    if counts.total is None or not counts.finished or not rate:
        return []
    left = round(max(counts.total - done, 0) / (counts.finished * rate))
    return [f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"]
