"""`minicpm models` and `minicpm pull`: what there is, and getting it here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.options import OUTPUT, Flags, examples, takes
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.cli.tables import NONE, show_records
from minicpm_cli.disk import path_of

if TYPE_CHECKING:
    from minicpm_cli.hub import Listed

_HEADER = ("alias", "repository", "parameters", "context", "licence", "size", "here", "note")


def register(app: typer.Typer) -> None:
    listing = examples("minicpm models", "minicpm models --json | jq '.[] | select(.path)'")
    app.command("models", epilog=listing)(models)
    app.command("pull", epilog=examples("minicpm pull demo", "minicpm pull openbmb/MiniCPM4-0.5B"))(pull)


@takes(OUTPUT)
def models(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    flags: Flags,
) -> None:
    """List the aliases that -m takes, and what is here already."""
    from minicpm_cli.hub import list_models

    invocation: Invocation = context.obj
    listed = list_models(invocation.configure(flags))
    records, rows = map(_record, listed), map(_row, listed)
    show_records(invocation.terminal, list(records), _HEADER, rows, as_json=as_json)
    if not as_json:
        invocation.terminal.note("-m also takes a folder, a .gguf file, or a hub repository id (owner/name[@revision])")


@takes(OUTPUT)
def pull(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="An alias or a hub repository id[@revision].", autocompletion=completion.models
        ),
    ],
    *,
    flags: Flags,
) -> None:
    """Fetch a model, or a LoRA adapter, and check what came."""
    from minicpm_cli.hub import pull as fetch

    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    with ProgressLine(invocation.terminal) as progress:
        files = fetch(model, settings, progress)
    if files.path == path_of(model):
        _check_headers(files.path)
    revision = f", revision {files.revision}" if files.revision else ""
    invocation.terminal.note(f"{model} is here and whole{revision}")
    invocation.terminal.out.write(f"{files.path}\n")


def _check_headers(path: Path) -> None:
    """Nobody published sums for a model of the user's own: its files are held against what they say of themselves."""
    from minicpm_cli.llm.checkpoint import Checkpoint
    from minicpm_cli.model.source import open_source

    open_source(path, Checkpoint.read(path).cfg)


def _record(one: Listed) -> dict[str, Any]:
    entry = one.entry
    return {
        "alias": entry.alias,
        "repository": entry.repo,
        "parameters": entry.parameters,
        "context": entry.context,
        "licence": entry.licence,
        "bytes": entry.size,
        "path": str(one.path) if one.path else None,
        "stored": one.stored,
        "missing": list(one.missing),
        "note": entry.note,
    }


def _row(one: Listed) -> tuple[str, ...]:
    from minicpm_cli.hub.files import size_text

    entry = one.entry
    cells = (
        entry.alias,
        entry.repo,
        f"{entry.parameters / 1e9:.2f}B" if entry.parameters else None,
        str(entry.context) if entry.context else None,
        entry.licence,
        size_text(entry.size) if entry.size else None,
        "yes" if one.path else "in part" if one.missing else None,
        entry.note,
    )
    return tuple(cell or NONE for cell in cells)
