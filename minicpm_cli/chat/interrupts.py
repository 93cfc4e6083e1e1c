"""What may end a reply before its time: Ctrl-C, between two tokens where possible, and a terminal that is closed."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_ENDINGS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name))


class Interrupts:
    """Within this context Ctrl-C sets `pressed` once a reply has `begun`, and raises KeyboardInterrupt before.

    A prompt that is still being read yields nothing between which to stop, hence the difference. A second press always
    raises. A closed terminal and a request to end raise SystemExit, so that what came of the reply can be kept; while
    it is being kept (`keeping`), nothing raises.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.begun = False
        self.keeping = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {signal.SIGINT: signal.signal(signal.SIGINT, self._press)}
            for number in _ENDINGS:
                if signal.getsignal(number) == signal.SIG_DFL:  # nohup's own wish stays
                    self._before[number] = signal.signal(number, self._end)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _press(self, number: int, frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        if not self.keeping and (again or not self.begun):
            raise KeyboardInterrupt

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self.keeping:
            raise SystemExit(128 + number)
