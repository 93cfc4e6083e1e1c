"""`minicpm batch-merge`: the outputs of shards become one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minicpm_cli.cli.options import OUTPUT, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation

_EXAMPLES = examples(
    "minicpm batch-merge answers.jsonl answers.1.jsonl answers.2.jsonl",
    "minicpm batch-merge answers.jsonl answers.*.jsonl --input questions.jsonl",
)


def register(app: typer.Typer) -> None:
    app.command("batch-merge", epilog=_EXAMPLES)(batch_merge)


@takes(OUTPUT)
def batch_merge(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where all rows go.", show_default=False)],
    shards: Annotated[
        list[Path], typer.Argument(metavar="SHARD...", help="Outputs of minicpm batch --shard i/n.", show_default=False)
    ],
    *,
    source: Annotated[
        Path | None, typer.Option("--input", help="Put the rows in the order of this input.", metavar="IN")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an OUT that exists.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Although shards are missing or unfinished.")] = False,
    flags: Flags,
) -> int:
    """Make one file of what `minicpm batch --shard i/n` wrote, after checking that nothing is missing or doubled."""
    from minicpm_cli.batch.merge import merge

    invocation: Invocation = context.obj
    invocation.configure(flags)
    merged = merge(target, shards, source, force=force, overwrite=overwrite)
    for line in merged.lines():
        invocation.terminal.note(line)
    return merged.exit_code
