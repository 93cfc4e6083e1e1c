"""`minicpm doctor`: what is here, and what to do about what is missing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from minicpm_cli.cli.options import OUTPUT, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.cli.tables import show_records


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog=examples("minicpm doctor", "minicpm doctor --json"))(doctor)


@takes(OUTPUT)
def doctor(
    context: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False,
    flags: Flags,
) -> None:
    """Show what is here and what to do about what is missing."""
    from minicpm_cli.doctor import report

    invocation: Invocation = context.obj
    checks = report(invocation.configure(flags))
    records = [asdict(check) for check in checks]
    rows = [(check.name, str(check.status), check.value, check.advice or "-") for check in checks]
    show_records(invocation.terminal, records, ("what", "status", "value", "advice"), rows, as_json=as_json)
