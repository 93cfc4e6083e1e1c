"""Where the user's lines come from: an editable line with history and completion, or a pipe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from minicpm_cli.chat.attach import decode
from minicpm_cli.chat.commands import COMMANDS
from minicpm_cli.chat.terminal import Terminal

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_PATH_COMMANDS = ("/file ", "/load ", "/save ")


class Lines(Protocol):
    """`read` raises EOFError when there are no more, KeyboardInterrupt on Ctrl-C at the prompt.

    `typed` tells whether a person is there to correct what was wrong.
    """

    typed: bool

    def read(self) -> str: ...


class PipedLines:
    """Each line of a pipe is a turn; a backslash at its end joins the next one to it."""

    typed = False

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._number = 0

    def read(self) -> str:
        text = self._line()
        while text.endswith("\\"):
            try:
                text = f"{text[:-1]}\n{self._line()}"
            except EOFError:
                return text[:-1]
        return text

    def _line(self) -> str:
        data = self._pipe.readline()
        self._number += 1
        if not data:
            raise EOFError
        return decode(data, f"line {self._number} of stdin").rstrip("\r\n")


class TypedLines:
    """prompt_toolkit's line editor: Enter sends, Alt-Enter or a trailing backslash begins a new line."""

    typed = True

    def __init__(self, terminal: Terminal, history: Path, sessions: Iterable[str]) -> None:
        self._session = _session(terminal, history, list(sessions))

    def read(self) -> str:
        return self._session.prompt("> ")


def _session(terminal: Terminal, history: Path, sessions: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    return PromptSession(
        history=FileHistory(_private(history)),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
        completer=_completer(sessions),
        complete_while_typing=False,
        output=create_output(terminal.out if terminal.out_tty else terminal.err),
    )


def _private(path: Path) -> str:
    """The history file, made for the user's eyes alone before anything is written to it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    return str(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-g")
    def edit(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor(validate_and_handle=False)

    return keys


def _completer(sessions: list[str]) -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        """Command names; then paths and session names where a command takes them."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
            text = document.text_before_cursor
            if not text.startswith("/"):
                return
            if " " not in text:
                yield from (
                    Completion(c.name, -len(text), display_meta=c.help) for c in COMMANDS if _fits(c.name, text)
                )
            elif text.startswith(_PATH_COMMANDS):
                word = text.split(" ", 1)[1]
                if not text.startswith("/file"):
                    yield from (Completion(name, -len(word)) for name in sessions if name.startswith(word))
                yield from paths.get_completions(Document(word), complete_event)

    return Commands()


def _fits(name: str, start: str) -> bool:
    return name.startswith(start)
