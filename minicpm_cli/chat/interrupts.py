"""What may end a reply before its time: Ctrl-C, between two tokens where possible, and a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDINGS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name))


@contextmanager
def orderly_end() -> Iterator[None]:
    """Within this context a closed terminal and a request to end raise SystemExit: the terminal is left as it was."""
    before = _handled(dict.fromkeys(_ENDINGS, _end))
    try:
        yield
    finally:
        _restore(before)


class Interrupts:
    """Within this context Ctrl-C sets `pressed` once a reply has `begun`, and raises KeyboardInterrupt before.

    A prompt that is still being read yields nothing between which to stop, hence the difference. A second press always
    raises. A closed terminal and a request to end raise SystemExit, so that what came of the reply can be kept; while
    it is being kept (`keeping`), nothing raises: that is made up for at the end.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.begun = False
        self.keeping = False
        self._late: int | None = None  # the signal that came while the reply was kept
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = _handled({signal.SIGINT: self._press, **dict.fromkeys(_ENDINGS, self._end)})
        return self

    def __exit__(self, *error: object) -> None:
        _restore(self._before)
        if self._late is not None:
            raise SystemExit(128 + self._late)

    def _press(self, number: int, frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        if not self.keeping and (again or not self.begun):
            raise KeyboardInterrupt

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.keeping:
            raise SystemExit(128 + number)
        self._late = number


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _handled(handlers: dict[int, Any]) -> dict[int, Any]:
    """Sets the handlers, but for those of signals that the user has ignored (nohup); what was there before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    ignored = {number for number in _ENDINGS if signal.getsignal(number) == signal.SIG_IGN}
    return {number: signal.signal(number, handler) for number, handler in handlers.items() if number not in ignored}


def _restore(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
