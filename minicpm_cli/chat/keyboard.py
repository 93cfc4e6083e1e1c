"""What is typed: its encoding; while a reply comes it waits for the next prompt, unseen, and breaks nothing drawn."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def unechoed() -> Iterator[None]:
    """Within this context the terminal of stdin, if it is one and ours, shows nothing of what is typed."""
    keyboard = _keyboard()
    if keyboard is None:
        yield
        return
    import termios

    with _changed(keyboard, lambda flags: flags & ~(termios.ECHO | termios.ECHONL)):
        yield


@contextmanager
def echoed() -> Iterator[None]:
    """Within `unechoed`, for another program that reads from the terminal: what is typed is shown."""
    keyboard = _keyboard()
    if keyboard is None:
        yield
        return
    import termios

    with _changed(keyboard, lambda flags: flags | termios.ECHO):
        yield


@contextmanager
def _changed(keyboard: int, change: Callable[[int], int]) -> Iterator[None]:
    """The terminal's local flags."""
    import termios

    before, changed = termios.tcgetattr(keyboard), termios.tcgetattr(keyboard)
    changed[3] = change(changed[3])
    termios.tcsetattr(keyboard, termios.TCSANOW, changed)
    try:
        yield
    finally:
        _restore(keyboard, before)


def _keyboard() -> int | None:
    """The file descriptor; None also in a background process, which must not touch the terminal."""
    if sys.platform == "win32":
        return None
    try:
        number = sys.stdin.fileno()
        return number if os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp() else None
    except (AttributeError, ValueError, OSError):  # no stdin, or none of the system's
        return None


def _restore(keyboard: int, attributes: list[object]) -> None:
    import termios
    from contextlib import suppress

    with suppress(termios.error):  # the terminal is gone
        termios.tcsetattr(keyboard, termios.TCSANOW, attributes)  # type: ignore[arg-type]


def read_utf8(stream: TextIO) -> None:
    """What is typed is UTF-8 in the C locale, too, where Python without its UTF-8 mode takes it for ASCII."""
    if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
