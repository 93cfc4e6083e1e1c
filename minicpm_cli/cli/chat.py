"""`minicpm chat`: a conversation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import typer

from minicpm_cli.chat import repl
from minicpm_cli.chat.chat import Chat, Overflow
from minicpm_cli.chat.conversation import Conversation
from minicpm_cli.chat.lines import Lines, PipedLines, TypedLines
from minicpm_cli.chat.sessions import Sessions
from minicpm_cli.cli.options import LOAD, LOOKUP, MODEL, OUTPUT, SAMPLING, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation, stdin_bytes
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import DEFAULT, Settings

_OVERFLOWS = ("stop", "drop-oldest")
_EXAMPLES = examples(
    "minicpm chat",
    'minicpm chat -m minicpm4-0.5b -s "You are a librarian."',
    "minicpm chat --session holidays --overflow drop-oldest",
    "minicpm chat -c",
    "printf 'Name a river.\\nAnd another one.\\n' | minicpm chat -q",
)


def register(app: typer.Typer) -> None:
    app.command("chat", epilog=_EXAMPLES)(chat)


@takes(MODEL, LOAD, LOOKUP, SAMPLING, OUTPUT)
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System prompt.", metavar="TEXT")] = None,
    go_on: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    session: Annotated[
        str | None, typer.Option(help="Name of the conversation to begin or go on with.", metavar="NAME")
    ] = None,
    overflow: Annotated[
        str, typer.Option(help="When the context is full: stop, or drop-oldest.", metavar="WHAT", show_default=False)
    ] = "stop",
    flags: Flags,
) -> int:
    """Chat in the terminal; /help there lists the commands. Each line of a piped stdin is a turn."""
    invocation: Invocation = context.obj
    settings = _with_lookup(invocation.configure(flags))
    if overflow not in _OVERFLOWS:
        raise UsageError(f"--overflow is {overflow!r}; it must be one of {', '.join(_OVERFLOWS)}")
    if go_on and session is not None:
        raise UsageError("--continue takes the last conversation and --session a named one; give one of them")
    sessions = Sessions(settings.data_dir / "sessions")
    name = sessions.latest() if go_on else session or sessions.fresh()
    talk = sessions.open(name)
    if system is not None:
        talk.set_system(system)
    lines = _lines(invocation, settings, sessions)
    with invocation.model(settings) as llm:
        given = dict(settings.sampling)
        one = Chat(llm, invocation.terminal, sessions, talk, name, given, cast(Overflow, overflow))
        if lines.typed:
            _greet(one, talk)
        return repl.run(one, lines)


def _with_lookup(settings: Settings) -> Settings:
    """Conversations quote themselves: unless the user says otherwise, what repeats is looked up where that pays."""
    if settings.origin("lookup") != DEFAULT:
        return settings
    return replace(settings, options=replace(settings.options, lookup=None))


def _lines(invocation: Invocation, settings: Settings, sessions: Sessions) -> Lines:
    pipe = stdin_bytes()
    if pipe is not None:
        return PipedLines(pipe)
    return TypedLines(invocation.terminal, settings.data_dir / "history", sessions.names())


def _greet(one: Chat, talk: Conversation) -> None:
    info = one.llm.info
    one.terminal.note(f"{info.name}, context {info.context} tokens. /help lists commands, Ctrl-D leaves.")
    if talk.questions:
        one.terminal.note(f"going on with {one.name}: {talk.questions} questions so far")
