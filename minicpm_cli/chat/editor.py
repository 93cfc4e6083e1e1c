"""The user's own editor for a long question, or for a reply that is to be put right."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minicpm_cli.chat.keyboard import echoed
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.settings import editor

_KNOWN = ("editor", "nano", "vim", "vi", "emacs", "notepad")


def edited(text: str) -> str | None:
    """`text` as the user leaves it; None when the editor ends with an error (:cq in vim). A final newline goes."""
    command = _command()
    with tempfile.TemporaryDirectory(prefix="minicpm-") as folder:
        path = Path(folder, "message.md")
        path.write_text(text, encoding="utf-8", errors="replace")
        if _run([*command, str(path)]) != 0:
            return None
        try:
            return path.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
        except OSError as error:
            raise FileError(f"the editor left no text behind: {error.strerror or error}") from None


def _command() -> list[str]:
    wanted = editor()
    if wanted:
        try:
            return shlex.split(wanted)
        except ValueError as error:
            raise UsageError(f"$VISUAL or $EDITOR is {wanted!r}: {error}") from None
    found = next((name for name in _KNOWN if shutil.which(name)), None)
    if found is None:
        raise UsageError("there is no editor: set the variable EDITOR, e.g. EDITOR=nano")
    return [found]


def _run(command: list[str]) -> int:
    with _unheard(), echoed(), ExitStack() as streams:
        try:
            terminal = streams.enter_context(open("/dev/tty", "r+b", buffering=0)) if os.name != "nt" else None
        except OSError:  # no terminal: some editors need none
            terminal = None
        try:
            source = terminal or subprocess.DEVNULL  # our own stdin may hold the next questions
            return subprocess.run(command, stdin=source, stdout=terminal, check=False).returncode
        except OSError as error:
            raise UsageError(f"cannot run the editor {command[0]!r}: {error.strerror or error}. Set EDITOR.") from None


@contextmanager
def _unheard() -> Iterator[None]:
    """Ctrl-C means the editor while it runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _nothing(number: int, frame: object) -> None:
    """A handler: what is ignored stays ignored in the editor, and a handler does not."""
