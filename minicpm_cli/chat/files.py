"""Commands that read and write files: /save, /load, /sessions, /file, /copy."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

from minicpm_cli.chat.attach import path_of, quoted, read_text
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.claim import Claim
from minicpm_cli.chat.clipboard import copy as to_clipboard
from minicpm_cli.chat.code_block import last_code_block
from minicpm_cli.chat.conversation import Messages
from minicpm_cli.chat.overflow import without
from minicpm_cli.chat.sessions import SUFFIX, Transcript
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.types import Message

_FORCE = "-f"
_TO_READ = (".md", ".txt")  # files for people, which /load does not take


def save(chat: Chat, argument: str) -> None:
    force, argument = _forced(argument)
    path = _target(chat, argument)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is a folder or a device: /save takes a name, or a file")
    if os.path.exists(path) and not force and not _is_older(chat, path):
        raise UsageError(f"{path} is there already, with another conversation: /save -f {argument} replaces it")
    if path.suffix in _TO_READ:
        _write(path, _as_markdown(chat.conversation.messages), force=True)
    else:
        with nullcontext() if path in (chat.sessions.path(chat.name), path_of(argument)) else Claim(path):
            Transcript(path.resolve()).rewrite(chat.conversation.turns)  # a symlink stays one
    chat.terminal.line(f"saved {len(chat.conversation.turns)} messages to {path}")


def load(chat: Chat, argument: str) -> None:
    """A session goes on under its own name, a file's copy under a new one; what was said here stays in its session."""
    if not argument:
        raise UsageError("/load needs a session's name (see /sessions) or a file")
    name, path = argument.removesuffix(SUFFIX), path_of(argument)
    if os.path.isfile(path):  # unlike Path's, never raises
        turns, name = Transcript(path).read(), chat.sessions.fresh()
        chat.sessions.transcript(name).rewrite(turns)
    elif not chat.sessions.exists(name):
        raise FileError(f"there is no session {name!r} in {chat.sessions.folder} and no file {path} (/sessions)")
    before = chat.name
    chat.switch(name)
    chat.terminal.line(f"loaded {len(chat.conversation.turns)} messages from {argument}; this is {name} now")
    if chat.sessions.exists(before) and before != name:
        chat.terminal.line(f"/load {before} goes back")


def names(chat: Chat, typed: str) -> Iterable[str]:
    return chat.sessions.names()


def sessions(chat: Chat, argument: str) -> None:
    from rich.cells import cell_len
    from rich.text import Text

    found = chat.sessions.summaries()
    width = max((cell_len(summary.name) for summary in found), default=0)
    for summary in found:
        here = "*" if summary.name == chat.name else " "
        space = " " * (width - cell_len(summary.name) + 2)
        row = Text(f"{here} {summary.name}{space}{summary.told()}")
        if chat.terminal.err_tty:  # a row each, but no name is cut
            row.truncate(max(chat.terminal.columns, width + 3), overflow="ellipsis")
        chat.terminal.line(row.plain)
    chat.terminal.line(f"in {chat.sessions.folder}")


def attach(chat: Chat, argument: str) -> None:
    if argument == "-":
        chat.attached.clear()
    for path in _paths(argument) if argument not in ("", "-") else ():
        _attach(chat, path)
    if argument in ("", "-"):
        for name, text in chat.attached:
            chat.terminal.line(f"{name}: {_tokens(chat, [(name, text)])} tokens")
        if not chat.attached:
            chat.terminal.line("/file FILE sends a text file with your next question")


def copy(chat: Chat, argument: str) -> None:
    turn = chat.conversation.reply
    if turn is None:
        raise UsageError("there is no reply to copy")
    word, _, rest = argument.partition(" ")
    text, what = turn.message.content, "the reply"
    if word == "code":
        block, what, argument = last_code_block(text), "the code", rest.strip()
        if block is None:
            raise UsageError("there is no fenced code block in the last reply")
        text = block
    force, argument = _forced(argument)
    if argument:
        _write(path_of(argument), text, force=force)
        chat.terminal.line(f"wrote {what} to {argument}")
    else:
        count = to_clipboard(chat.terminal, text)
        chat.terminal.line(f"sent {what} ({count:,} bytes) to the terminal's clipboard, if it lets programs set it")


def copy_words(chat: Chat, typed: str) -> Iterable[str]:
    return () if " " in typed else ("code",)


def _forced(argument: str) -> tuple[bool, str]:
    word, _, rest = argument.partition(" ")
    return (True, rest.strip()) if word == _FORCE else (False, argument)


def _target(chat: Chat, argument: str) -> Path:
    is_file = "/" in argument or "." in argument
    return path_of(argument) if is_file else chat.sessions.path(argument or chat.name)


def _is_older(chat: Chat, path: Path) -> bool:
    """Whether all that the file holds is said here, too."""
    if path == chat.sessions.path(chat.name):
        return True
    try:
        there = [turn.message for turn in Transcript(path).read()]
    except FileError:
        return False
    return there == list(chat.conversation.messages[: len(there)])


def _paths(argument: str) -> list[Path]:
    """One path as it stands, spaces and all; else several, or one that was quoted for a shell."""
    if os.path.exists(path_of(argument)):
        return [Path(argument)]
    try:
        words = shlex.split(argument)
    except ValueError:
        words = []
    return [Path(word) for word in words] if all(os.path.exists(path_of(word)) for word in words) else [Path(argument)]


def _attach(chat: Chat, path: Path) -> None:
    place = path_of(path)
    if os.path.exists(place) and not os.path.isfile(place):
        kind = "a folder" if os.path.isdir(place) else "no regular file"
        raise UsageError(f"{path} is {kind}: /file takes text files")
    one = (str(path), read_text(path))
    tokens, left = _tokens(chat, [one]), chat.room() - _tokens(chat, chat.attached)
    held = f"the context of {chat.llm.info.context}"
    if tokens >= chat.llm.info.context:
        raise UsageError(
            f"{path} is too long: its {len(one[1]):,} characters do not fit {held} tokens. "
            "Send a part of it, or raise --ctx."
        )
    chat.attached.append(one)
    chat.terminal.line(f"{path}: {tokens:,} tokens ({len(one[1]):,} characters); it goes with your next question")
    if tokens >= left:
        chat.terminal.line(f"that is {tokens - left + 1:,} tokens more than {held} has left (/file -, /undo N, /reset)")
    else:
        chat.terminal.line(f"{left - tokens:,} tokens of {held} are left then")


def _tokens(chat: Chat, attached: list[tuple[str, str]]) -> int:
    """What these files add to the next prompt."""
    if not attached:
        return 0
    before = without(chat.conversation.messages, chat.conversation.left_out)
    text = "\n\n".join(quoted(name, body) for name, body in attached)
    both = (chat.count((*before, Message("user", said))) for said in (text, ""))
    return next(both) - next(both)


def _as_markdown(messages: Messages) -> str:
    return "\n\n".join(f"## {message.role}\n\n{message.content.strip()}" for message in messages)


def _write(path: Path, text: str, *, force: bool) -> None:
    """Readable by the user alone, as all that was said is."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write((text if text.endswith("\n") else text + "\n").encode("utf-8", "replace"))
    except FileExistsError:
        raise UsageError(f"{path} is there already: /copy -f {path} replaces it") from None
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}. Check its folder.") from None
