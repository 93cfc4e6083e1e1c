"""`minicpm chat`: a conversation, or one that is held again. What it needs is imported when it is run."""

from __future__ import annotations

from typing import Annotated

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.options import LOAD, LOOKUP, MODEL, OUTPUT, SAMPLING, SERVER, Flags, examples, takes

_EXAMPLES = examples(
    "minicpm chat",
    'minicpm chat -m minicpm4-0.5b -s "You are a librarian."',
    "minicpm chat --session holidays --overflow drop-oldest",
    "minicpm chat -c",
    "minicpm chat --replay holidays",
    "printf 'Name a river.\\nAnd another one.\\n' | minicpm chat -q",
)


def register(app: typer.Typer) -> None:
    app.command("chat", epilog=_EXAMPLES)(chat)


@takes(MODEL, SERVER, LOAD, LOOKUP, SAMPLING, OUTPUT)
def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option("-s", "--system", help="System prompt.", metavar="TEXT")] = None,
    go_on: Annotated[bool, typer.Option("-c", "--continue", help="Go on with the last conversation.")] = False,
    session: Annotated[
        str | None,
        typer.Option(
            help="Name of the conversation to begin or go on with.",
            metavar="NAME",
            autocompletion=completion.sessions,
        ),
    ] = None,
    overflow: Annotated[
        str,
        typer.Option(
            help="When the context is full: stop, or drop-oldest.",
            metavar="WHAT",
            show_default=False,
            autocompletion=completion.words("stop", "drop-oldest"),
        ),
    ] = "stop",
    again: Annotated[
        str | None,
        typer.Option(
            "--replay",
            help="Hold this conversation again: same model, settings and seeds, unless flags change them; then end. "
            "Exit code 1: an answer came out different.",
            metavar="NAME|FILE",
            autocompletion=completion.sessions,
        ),
    ] = None,
    flags: Flags,
) -> int:
    """Chat in the terminal; /help there lists the commands. Each line of a piped stdin is a turn."""
    from minicpm_cli.cli.chatting import Asked, hold

    return hold(context.obj, Asked(system, session, again, overflow, go_on=go_on), flags)
