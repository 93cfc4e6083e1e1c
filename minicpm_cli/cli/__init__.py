"""The program's door, and the only place that ends the process. Ctrl-C is heard before anything else is read."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from minicpm_cli.cli.runtime import Runtime

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, runtime: Runtime | None = None) -> NoReturn:
    """Runs the command in `argv` (default: this process's arguments) and exits."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the user has it ignored
    if heard:
        signal.signal(signal.SIGINT, _leave)
    _fill_closed_streams()
    from minicpm_cli.cli.runtime import Runtime
    from minicpm_cli.settings import calm_waiting

    calm_waiting()
    try:
        code = exit_code(sys.argv[1:] if argv is None else argv, runtime or Runtime(), heard=heard)
    except KeyboardInterrupt:  # while the first one is being said
        _leave()
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is said; what the interpreter still tidies up may be cut off
    sys.exit(code)


def exit_code(argv: Sequence[str], runtime: Runtime, *, heard: bool = False) -> int:
    """The exit code of a command line. Ends the process itself only when the reader of its output has gone.

    `heard`: a Ctrl-C raises KeyboardInterrupt from the moment on at which that can be told to the user.
    """
    from minicpm_cli.cli import process

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return process.exit_code(argv, runtime)


def _fill_closed_streams() -> None:
    """Else a file of ours takes the number of a stream that the caller has closed, and libraries' words go there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _leave(number: int = 0, frame: FrameType | None = None) -> NoReturn:
    """While modules are read there is nothing to tidy up, and an exception would come out of any of them."""
    with suppress(OSError):  # stderr is closed
        os.write(2, b"minicpm: interrupted\n")
    os._exit(_INTERRUPTED)
