"""`minicpm bench`: how fast it is here."""

from __future__ import annotations

from typing import Annotated

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.fleet import crew
from minicpm_cli.cli.options import LOAD, MODEL, OUTPUT, SERVER, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import Settings

_EXAMPLES = examples(
    "minicpm bench -m demo",
    "minicpm bench --shape minicpm4-0.5b decode ttft2048 --json",
    "minicpm bench --shape minicpm-2b throughput --quantize w4 --head-bits 8 --requests 256",
    "minicpm bench --shape minicpm-2b throughput --gpus 2",
    "minicpm bench -m demo decode --against transformers",
    "minicpm bench --server http://127.0.0.1:8000 --streams 256",
)
_WORKLOADS = "decode, decode-long, ttft128, ttft2048, batch16, batch64, throughput, help, load, kernels"


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=_EXAMPLES)(bench)


@takes(MODEL, LOAD, SERVER, OUTPUT)
def bench(
    context: typer.Context,
    workloads: Annotated[
        list[str] | None,
        typer.Argument(help=f"{_WORKLOADS}; none: those up to batch64.", autocompletion=completion.workloads),
    ] = None,
    *,
    shape: Annotated[
        str | None,
        typer.Option(
            help="A family member's shape with random weights.", metavar="NAME", autocompletion=completion.shapes
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Times each is measured.", metavar="N")] = 3,
    against: Annotated[
        str | None, typer.Option(help="Measure another engine too: transformers.", metavar="ENGINE")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Of throughput, in the place of 1024; of a server, in the place of 4 a stream.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(
            help="Streams at once that a server is asked for, with the requests of throughput; 64.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Throughput of an engine on each of the first N GPUs.", metavar="N", show_default=False),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="With --device cpu: throughput of N engines that share it.", metavar="N", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record a row.")] = False,
    flags: Flags,
) -> None:
    """Measure the speed on this machine; with --server that of a server, as its clients see it."""
    from minicpm_cli.bench.command import BenchOptions, run_bench

    invocation: Invocation = context.obj
    settings = invocation.configure(flags)
    if shape is not None and (flags["model"] or flags["model_path"]):
        raise UsageError("--shape measures random weights, --model those of a model; leave one of the two out")
    several = crew(settings.options, gpus, workers, ray=None)
    if streams is not None or flags["server"] is not None:
        if several is not None:
            raise UsageError("a server has its own engines; leave --gpus and --workers out, or --server")
        _served(invocation, settings, workloads or [], streams, requests, as_json=as_json)
        return
    devices = several.devices if several is not None else ()
    names = tuple(workloads or ())
    options = BenchOptions(settings.options, shape, names, repeats, against, as_json, requests, devices)
    run_bench(options, settings, invocation.terminal.out, invocation.terminal.err)


def _served(
    invocation: Invocation,
    settings: Settings,
    workloads: list[str],
    streams: int | None,
    requests: int | None,
    *,
    as_json: bool,
) -> None:
    from minicpm_cli.bench.load import STREAMS, LoadOptions, measure_load

    options, terminal = settings.options, invocation.terminal
    if options.server is None:
        raise UsageError("--streams is for a server: say which one with --server URL (minicpm serve starts one)")
    if workloads:
        raise UsageError(f"a server is asked for streams alone; leave {' '.join(workloads)} out, or --server")
    model = None if settings.model_is_default else options.model
    asked = LoadOptions(options.server, STREAMS if streams is None else streams, requests, options.api_key, model)
    load = measure_load(asked.checked(), terminal.note)
    for line in [load.to_json()] if as_json else load.lines():
        print(line, file=terminal.out, flush=True)
