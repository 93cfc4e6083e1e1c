"""Ctrl-C while a reply comes: stop between two tokens where possible, so that nothing is left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Within this context Ctrl-C sets `pressed` once a reply has `begun`, and raises KeyboardInterrupt before.

    A prompt that is still being read yields nothing between which to stop, hence the difference. A second press always
    raises.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.begun = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        again, self.pressed = self.pressed, True
        if again or not self.begun:
            raise KeyboardInterrupt
