"""What a line that begins with / does: one table, which also drives /help and completion."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minicpm_cli.chat.attach import path_of, read_text
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.sessions import SUFFIX, Transcript
from minicpm_cli.errors import UsageError
from minicpm_cli.types import Message, SamplingParams


class Leave(Exception):
    """Raised by /exit. `code` is the exit code of the process."""

    def __init__(self, code: int = 0) -> None:
        self.code = code


@dataclass(frozen=True, slots=True)
class Command:
    usage: str  # "/undo [N]"
    help: str
    run: Callable[[Chat, str], None]

    @property
    def name(self) -> str:
        return self.usage.split()[0]


def run(chat: Chat, line: str) -> None:
    """Runs a command line. Raises UsageError for an unknown one, Leave for /exit."""
    name, _, argument = line.partition(" ")
    commands = {command.name: command for command in COMMANDS}
    if name not in commands:
        near = [known for known in commands if known.startswith(name)]
        if len(near) != 1:
            raise UsageError(f"unknown command {name}. /help lists them; a question that begins with / needs //")
        name = near[0]
    commands[name].run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS)
    for command in COMMANDS:
        chat.terminal.line(f"{command.usage:<{width}}  {command.help}")
    chat.terminal.line("Alt-Enter or a \\ at the end of the line: new line; Ctrl-G: $EDITOR; Ctrl-C stops a reply.")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_system(None if argument == "-" else argument)
    system = chat.conversation.system
    chat.terminal.line(
        f"system prompt: {system}" if system else "no system prompt; /system TEXT sets one, - removes it"
    )


def _set(chat: Chat, argument: str) -> None:
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if text.strip() == "default":
        chat.given.pop(name, None)
    elif text:
        value = _value(name, text.strip())
        chat.params.checked({name: value})
        chat.given[name] = value
    names = [f.name for f in fields(SamplingParams)]
    if name and name not in names:
        raise UsageError(f"unknown setting {name!r}. Settings: {', '.join(names)}")
    for shown in [name] if name else names:
        origin = "set" if shown in chat.given else "default"
        chat.terminal.line(f"{shown} = {getattr(chat.params, shown)!r} ({origin})")


def _value(name: str, text: str) -> Any:
    """Numbers, true and false as JSON spells them; anything else is text, and so is any stop."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if name == "stop" and not isinstance(value, str | list) else value


def _retry(chat: Chat, argument: str) -> None:
    chat.retry()


def _undo(chat: Chat, argument: str) -> None:
    if argument and not (argument.isdecimal() and int(argument) > 0):
        raise UsageError(f"/undo takes a number of questions, not {argument!r}")
    taken = chat.conversation.undo(int(argument or 1))
    chat.terminal.line(f"took back {taken} question{'' if taken == 1 else 's'}; {chat.conversation.questions} left")


def _reset(chat: Chat, argument: str) -> None:
    chat.conversation.reset()
    chat.terminal.line("a new beginning" + ("; the system prompt stays" if chat.conversation.system else ""))


def _save(chat: Chat, argument: str) -> None:
    is_file = "/" in argument or "." in argument
    path = path_of(argument) if is_file else chat.sessions.path(argument or chat.name)
    Transcript(path).rewrite(chat.conversation.turns)
    chat.terminal.line(f"saved {len(chat.conversation.turns)} messages to {path}")


def _load(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("/load needs a session's name (see /sessions) or a file")
    path = path_of(argument)
    path = path if path.is_file() else chat.sessions.path(argument.removesuffix(SUFFIX))
    chat.conversation.replace(Transcript(path).read())
    chat.terminal.line(f"loaded {len(chat.conversation.turns)} messages from {path}")


def _sessions(chat: Chat, argument: str) -> None:
    for name in chat.sessions.names():
        chat.terminal.line(f"{'*' if name == chat.name else ' '} {name}")
    chat.terminal.line(f"in {chat.sessions.folder}")


def _file(chat: Chat, argument: str) -> None:
    if not argument:
        raise UsageError("/file needs the path of a text file")
    text = read_text(Path(argument))
    chat.attached.append((argument, text))
    chat.terminal.line(f"{argument} ({len(text)} characters) goes with your next question")


def _stats(chat: Chat, argument: str) -> None:
    info, total = chat.llm.info, chat.total
    if chat.last:
        chat.terminal.line(f"last reply: {chat.last.summary()}")
    chat.terminal.line(
        f"all replies: {total.prompt_tokens} tokens in ({total.cached_tokens} cached), {total.completion_tokens} out"
    )
    looked_up = chat.llm.speculated
    if looked_up.drafts:
        chat.terminal.line(
            f"lookup: {looked_up.accepted} of {looked_up.proposed} expected tokens came, "
            f"{looked_up.mean_accepted:.1f} more a step"
        )
    chat.terminal.line(f"context: {chat.room()} of {info.context} tokens left")
    chat.terminal.line(
        f"memory: {info.weight_bytes / 1e9:.2f} GB weights ({info.scheme}), {info.cache_bytes / 1e9:.2f} GB cache "
        f"on {info.device}"
    )


def _think(chat: Chat, argument: str) -> None:
    choices: dict[str, bool | None] = {"on": True, "off": False, "default": None}
    if argument and argument not in choices:
        raise UsageError(f"/think takes on, off or default, not {argument!r}")
    if argument:
        chat.given["think"] = choices[argument]
    state = {True: "on", False: "off", None: "as the template has it"}[chat.params.think]
    chat.terminal.line(f"thinking: {state}")


def _template(chat: Chat, argument: str) -> None:
    info = chat.llm.info
    chat.terminal.line(f"chat template: {info.template} (another one: minicpm chat --chat-template)")
    chat.terminal.line(info.template_source)


def _prompt(chat: Chat, argument: str) -> None:
    messages = chat.conversation.messages or (Message("user", argument or "..."),)
    ids = chat.llm.prompt(chat.request(messages))
    chat.terminal.line("".join(piece for _, piece in chat.llm.pieces(ids)))
    chat.terminal.line(f"({len(ids)} tokens)")


def _exit(chat: Chat, argument: str) -> None:
    raise Leave


COMMANDS: tuple[Command, ...] = (
    Command("/help", "this list", _help),
    Command("/system [TEXT|-]", "show, set or remove the system prompt", _system),
    Command("/set [NAME [VALUE|default]]", "show or change a sampling value, e.g. /set temperature 0.2", _set),
    Command("/retry", "answer the last question again", _retry),
    Command("/undo [N]", "take back the last N questions with their answers", _undo),
    Command("/reset", "start over; the system prompt stays", _reset),
    Command("/save [NAME|FILE]", "write the conversation to another session or file", _save),
    Command("/load NAME|FILE", "replace the conversation by a saved one", _load),
    Command("/sessions", "list the saved conversations, newest first", _sessions),
    Command("/file FILE", "send a text file with the next question", _file),
    Command("/stats", "tokens, speed, cache hits, context left, memory", _stats),
    Command("/think [on|off|default]", "whether the model thinks before it answers", _think),
    Command("/template", "show the chat template", _template),
    Command("/prompt", "show the prompt exactly as the model reads it", _prompt),
    Command("/exit", "leave (so do Ctrl-D, and Ctrl-C twice)", _exit),
)
