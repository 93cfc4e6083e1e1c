"""`minicpm bench`: how fast it is here."""

from __future__ import annotations

from typing import Annotated

import typer

from minicpm_cli.cli.options import LOAD, MODEL, OUTPUT, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation

_EXAMPLES = examples(
    "minicpm bench -m demo",
    "minicpm bench --shape minicpm4-0.5b decode ttft2048 --json",
    "minicpm bench --shape minicpm-2b throughput --quantize w4 --head-bits 8 --requests 256",
    "minicpm bench -m demo decode --against transformers",
)
_WORKLOADS = "decode, decode-long, ttft128, ttft2048, batch16, batch64, throughput, help, load, kernels"


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=_EXAMPLES)(bench)


@takes(MODEL, LOAD, OUTPUT)
def bench(
    context: typer.Context,
    workloads: Annotated[list[str] | None, typer.Argument(help=f"{_WORKLOADS}; none: those up to batch64.")] = None,
    *,
    shape: Annotated[
        str | None, typer.Option(help="A family member's shape with random weights.", metavar="NAME")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times each is measured.", metavar="N")] = 3,
    against: Annotated[
        str | None, typer.Option(help="Measure another engine too: transformers.", metavar="ENGINE")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Of throughput, in the place of 1024.", metavar="N", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a row.")] = False,
    flags: Flags,
) -> None:
    """Measure the speed on this machine."""
    from minicpm_cli.bench.command import BenchOptions, run_bench

    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    options = BenchOptions(settings.options, shape, tuple(workloads or ()), repeats, against, as_json, requests)
    run_bench(options, settings, invocation.terminal.out, invocation.terminal.err)
