"""The table of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from minicpm_cli.cli import (
    batch,
    batch_merge,
    bench,
    chat,
    configuration,
    doctor,
    evaluate,
    models,
    plan,
    quantize,
    run,
    serve,
    templates,
)
from minicpm_cli.cli.options import EXIT_CODES, examples
from minicpm_cli.errors import Interrupted

_EPILOG = (
    examples(
        'minicpm run "How many days are in a week?"',
        'git diff | minicpm run "Write a commit message"',
        "minicpm chat -m minicpm4-0.5b",
        "minicpm batch questions.jsonl answers.jsonl",
    )
    + "\n\n\b\nExit codes:\n"
    + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXIT_CODES.items())
)
_MODULES = (
    run,
    chat,
    batch,
    batch_merge,
    serve,
    models,
    configuration,
    templates,
    doctor,
    bench,
    evaluate,
    plan,
    quantize,
)


class _Program(TyperGroup):
    """Typer makes a Ctrl-C an exit code, without a word; here it is an error, which is said."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _spoken():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _spoken():
            return super().invoke(ctx)


@contextmanager
def _spoken() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None


def program() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="minicpm",
        cls=_Program,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback(epilog=_EPILOG)(_root)
    for module in _MODULES:
        module.register(app)
    return app


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"minicpm {version('minicpm-cli')}")
    except PackageNotFoundError:
        typer.echo("minicpm (not installed)")
    raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Chat with, batch-process with and quantize the MiniCPM family of language models, on one GPU or a CPU."""
