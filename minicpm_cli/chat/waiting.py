"""A row that says that the model still reads, or writes what is not shown yet: on a CPU, that can take minutes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from minicpm_cli.chat.terminal import DIM, RESET, Terminal

_PATIENCE_SECONDS = 1.0  # what takes less needs no word
_ERASE = "\r\x1b[K"


class Waiting:
    """From `start` to `stop`, once a second. Nothing is left of it. Only at a terminal that may be decorated."""

    def __init__(self, terminal: Terminal, seconds: float = _PATIENCE_SECONDS, what: str = "reading") -> None:
        self._terminal, self._seconds, self._what = terminal, seconds, what
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = False

    def start(self) -> None:
        terminal = self._terminal
        if terminal.err_tty and not terminal.plain and not terminal.quiet:
            self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()  # a Ctrl-C that comes here is followed by another `stop`
        self._thread = None
        if self._shown:
            self._write(_ERASE)

    def _tell(self) -> None:
        begun = time.monotonic()
        with suppress(OSError, ValueError):  # a terminal that was closed
            while not self._over.wait(self._seconds):
                self._shown = True
                self._write(f"{_ERASE}{DIM}{self._what}: {time.monotonic() - begun:.0f} s{RESET}")

    def _write(self, text: str) -> None:
        self._terminal.err.write(text)
        self._terminal.err.flush()
