"""`minicpm plan`: does a model fit, and how much of it, from headers alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.options import LOAD, MODEL, OUTPUT, Flags, examples, takes
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import UsageError

if TYPE_CHECKING:
    from minicpm_cli.llm.survey import Survey
    from minicpm_cli.quantize.plan import Plan

_EXAMPLES = examples(
    "minicpm plan minicpm4-8b",
    "minicpm plan minicpm4-8b --quantize w4 --free 12GB --ctx 8192 --max-seqs 4",
    "minicpm plan -m openbmb/MiniCPM4-0.5B --json | jq .largest_context",
)
_MEMORY_EXIT = 4
_UNITS = {"": 1, "b": 1, "mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30}


def register(app: typer.Typer) -> None:
    app.command("plan", epilog=_EXAMPLES)(plan)


@takes(MODEL, LOAD, OUTPUT)
def plan(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="The same as --model.", show_default=False, autocompletion=completion.models
        ),
    ] = None,
    *,
    free: Annotated[
        str | None, typer.Option(help="Plan for a device with so much free memory: bytes, 24GB, 16GiB.", metavar="SIZE")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    flags: Flags,
) -> int:
    """Tell what a model takes in memory and what fits beside it, from the headers of its files alone."""
    from minicpm_cli.hub import headers
    from minicpm_cli.llm.survey import place_of, survey

    invocation: Invocation = context.obj
    settings = invocation.configure(_named(flags, name))
    options = settings.options
    room = None if free is None else free_size(free)
    with ProgressLine(invocation.terminal) as progress, headers(options.model, settings, progress) as (files, fetch):
        place = place_of(options, settings.cache_dir, room)
        found = survey(options, files, fetch, place, settings.cache_dir)
        quantizing = _quantizing(found)
    if as_json:
        invocation.terminal.out.write(json.dumps(_record(found, quantizing), indent=2) + "\n")
    else:
        _show(invocation, found, quantizing)
    if found.plan.fits:
        return 0
    invocation.terminal.line(f"minicpm: {found.plan.problem}")
    return _MEMORY_EXIT


def _named(flags: Flags, name: str | None) -> Flags:
    """The flags with the model that the argument names. Raises UsageError if an option names another one."""
    for option, key in (("--model", "model"), ("--model-path", "model_path")):
        if name is not None and flags[key] not in (None, name):
            raise UsageError(f"the argument names the model {name}, {option} names {flags[key]}; give one of the two")
    return flags if name is None else flags | {"model": name}


def free_size(text: str) -> int:
    """Bytes of 24GB, 16GiB or a plain number. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    count = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else math.inf
    if math.isinf(count):
        raise UsageError(f"--free {text} is no size; give bytes, or a number with MB, GB, MiB or GiB, such as 24GB")
    return int(count)


def _quantizing(found: Survey) -> Plan | None:
    """Of `minicpm quantize` with its own defaults; None for what is packed already."""
    if found.checkpoint.packing is not None:
        return None
    from minicpm_cli.quantize.calibration import amount
    from minicpm_cli.quantize.plan import Machine, make_plan
    from minicpm_cli.quantize.recipe import Recipe
    from minicpm_cli.quantize.stream import CPU_TOKENS, CUDA_TOKENS

    cpu, recipe, cfg = found.place.cpu, Recipe(), found.checkpoint.cfg
    machine = Machine(
        device="cpu" if cpu else "the device",
        itemsize=4 if cpu else 2,
        chunk=CPU_TOKENS if cpu else CUDA_TOKENS,
        free=found.place.free,
        host_free=found.place.free,
        disk_free=0,
    )
    return make_plan(cfg, recipe, amount(recipe, cfg, cuda=not cpu), 0, machine)


def _show(invocation: Invocation, found: Survey, quantizing: Plan | None) -> None:
    from minicpm_cli.cli.tables import show_table
    from minicpm_cli.units import size

    rows = found.rows()
    if quantizing is not None:
        host = "" if found.place.cpu else f", {size(quantizing.host)} on the host"
        rows.insert(-1, ("quantize peak", f"{size(quantizing.peak)}{host} (minicpm quantize, gptq w4 g64)"))
    show_table(invocation.terminal, ("quantity", "value"), rows)


def _record(found: Survey, quantizing: Plan | None) -> dict[str, Any]:
    peaks = None if quantizing is None else {"device_bytes": quantizing.peak, "host_bytes": quantizing.host}
    return found.record() | {"quantize": peaks, "past": [asdict(error) for error in found.past]}
