"""`minicpm config`: every setting and where it comes from."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from minicpm_cli.cli.options import OUTPUT, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.cli.tables import show_records
from minicpm_cli.errors import UsageError

_EXAMPLES = examples(
    "minicpm config",
    "minicpm config --json | jq .model",
    'mkdir -p "$(dirname "$(minicpm config path)")" && echo \'model = "minicpm4-0.5b"\' >> "$(minicpm config path)"',
)


def register(app: typer.Typer) -> None:
    app.command("config", epilog=_EXAMPLES)(config)


@takes(OUTPUT)
def config(
    context: typer.Context,
    what: Annotated[str | None, typer.Argument(metavar="[path]", help="Only the path of the config file.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    flags: Flags,
) -> None:
    """Show each setting and where it comes from.

    Defaults < config file < MINICPM_* variables < flags.
    """
    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    terminal = invocation.terminal
    if what not in (None, "path"):
        raise UsageError(f"minicpm config shows the settings and minicpm config path the file; {what!r} is neither")
    if what == "path":
        terminal.out.write(f"{settings.config_path}\n")
        return
    values = {row.name: {"value": _plain(row.value), "origin": row.origin} for row in settings.rows}
    rows = [(row.name, _text(row.value), row.origin) for row in settings.rows]
    show_records(terminal, values, ("setting", "value", "origin"), rows, as_json=as_json)
    if not as_json:
        terminal.note(f"the config file is {settings.config_path}" + _absent(settings.config_path.exists()))


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | tuple | None) else str(value)


def _text(value: Any) -> str:
    return "-" if value is None else json.dumps(_plain(value), ensure_ascii=False)


def _absent(there: bool) -> str:
    return "" if there else ", which does not exist yet"
