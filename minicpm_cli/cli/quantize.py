"""`minicpm quantize`: a checkpoint in, a smaller one out, for this and other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.adapter import FLAG
from minicpm_cli.cli.options import LOAD, OUTPUT, Flags, examples, takes
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.disk import path_of
from minicpm_cli.errors import FileError, UsageError
from minicpm_cli.quantize.recipe import Recipe

if TYPE_CHECKING:
    from minicpm_cli.llm.prompter import Prompter
    from minicpm_cli.quantize.run import Job, Judge
    from minicpm_cli.settings import Settings

_EXAMPLES = examples(
    "minicpm quantize minicpm4-0.5b minicpm4-0.5b-w4",
    "minicpm quantize minicpm5-1b out --group-size 128 --calib texts.txt --plan",
    "minicpm quantize demo demo-w4 --method rtn --report report.json",
)
_DEVICE = tuple(option for option in LOAD if option.name in ("device", "dtype", "threads", "lora"))
_MEMORY_EXIT = 4


def register(app: typer.Typer) -> None:
    app.command("quantize", epilog=_EXAMPLES)(quantize)


@takes(_DEVICE, OUTPUT)
def quantize(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder, .gguf file, hub repo id or alias.", autocompletion=completion.models
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to write; it must not exist, or be empty.")],
    *,
    method: Annotated[
        str, typer.Option(help="gptq, rtn, nf4, int8 or fp8.", metavar="NAME", autocompletion=completion.methods)
    ] = "gptq",
    bits: Annotated[int, typer.Option(help="4 or 8, of gptq and rtn.", metavar="N")] = 4,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale; -1: a row.", metavar="N")] = 64,
    asym: Annotated[bool, typer.Option("--asym", help="Zero points: better, read by fewer programs.")] = False,
    act_order: Annotated[bool, typer.Option(help="Groups of inputs alike in size (g_idx), not of neighbours.")] = False,
    calib: Annotated[
        str, typer.Option(help="Text or JSONL of messages to learn from; self: the model's own.", metavar="FILE")
    ] = "self",
    samples: Annotated[
        int | None, typer.Option(help="Rows to learn from; 32 to 128.", metavar="N", show_default=False)
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(help="Tokens of a row; 512 or 2048.", metavar="N", show_default=False)
    ] = None,
    damp: Annotated[float, typer.Option(help="Added to the statistics' diagonal, of its mean.", metavar="F")] = 0.01,
    correction: Annotated[
        float, typer.Option(help="Of what earlier layers lost, made up for by later ones; 0: plain GPTQ.", metavar="F")
    ] = 0.5,
    skip: Annotated[
        list[str] | None, typer.Option(help="Layers left plain: a glob, or re:REGEX; repeatable.", metavar="PATTERN")
    ] = None,
    head_bits: Annotated[int, typer.Option(help="8: the output head too, where it is not tied.", metavar="N")] = 16,
    seed: Annotated[int, typer.Option(help="Of the model's own samples.", metavar="N")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with what an earlier run left.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Go on with too few calibration tokens.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Time, memory, disk and what does not divide; stop.")] = False,
    evaluate: Annotated[bool, typer.Option(help="Measure the result on held-out text.")] = True,
    report: Annotated[str | None, typer.Option(help="Write the result as JSON, too.", metavar="FILE")] = None,
    plot: Annotated[str | None, typer.Option(help="Write a PNG of each layer's error.", metavar="FILE")] = None,
    flags: Flags,
) -> int:
    """Quantize MODEL to the folder OUT. Run the same command again to go on after an interruption."""
    recipe = Recipe(
        method=method,  # type: ignore[arg-type]  # checked by the recipe
        bits=bits,
        group=group_size,
        symmetric=not asym,
        act_order=act_order,
        damp=damp,
        correction=correction,
        skip=tuple(skip or ()),
        head_bits=head_bits,
        calib=calib,
        samples=samples,
        seqlen=seqlen,
        seed=seed,
        force=force,
    )
    invocation: Invocation = context.obj
    settings = invocation.configure(flags | {"model": model})
    _check_files(recipe, report, plot)
    job = _job(invocation, settings, recipe, path_of(out), fresh=not resume, evaluate=evaluate)
    if plan:
        return _show_plan(invocation, job, report)
    _run(invocation, job, report, plot)
    return 0


def _check_files(recipe: Recipe, report: str | None, plot: str | None) -> None:
    """What can be refused before anything is loaded."""
    if recipe.calib != "self" and not Path(recipe.calib).is_file():
        raise FileError(f"--calib {recipe.calib} is no file; give a text, a .jsonl of messages, or self")
    for flag, name in (("--report", report), ("--plot", plot)):
        if name is not None and not Path(name).absolute().parent.is_dir():
            raise UsageError(f"{flag} {name}: the folder {Path(name).absolute().parent} does not exist")
    if plot is not None:
        from minicpm_cli.cli.quantize_view import need_matplotlib

        need_matplotlib()


def _job(
    invocation: Invocation, settings: Settings, recipe: Recipe, target: Path, *, fresh: bool, evaluate: bool
) -> Job:
    """Everything about the model but its weights."""
    from minicpm_cli.hub import resolve
    from minicpm_cli.hub.identity import identity
    from minicpm_cli.llm.prompter import Prompter
    from minicpm_cli.quantize.run import Job
    from minicpm_cli.quantize.setting import device_of, machine_of

    with ProgressLine(invocation.terminal) as progress:
        files = resolve(settings.options.model, settings, progress)
    lora = settings.options.lora if settings.origin("lora") == FLAG else None  # the config file's is for loading
    options = replace(settings.options, quantize=None, head_bits=16, lora=None)  # those are of loading
    prompter = Prompter.open(options, files)
    if lora is not None:
        prompter.checkpoint = prompter.checkpoint.with_adapter(Path(lora))
    device, dtype = device_of(options, settings.threads)
    return Job(
        name=files.name or settings.options.model,
        path=files.path,
        target=target,
        recipe=recipe,
        prompter=prompter,
        device=device,
        dtype=dtype,
        identity=identity(files, settings.cache_dir),
        machine=machine_of(device, dtype, target),
        judge=_judge(prompter) if evaluate else None,
        fresh=fresh,
    )


def _judge(prompter: Prompter) -> Judge | None:
    from minicpm_cli.cli.quantize_judge import HeldOut

    return HeldOut.of(prompter.tokenizer, prompter.checkpoint.cfg)


def _show_plan(invocation: Invocation, job: Job, report: str | None) -> int:
    from minicpm_cli.cli.tables import show_table
    from minicpm_cli.quantize.run import plan

    planned = plan(job)
    show_table(invocation.terminal, ("quantity", "value"), [("recipe", job.recipe.name), *planned.rows()])
    for line in planned.misfits:
        invocation.terminal.line(f"minicpm: does not divide: {line}")
    _warn(invocation, job.recipe)
    if report is not None:
        Path(report).write_text(json.dumps(planned.record(), indent=2) + "\n", encoding="utf-8")
    if planned.problem:
        invocation.terminal.line(f"minicpm: does not fit: {planned.problem}")
        return _MEMORY_EXIT
    return 0


def _warn(invocation: Invocation, recipe: Recipe) -> str | None:
    """Says what is better known before the work than after it."""
    from minicpm_cli.quantize.schema import unread_group

    warning = unread_group(recipe)
    if warning:
        invocation.terminal.note(warning)
    return warning


def _expectation(job: Job) -> str:
    """What will happen, in a line."""
    from minicpm_cli.quantize.run import plan
    from minicpm_cli.units import duration, size

    planned = plan(job)
    time = f"about {duration(planned.seconds)}, " if planned.seconds else ""
    return f"{job.recipe.name} on {job.machine.device}: {time}peak {size(planned.peak)}, output {size(planned.output)}"


def _run(invocation: Invocation, job: Job, report: str | None, plot: str | None) -> None:
    from minicpm_cli.cli.quantize_view import Bar, show_layers, show_report, write_plot
    from minicpm_cli.quantize.run import quantize as run

    terminal = invocation.terminal
    terminal.note(_expectation(job))
    said = _warn(invocation, job.recipe)
    with Bar(terminal) as bar:
        done = run(job, bar)
    if terminal.verbose:
        show_layers(terminal, done)
    show_report(terminal, done)
    for note in done.notes:
        if note != said:
            terminal.note(note)
    if report is not None:
        Path(report).write_text(json.dumps(done.record(), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        write_plot(done, Path(plot))
