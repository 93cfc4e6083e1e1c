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


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal end a run as Ctrl-C does: finished rows are kept. What nohup ignores stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as stack:
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, number, signal.signal(number, _interrupt))
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
