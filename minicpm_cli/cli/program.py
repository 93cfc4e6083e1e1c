"""The table of commands."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from minicpm_cli.cli import batch, bench, chat, configuration, doctor, evaluate, models, plan, quantize, run, templates
from minicpm_cli.cli.options import EXIT_CODES, examples

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
_MODULES = (run, chat, batch, models, configuration, templates, doctor, bench, evaluate, plan, quantize)


def program() -> typer.Typer:
    """The application with all its commands."""
    app = typer.Typer(
        name="minicpm",
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
