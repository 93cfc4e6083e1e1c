"""A conversation at a terminal or through a pipe, or one that is held again: what `minicpm chat` does."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, BinaryIO

from minicpm_cli.chat import repl
from minicpm_cli.chat.attach import path_of
from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.conversation import Turn
from minicpm_cli.chat.keyboard import read_utf8, unechoed
from minicpm_cli.chat.lines import DumbLines, Lines, PipedLines, TypedLines
from minicpm_cli.chat.made import Source
from minicpm_cli.chat.overflow import OVERFLOWS
from minicpm_cli.chat.replay import replay
from minicpm_cli.chat.sessions import Sessions, Transcript, beginning
from minicpm_cli.cli.adapter import refuse_another_adapter
from minicpm_cli.cli.options import Flags
from minicpm_cli.cli.runtime import Invocation, standard_input, stdin_bytes
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.settings import DEFAULT, Layer, LoadOptions, Settings
from minicpm_cli.types import SamplingParams

_PATHS = ("lora", "chat_template")
# How answers come out without these having been chosen, whatever the config file says by now.
_UNCHOSEN: Mapping[str, Any] = MappingProxyType(
    {
        "dtype": "auto",
        "kv_dtype": "auto",
        "quantize": "none",
        "head_bits": 16,
        "gptq_format": "auto",
        "chat_template": "auto",
        "ctx": "auto",
        "lora": "none",
    }
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says beside settings; `again` is the conversation to hold again."""

    system: str | None
    session: str | None
    again: str | None
    overflow: str
    go_on: bool


def hold(invocation: Invocation, asked: Asked, flags: Flags) -> int:
    """The exit code. Raises UsageError before anything is loaded."""
    if asked.overflow not in OVERFLOWS:
        raise UsageError(f"--overflow is {asked.overflow!r}; it must be one of {', '.join(OVERFLOWS)}")
    if asked.go_on and asked.session is not None:
        raise UsageError("--continue takes the last conversation and --session a named one; give one of them")
    if asked.again is not None and (asked.go_on or asked.system is not None):
        raise UsageError("--replay holds a conversation as it was, so --continue and --system have no place in it")
    if asked.again is not None:
        return _replay(invocation, asked.again, asked.session, flags)
    settings = _with_lookup(invocation.configure(flags))
    sessions = Sessions(settings.data_dir / "sessions")
    name = sessions.latest() if asked.go_on else sessions.fresh() if asked.session is None else asked.session
    pipe = stdin_bytes()
    if pipe is None:
        standard_input()
    with _chat(invocation, settings, sessions, name) as one:
        if asked.system is not None:
            one.conversation.set_system(asked.system)
        one.given, one.overflow = dict(settings.sampling), asked.overflow
        return repl.run(one, _lines(one, settings, pipe))


def _replay(invocation: Invocation, again: str, session: str | None, flags: Flags) -> int:
    sessions = Sessions(Settings.load({}).data_dir / "sessions")
    turns = _recorded(sessions, again)
    if session is not None and sessions.exists(session):
        raise UsageError(f"there is a session {session!r} already; --replay needs a new one to write to")
    name = session or sessions.fresh()
    source = next((turn.made.source for turn in turns if turn.made), None)
    settings = _with_lookup(invocation.configure(flags, _layer(source, again) if source else None))
    refuse_another_adapter(turns, settings)
    changed = {
        f.name: settings.sampling[f.name] for f in fields(SamplingParams) if flags.get(f.name) not in (None, [], ())
    }
    with _chat(invocation, settings, sessions, name) as one:
        if source:
            _tell_changes(one, source)
        outcome = replay(one, turns, changed)
    one.terminal.note(f"{outcome.line()}; this is session {name}")
    return 130 if one.stopped else min(outcome.other, 1)


def _recorded(sessions: Sessions, again: str) -> Sequence[Turn]:
    path = path_of(again)
    if not path.is_file() and not sessions.exists(again):
        raise FileError(f"there is no session {again!r} in {sessions.folder}, and no file {path}")
    turns = Transcript(path if path.is_file() else sessions.path(again)).read()
    if not any(turn.message.role == "user" for turn in turns):
        raise UsageError(f"there is no question in {again}")
    return turns


def _layer(source: Source, again: str) -> Layer:
    """What the model was loaded with; what this version does not know is left out."""
    names = {f.name for f in fields(LoadOptions)} - {"model"}
    load = {name: value for name, value in source.load.items() if name in names}
    return Layer(f"session {again}", {**_UNCHOSEN, **load, "model": source.model})


def _tell_changes(one: Chat, source: Source) -> None:
    pairs = {
        name: (getattr(source, name), getattr(one.source, name)) for name in ("model", "revision", "scheme", "device")
    }
    changes = [f"{name} {was} is {now} now" for name, (was, now) in pairs.items() if was != now]
    if changes:
        one.terminal.note(f"answers may come out different: {', '.join(changes)}")


@contextmanager
def _chat(invocation: Invocation, settings: Settings, sessions: Sessions, name: str) -> Iterator[Chat]:
    """The session is claimed and read before the model is loaded. What is typed meanwhile waits for the prompt."""
    with sessions.claim(name) as claim:
        talk = sessions.open(name)
        refuse_another_adapter(talk.turns, settings)
        with ExitStack() as loaded:
            with unechoed():
                llm = loaded.enter_context(invocation.model(settings))
            source = Source.of(llm.info, _lasting(settings.options.model), _chosen(settings))
            one = Chat(llm, invocation.terminal, sessions, talk, name, source=source, claim=claim)
            try:
                yield one
            finally:
                one.leave()


def _lasting(model: str) -> str:
    """A path also from another folder."""
    place = path_of(model)
    return str(place.resolve()) if place.exists() else model


def _chosen(settings: Settings) -> Mapping[str, Any]:
    """The load options that are not as they come, the model apart."""
    plain, now = LoadOptions(), settings.options
    names = [f.name for f in fields(now) if f.name != "model"]
    chosen = {name: getattr(now, name) for name in names if getattr(now, name) not in (getattr(plain, name), None)}
    return {name: _lasting(value) if name in _PATHS else value for name, value in chosen.items()}


def _lines(one: Chat, settings: Settings, pipe: BinaryIO | None) -> Lines:
    if pipe is not None:
        return PipedLines(pipe)
    from prompt_toolkit.utils import is_dumb_terminal

    read_utf8(sys.stdin)
    lines = DumbLines(one, sys.stdin) if is_dumb_terminal() else TypedLines(one, settings.data_dir / "history")
    one.choose = lines.choose
    _greet(one)
    return lines


def _with_lookup(settings: Settings) -> Settings:
    """Conversations quote themselves: unless the user says otherwise, what repeats is looked up where that pays."""
    if settings.origin("lookup") != DEFAULT:
        return settings
    return replace(settings, options=replace(settings.options, lookup=None))


def _greet(one: Chat) -> None:
    info = one.llm.info
    one.terminal.note(f"{info.name}, context {info.context} tokens. /help lists commands, Ctrl-D leaves.")
    if one.conversation.questions:
        last = beginning(one.conversation.asked[-1].content)
        count = one.conversation.questions
        so_far = f"{count} question{'' if count == 1 else 's'} so far"
        one.terminal.note(f"going on with {one.name}: {so_far}, the last one {last!r}")
