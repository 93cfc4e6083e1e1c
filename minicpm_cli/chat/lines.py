"""Where the user's lines come from: an editable line with history and completion, or a pipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, Protocol, TextIO

from minicpm_cli.chat.attach import MOST, decode, unicode
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.editor import edited
from minicpm_cli.chat.keyboard import echoed
from minicpm_cli.chat.overflow import Choice, Excess
from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.disk import private_folder
from minicpm_cli.errors import MinicpmError, UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_QUOTES = '"""'  # as in Ollama's chat: what stands between them may have many lines
_CHOICES: Mapping[str, Choice] = MappingProxyType({"y": "drop", "a": "always", "n": "stop", "": "stop"})


class Lines(Protocol):
    """`read` raises EOFError when there are no more, KeyboardInterrupt on Ctrl-C at the prompt.

    `typed` tells whether a person is there to correct what was wrong; who is, finds `draft` on the line.
    """

    typed: bool

    def read(self, draft: str = "") -> str: ...


class PipedLines:
    """Each line of a pipe is a turn; a backslash at its end joins the next one to it."""

    typed = False

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._number = 0

    def read(self, draft: str = "") -> str:
        text = draft or self._line()
        while text.endswith("\\"):
            try:
                text = f"{text[:-1]}\n{self._line()}"
            except EOFError:
                return text[:-1]
        return text

    def _line(self) -> str:
        data = self._pipe.readline(MOST + 1)
        self._number += 1
        if len(data) > MOST:
            raise UsageError(f"line {self._number} of stdin has more than {MOST >> 20} MiB, which no context holds")
        if not data:
            raise EOFError
        return decode(data, f"line {self._number} of stdin").rstrip("\r\n")


class DumbLines:
    """A terminal that obeys nothing (TERM=dumb, as in an editor's shell window): one line at a time, as it comes."""

    typed = True

    def __init__(self, chat: Chat, keyboard: TextIO) -> None:
        self._terminal, self._keyboard = chat.terminal, keyboard

    def read(self, draft: str = "") -> str:
        text = draft or self._line("> ")
        while (more := text.endswith("\\")) or _is_open(text):
            text = f"{text[:-1] if more else text}\n{self._line('  ')}"
        return _unquoted(text)

    def choose(self, excess: Excess) -> Choice:
        with echoed():
            return _chosen(self._terminal, excess, self._line)

    def _line(self, prompt: str) -> str:
        self._terminal.err.write(prompt)
        self._terminal.err.flush()
        try:
            text = self._keyboard.readline()
        except KeyboardInterrupt:
            self._terminal.err.write("\n")  # behind the prompt and the terminal's ^C
            raise
        if not text:
            raise EOFError
        return unicode(text.rstrip("\r\n"))


class TypedLines:
    """prompt_toolkit's line editor: Enter sends, Alt-Enter, a trailing backslash or an open quote begins a new line."""

    typed = True

    def __init__(self, chat: Chat, history: Path) -> None:
        self._terminal = chat.terminal
        self._session = _session(chat, history)

    def read(self, draft: str = "") -> str:
        return _unquoted(unicode(self._session.prompt("> ", default=draft)))

    def choose(self, excess: Excess) -> Choice:
        from prompt_toolkit import PromptSession

        asked = PromptSession[str](output=self._session.app.output, input=self._session.app.input)
        return _chosen(self._terminal, excess, asked.prompt)


def _is_open(text: str) -> bool:
    return text.startswith(_QUOTES) and text.count(_QUOTES) == 1


def _unquoted(text: str) -> str:
    """What stands between the quotes is never a command."""
    whole = text.rstrip()
    if text.count(_QUOTES) != 2 or not (whole.startswith(_QUOTES) and whole.endswith(_QUOTES)):
        return text
    inside = whole[len(_QUOTES) : -len(_QUOTES)].strip("\n")
    return f"/{inside}" if inside.startswith("/") else inside


def _chosen(terminal: Terminal, excess: Excess, ask: Callable[[str], str]) -> Choice:
    """What the user says is to be left out."""
    terminal.line(f"minicpm: {excess.said()}.")
    terminal.line(f"Without {excess.offer()} it fits.")
    said = "?"
    while said not in _CHOICES:
        try:
            said = ask("Leave that out? [y]es, [a]lways when it must be, [n]o: ").strip().lower()[:1]
        except (KeyboardInterrupt, EOFError):
            return "stop"
    return _CHOICES[said]


def _session(chat: Chat, history: Path) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import ColorDepth, create_output

    from minicpm_cli.chat.completion import CommandCompleter
    from minicpm_cli.chat.toolbar import Toolbar

    terminal = chat.terminal
    quiet = terminal.plain or terminal.quiet
    return PromptSession(
        history=_history(history),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=_keys(),
        completer=CommandCompleter(chat),
        complete_while_typing=False,
        enable_suspend=True,
        bottom_toolbar=None if quiet else Toolbar(chat),
        color_depth=None if terminal.color and not terminal.plain else ColorDepth.DEPTH_1_BIT,
        output=create_output(terminal.out if terminal.out_tty else terminal.err),
    )


def _history(path: Path) -> FileHistory:
    """In a file for the user's eyes alone. One that cannot be written costs nobody the conversation."""
    from prompt_toolkit.history import FileHistory

    class PrivateHistory(FileHistory):
        def load_history_strings(self) -> list[str]:
            try:
                return list(super().load_history_strings())
            except OSError:
                return []

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(unicode(string))

    with suppress(OSError):
        private_folder(path.parent)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)  # an older one may be open to others
    return PrivateHistory(str(path))


def _keys() -> KeyBindings:
    from prompt_toolkit.application import get_app, run_in_terminal
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import Condition, has_focus
    from prompt_toolkit.key_binding import KeyBindings

    keys, at_prompt = KeyBindings(), has_focus(DEFAULT_BUFFER)  # and not in the search that Ctrl-R begins

    @keys.add("enter", filter=at_prompt)
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=at_prompt)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=at_prompt & Condition(lambda: bool(get_app().current_buffer.text)))
    def take_back(event: KeyPressEvent) -> None:
        event.current_buffer.reset(append_to_history=True)  # Up brings it back

    @keys.add("c-g", filter=at_prompt)
    def edit(event: KeyPressEvent) -> None:
        run_in_terminal(lambda: _edit(event.current_buffer))

    return keys


def _edit(buffer: Buffer) -> None:
    from prompt_toolkit.document import Document

    try:
        text = edited(buffer.text)
    except MinicpmError as error:
        print(f"minicpm: {error}")
        return
    if text is not None:
        buffer.document = Document(text, len(text))
