"""How far a run is, on stderr: a bar on a terminal, a line every ten seconds elsewhere, nothing when quiet.

Both are drawn by a thread that looks at the counts: the run itself waits for no terminal, and a long silence is told.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from minicpm_cli.batch.summary import Counts

if TYPE_CHECKING:
    from rich.console import RenderableType

LINE_SECONDS = 10.0
_DRAWS = 10  # a second
_PACE_SECONDS = 10.0
_BAR_WIDTH = (8, 30)  # columns, at least and at most
_NARROW = 60  # columns: no bar
_MARGIN = 2

Look = Callable[[], Counts]


class Progress(Protocol):
    def start(self, look: Look) -> None: ...
    def stop(self) -> None: ...
    def say(self, text: str) -> None: ...


def choose_progress(wanted: bool, stream: TextIO | None = None, *, plain: bool = False) -> Progress:
    """`plain`: no bar, be it that the user wants none or that rows go to the same terminal."""
    stream = sys.stderr if stream is None else stream
    if not wanted or stream is None:
        return Quiet()
    if plain or not stream.isatty():
        return Lines(stream)
    from rich.console import Console

    console = Console(file=stream)
    return Lines(stream) if console.is_dumb_terminal else Bar(stream)


class Quiet:
    def start(self, look: Look) -> None: ...
    def stop(self) -> None: ...
    def say(self, text: str) -> None: ...


class Lines:
    def __init__(self, stream: TextIO, seconds: float = LINE_SECONDS) -> None:
        self._stream, self._seconds = stream, seconds
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, look: Look) -> None:
        self._thread = threading.Thread(target=self._work, args=(look, Pace()), name="batch-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, or nobody reads any more: no reason to stop
            print(text, file=self._stream, flush=True)

    def _work(self, look: Look, pace: Pace) -> None:
        while not self._stopped.wait(self._seconds):
            self.say(status(look(), pace))


class Bar:
    """rich is imported here, where a terminal needs it; its own thread draws."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._look: Look = Counts
        self._pace = Pace()
        self._live = Live(
            get_renderable=self._drawn,
            console=self._console,
            transient=True,
            refresh_per_second=_DRAWS,
            redirect_stdout=False,
            vertical_overflow="crop",
        )

    def start(self, look: Look) -> None:
        self._look, self._pace = look, Pace()
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _drawn(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        counts, width = self._look(), self._console.width
        barred = counts.total is not None and width >= _NARROW
        said = status(counts, self._pace, width - _MARGIN - (_BAR_WIDTH[0] if barred else 0))
        grid = Table.grid(padding=(0, 1))
        if not barred:
            grid.add_row(Text(said, no_wrap=True, overflow="crop"))
        else:
            room = min(width - len(said) - _MARGIN, _BAR_WIDTH[1])
            bar = ProgressBar(total=counts.total, completed=counts.skipped + counts.finished, width=room)
            grid.add_row(bar, Text(said, no_wrap=True, overflow="crop"))
        return grid


class Pace:
    """Tokens a second over the last ten seconds, and since the start for what comes rarer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self.begun = clock, clock()
        self._seen = deque([(self.begun, 0, 0)])

    def tokens(self, counts: Counts) -> tuple[float, float]:
        """(in, out)"""
        now = self._clock()
        self._seen.append((now, counts.seen_prompt_tokens, counts.seen_completion_tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _PACE_SECONDS:
            self._seen.popleft()
        then, prompt, completion = self._seen[0]
        seconds = max(now - then, 1e-3)
        return (self._seen[-1][1] - prompt) / seconds, (self._seen[-1][2] - completion) / seconds

    def left(self, counts: Counts) -> int | None:
        """Seconds that the rows of the input will still take; None before the first answer: bad lines take no time."""
        if counts.total is None or not counts.ok:
            return None
        todo = max(counts.total - counts.skipped - counts.finished, 0)
        return round(todo * (self._clock() - self.begun) / counts.finished)


def status(counts: Counts, pace: Pace, width: int | None = None) -> str:
    """'120/500 rows, 3 failed, 1,234 tok/s in, 456 out, 0:01:40 left', or as much of it as `width` holds."""
    done = counts.skipped + counts.finished
    prompt, completion = pace.tokens(counts)
    parts = [
        f"{done:,} rows" if counts.total is None else f"{done:,}/{counts.total:,} rows",
        f"{counts.failed:,} failed",
        f"{prompt:,.0f} tok/s in, {completion:,.0f} out",
    ]
    left = pace.left(counts)
    if left is not None:
        parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
    for dispensable in (2, 2, 1):  # tokens, then the time, then the failures
        if width is None or len(", ".join(parts)) <= width or len(parts) <= dispensable:
            break
        del parts[dispensable]
    return ", ".join(parts)
