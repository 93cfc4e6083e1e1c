"""`minicpm eval`: how well a model predicts a text, and how far it is from another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minicpm_cli.chat.attach import decode, read_text
from minicpm_cli.cli import completion
from minicpm_cli.cli.opening import DEMO
from minicpm_cli.cli.options import LOAD, MODEL, OUTPUT, Flags, examples, takes
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation, stdin_bytes
from minicpm_cli.cli.tables import show_table
from minicpm_cli.errors import UsageError
from minicpm_cli.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from minicpm_cli.bench.evaluation import Candidate
    from minicpm_cli.bench.quality_rows import QualityRow

STDIN = "-"
_EXAMPLES = examples(
    "minicpm eval demo --dtype fp32",
    "minicpm eval ./quantized --against openbmb/MiniCPM4-0.5B",
    "minicpm eval ./quantized --text book.txt --window 2048 --stride 512 --json",
)


def register(app: typer.Typer) -> None:
    app.command("eval", epilog=_EXAMPLES)(evaluate)


@takes(MODEL, LOAD, OUTPUT)
def evaluate(
    context: typer.Context,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The same as --model.", autocompletion=completion.models),
    ] = None,
    *,
    text: Annotated[
        str | None, typer.Option(help="Text to predict, - is stdin; none: a built-in one.", metavar="FILE")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with this model as it is stored: KL divergence, agreement.",
            metavar="MODEL",
            autocompletion=completion.models,
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens read at once; unset: 2048, or the context.", metavar="N")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Each window begins N tokens after the last; unset: half a window.", metavar="N"),
    ] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Begin each window with the BOS token.")] = False,
    max_windows: Annotated[int | None, typer.Option(help="Read only the first N windows.", metavar="N")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON record.")] = False,
    flags: Flags,
) -> None:
    """Measure how well a model predicts a text, and how far it is from another model.

    The built-in text is the second half of Python's help topics: six windows of 512 tokens; --window, --stride or --bos
    slide over all of it. A token is predicted once, from at least window - stride tokens before it.
    """
    from minicpm_cli.bench.evaluation import EvalOptions
    from minicpm_cli.bench.evaluation import evaluate as measure

    invocation: Invocation = context.obj
    settings = invocation.configure(_chosen(flags, subject))
    options = EvalOptions(None, "", window, stride, bos, max_windows).checked()
    if text is not None:
        options = replace(options, text=_text(text), name=text).checked()
    load = settings.options
    if settings.model_is_default:
        invocation.terminal.note(DEMO)
    with ProgressLine(invocation.terminal) as progress:
        model = _candidate(load.model, load, settings, progress)
        plain = replace(load, quantize=None, head_bits=16, gptq_format=None, kv_dtype="auto", lora=None)
        reference = _candidate(against, plain, settings, progress) if against is not None else None
        _settle(settings)
        row = measure(model, reference, options, load, progress)
    if as_json:
        invocation.terminal.out.write(row.to_json() + "\n")
    else:
        show_table(invocation.terminal, ("what", "value"), lines(row))


def lines(row: QualityRow) -> list[tuple[str, str]]:
    """A row for people to read."""
    from minicpm_cli.bench.rows import place

    stride = f", {row.stride} apart" if row.stride else ""
    shown = [
        ("perplexity", f"{row.ppl:.4f}"),
        ("tokens", f"{row.tokens:,} predicted in {row.windows} windows of {row.window}{stride}"),
        ("text", row.text + (", BOS before each window" if row.bos else ", no BOS")),
    ]
    if row.against is not None:
        shown += [
            ("reference", row.against),
            ("its perplexity", f"{row.ref_ppl:.4f}"),
            ("KL divergence", f"{row.kl:.3g} nats a token, from the reference"),
            ("top-1 agreement", f"{row.top1:.2%}"),
        ]
    if row.bytes and row.bits_per_weight:
        shown.append(("files", f"{row.bytes / 1e6:,.1f} MB, {row.bits_per_weight:.2f} bits a weight"))
    shown.append(("model", f"{row.setting.model}, {row.setting.scheme} on {place(row.setting)}"))
    return [*shown, ("time", f"{row.seconds:.1f} s")]


def _chosen(flags: Flags, subject: str | None) -> Flags:
    """The model is the argument, or an option for those who are used to it."""
    if subject is None:
        return flags
    if flags["model"] or flags["model_path"]:
        raise UsageError(f"the model is given twice, as {subject} and with an option; leave one out")
    return {**flags, "model": subject}


def _text(name: str) -> str:
    if name != STDIN:
        return read_text(Path(name))
    pipe = stdin_bytes()
    return decode(pipe.read(), "stdin") if pipe else ""


def _candidate(name: str, load: LoadOptions, settings: Settings, progress: ProgressLine) -> Candidate:
    """Fetched if it is not here; its weights are not read yet."""
    from minicpm_cli.bench.evaluation import Candidate
    from minicpm_cli.hub import resolve

    files = resolve(name, settings, progress)
    return Candidate.read(replace(files, name=files.name or name), load)


def _settle(settings: Settings) -> None:
    import torch

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
