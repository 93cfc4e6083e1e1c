"""What a line that begins with / does: one table, which also drives /help and completion."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minicpm_cli.chat import about, files, past, tuning
from minicpm_cli.chat.chat import Chat
from minicpm_cli.errors import UsageError

_WORD = re.compile(r"/[A-Za-z?][\w-]*(?=\s|$)|/\?(?=\s|$)")
_HABITS: Mapping[str, str] = MappingProxyType(
    {
        "/?": "/help",
        "/bye": "/exit",
        "/quit": "/exit",
        "/clear": "/reset",
        "/regen": "/retry",
        "/read": "/file",
        "/show": "/stats",
    }
)  # names that other programs have for the same
_KEYS = (
    'Enter sends; Alt-Enter or a \\ at the end begins a new line, as does Enter between """ and """; Tab completes; Up '
    "and Ctrl-R find what was typed before; Ctrl-G opens $EDITOR; Ctrl-C stops a reply; //text is a question that "
    "begins with /. From other programs, these work, too: /? /bye /quit /clear /regen /read /show."
)


class Leave(Exception):
    """Raised by /exit. `code` is the exit code of the process."""

    def __init__(self, code: int = 0) -> None:
        self.code = code


def _no_words(chat: Chat, typed: str) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Command:
    """`words` are what the last word of an argument may become, given the argument so far; `paths`: a path, too."""

    usage: str  # "/undo [N]"
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[Chat, str], Iterable[str]] = _no_words
    paths: bool = False

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def is_command(text: str) -> bool:
    """A path like /usr/bin is a question's beginning, and so is /* a comment."""
    return _WORD.match(text) is not None


def run(chat: Chat, line: str) -> None:
    """Runs a command line. Raises UsageError for an unknown one, Leave for /exit."""
    if "\0" in line:
        raise UsageError("a command cannot hold a zero byte")
    name, *rest = line.split(None, 1)
    _named(name).run(chat, rest[0].strip() if rest else "")


def find(name: str) -> Command | None:
    name = _HABITS.get(name, name)
    return next((command for command in COMMANDS if command.name == name), None)


def _named(name: str) -> Command:
    found = find(name)
    if found is None:
        near = [command for command in COMMANDS if command.name.startswith(name)]
        if len(near) != 1:
            raise UsageError(f"unknown command {name}.{_nearest(name, near)} /help lists them")
        found = near[0]
    return found


def _nearest(name: str, begun: list[Command]) -> str:
    """` Did you mean ...?`"""
    names = [c.name for c in begun] or difflib.get_close_matches(name.lower(), [c.name for c in COMMANDS], 1, 0.5)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _help(chat: Chat, argument: str) -> None:
    shown = [_named("/" + argument.lstrip("/"))] if argument else COMMANDS
    width = max(len(command.usage) for command in shown)
    columns = shutil.get_terminal_size().columns - 1
    for command in shown:
        chat.terminal.line(_folded(f"{command.usage:<{width}}  ", command.help, columns))
    if not argument:
        chat.terminal.line(textwrap.fill(_KEYS, columns))


def _folded(left: str, right: str, columns: int) -> str:
    """`right` beside `left`, or below it where the terminal is narrow."""
    if columns < len(left) + 20:
        return textwrap.fill(right, max(columns, 20), initial_indent=f"{left.strip()}\n  ", subsequent_indent="  ")
    return textwrap.fill(right, columns, initial_indent=left, subsequent_indent=" " * len(left))


def _names(chat: Chat, typed: str) -> Iterable[str]:
    return [command.name.removeprefix("/") for command in COMMANDS]


def _exit(chat: Chat, argument: str) -> None:
    raise Leave


COMMANDS: tuple[Command, ...] = (
    Command("/help [COMMAND]", "this list", _help, _names),
    Command("/system [TEXT|-]", "show, set or remove (-) the system prompt", tuning.system),
    Command(
        "/set [NAME [VALUE|default]]", "show or change settings, e.g. /set temperature 0.2", tuning.set_, tuning.words
    ),
    Command(
        "/think [on|off|default|show|hide]",
        "whether the model thinks before it answers, and whether that is shown",
        tuning.think,
        tuning.think_words,
    ),
    Command(
        "/retry [NAME=VALUE]...",
        "answer the last question again, e.g. /retry temperature=0.9",
        past.retry,
        past.retry_words,
    ),
    Command("/continue [NAME=VALUE]...", "let the model go on with its last reply", past.go_on, past.retry_words),
    Command("/edit-reply", "put the last reply right in $EDITOR; /continue goes on from it", past.edit_reply),
    Command("/undo [N]", "take back the last N questions with their answers", past.undo),
    Command(
        "/branch [NAME [N]|-]",
        "list branches, go to one (- is the last), or begin one here, N questions back",
        past.branch,
        past.branch_words,
    ),
    Command("/reset", "start over; the system prompt stays", past.reset),
    Command(
        "/save [-f] [NAME|FILE]",
        "write the conversation to another session or file; to a .md file as text",
        files.save,
        files.names,
        True,
    ),
    Command("/load NAME|FILE", "go on with a saved conversation; this one is kept", files.load, files.names, True),
    Command("/sessions", "list the saved conversations, newest first", files.sessions),
    Command("/file [FILE|-]", "send a text file with the next question; - sends none", files.attach, paths=True),
    Command(
        "/copy [code] [-f] [FILE]",
        "copy the last reply, or its last code block, to the clipboard or a file",
        files.copy,
        files.copy_words,
        True,
    ),
    Command("/edit [TEXT]", "write the next question in $EDITOR (as Ctrl-G does)", past.edit),
    Command("/stats", "tokens, speed, cache hits, context left, memory", about.stats),
    Command("/prompt [TEXT]", "show the tokens that the model reads, with TEXT as the next question", about.prompt),
    Command("/template", "show the chat template", about.template),
    Command("/exit", "leave (so do Ctrl-D, and Ctrl-C twice)", _exit),
)
