"""`minicpm batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from minicpm_cli.cli import completion
from minicpm_cli.cli.batch_template import LineTemplate
from minicpm_cli.cli.fleet import crew, fleet
from minicpm_cli.cli.options import LOAD, LOGPROBS, LOOKUP, MODEL, OUTPUT, SAMPLING, SERVER, Flags, examples, takes
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.settings import Settings

_EXAMPLES = examples(
    "minicpm batch questions.jsonl answers.jsonl",
    "minicpm batch questions.jsonl answers.jsonl -m minicpm4-0.5b -t 0 -n 200",
    "minicpm batch questions.jsonl answers.jsonl --retry-errors --summary summary.json",
    """echo '{"prompt": "Name a river."}' | minicpm batch - -""",
)
# What decides the answers; a resume with other values is refused.
_ASKED_FOR = ("model", "dtype", "ctx", "chat_template", "quantize", "head_bits", "gptq_format", "kv_dtype", "lora")


def register(app: typer.Typer) -> None:
    app.command("batch", epilog=_EXAMPLES)(batch)


@takes(MODEL, SERVER, LOAD, LOOKUP, SAMPLING, LOGPROBS, OUTPUT)
def batch(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="IN", help="JSON lines, one request each; - is stdin.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Where the answers go; - is stdout.")],
    *,
    system: Annotated[
        str | None, typer.Option("-s", "--system", help="System prompt for lines without one.", metavar="TEXT")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="A prompt template, whose variables are keys of the lines.",
            metavar="NAME",
            autocompletion=completion.templates,
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    keep_input: Annotated[bool, typer.Option("--keep-input", help='Pass other keys through under "input".')] = False,
    ordered: Annotated[bool, typer.Option("--ordered", help="Answers in the order of the input.")] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Run failed rows again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over instead of going on.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Go on although model, parameters or input changed.")] = False,
    shard: Annotated[str | None, typer.Option(help="Only part i of n of the lines.", metavar="i/n")] = None,
    summary: Annotated[str | None, typer.Option(help="Write the final counts as JSON.", metavar="FILE")] = None,
    gpus: Annotated[int | None, typer.Option(help="An engine for each of the first N GPUs.", metavar="N")] = None,
    workers: Annotated[
        int | None, typer.Option(help="So many engines: with --ray, or sharing the cores of --device cpu.", metavar="N")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Engines on a Ray cluster: its address, auto, or local.", metavar="ADDRESS")
    ] = None,
    flags: Flags,
) -> int:
    """Answer every line of IN in OUT. Run the same command again to go on after an interruption."""
    from minicpm_cli.batch.options import BatchOptions, parse_shard
    from minicpm_cli.batch.run import run_batch

    invocation: Invocation = context.obj
    found = None if template is None else LineTemplate.of_user(template)
    if raw and found is not None and found.template.system is not None:
        raise UsageError(f"--raw sends prompts without a template for chats, and {found.template.origin} has a system")
    settings = invocation.configure(flags, found.template.layer if found else None)
    options = BatchOptions(
        input=source,
        output=target,
        model=_asked_for(settings),
        identify=lambda: _identity(settings),
        sampling=settings.sampling,
        system=system,
        raw=raw,
        keep_input=keep_input,
        ordered=ordered,
        retry_errors=retry_errors,
        overwrite=overwrite,
        force=force,
        fill=found,
        template=None if found is None else found.record,
        shard=None if shard is None else parse_shard(shard),
        summary=summary,
        progress=not settings.quiet,
        plain=settings.plain,
    )
    several = crew(settings.options, gpus, workers, ray)
    with ExitStack() as stack:  # the model is opened by the first row that needs it

        def opened() -> LanguageModel:
            model = fleet(invocation, settings, several) if several else invocation.model(settings)
            return stack.enter_context(model)

        done = run_batch(opened, options)
    for line in done.lines():
        invocation.terminal.note(line)
    return done.exit_code


def _asked_for(settings: Settings) -> dict[str, Any]:
    loaded = asdict(settings.options)
    if settings.options.lora is not None:
        loaded["lora"] = str(Path(settings.options.lora).resolve())
    return {name: loaded[name] for name in _ASKED_FOR}


def _identity(settings: Settings) -> dict[str, Any]:
    """Which model, adapter and template the names stand for now; nothing is fetched for it."""
    if settings.options.server is not None:
        return {"server": settings.options.server}
    from minicpm_cli.hub import identify
    from minicpm_cli.hub.identity import written
    from minicpm_cli.model.lora_files import identity

    model, template = identify(settings.options.model, settings), Path(settings.options.chat_template)
    if model and settings.options.lora is not None:
        model |= {"lora": identity(Path(settings.options.lora))["sha256"]}
    return model | {"chat_template": written(template)} if model and template.is_file() else model
