"""What a run changes of its process while it lasts: signals that end it, and how its threads take turns."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

# A decode step of a small model takes 2 ms on a GPU. By default the thread that reads ahead may keep the step's
# thread from running for 5 ms.
_TURN_SECONDS = 0.0005


@contextmanager
def brisk_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Interrupts:
    """Raises KeyboardInterrupt where the signal comes, and once more at the next `check`: Python drops an exception
    that comes out of a destructor or a callback of the garbage collector.
    """

    def __init__(self) -> None:
        self._come = False

    def check(self) -> None:
        if self._come:
            self._come = False
            raise KeyboardInterrupt

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._come = True
        raise KeyboardInterrupt


@contextmanager
def terminable() -> Iterator[Interrupts]:
    """SIGTERM and a closed terminal end a run as Ctrl-C does: finished rows are kept. What nohup ignores stays so."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    with ExitStack() as stack:
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, number, signal.signal(number, interrupts))
        yield interrupts
