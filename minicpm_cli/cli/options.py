"""The options that commands share, each named as in the settings; a command takes whole groups of them as `flags`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Annotated, Any

import typer

from minicpm_cli.cli import completion


def _option(name: str, kind: Any, help: str, *declared: str, metavar: str | None = None) -> inspect.Parameter:  # noqa: A002
    offers = completion.for_setting(name)
    option = typer.Option(*declared, help=help, metavar=metavar, show_default=False, autocompletion=offers)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


MODEL = (
    _option("model", str, "Folder, .gguf file, hub repo id[@revision] or alias.", "-m", "--model", metavar="MODEL"),
    _option("model_path", str, "The same as --model.", "--model-path", metavar="PATH"),
    _option("chat_template", str, "auto, chatml, minicpm or a file.", "--chat-template", metavar="NAME"),
    _option("trust_remote_code", bool, "Accepted, not needed.", "--trust-remote-code"),
)
PLACE = (
    _option("device", str, "auto, cpu, cuda or cuda:N.", "--device", metavar="DEV"),
    _option("dtype", str, "auto, bf16, fp16 or fp32.", "--dtype", metavar="TYPE"),
    _option("ctx", int, "Context in tokens.", "--ctx", metavar="N"),
    _option(
        "kv_dtype",
        str,
        "Keys and values in the cache: auto is as --dtype; fp8 and int8 take half the memory of bf16.",
        "--kv-dtype",
        metavar="TYPE",
    ),
    _option("max_seqs", int, "Sequences at once.", "--max-seqs", metavar="N"),
    _option("max_batch_tokens", int, "Tokens in one step.", "--max-batch-tokens", metavar="N"),
    _option("memory_fraction", float, "Share of the free memory to use, (0, 1].", "--memory-fraction", metavar="F"),
    _option("graphs", bool, "Decode steps on a GPU as captured graphs.", "--graphs/--no-graphs"),
    _option("threads", int, "CPU threads.", "--threads", metavar="N"),
)
PACKING = (
    _option(
        "quantize",
        str,
        "Quantize at load, to nearest: w4, w8, nf4, int8 or fp8; minicpm quantize writes better 4 bits.",
        "--quantize",
        metavar="SCHEME",
    ),
    _option("head_bits", int, "8 or 4 quantizes the output head at load; 16 does not.", "--head-bits", metavar="N"),
    _option(
        "gptq_format", str, "v1 or v2: zero points of GPTQ files that do not say it.", "--gptq-format", metavar="V"
    ),
)
ADAPTER = (
    _option(
        "lora",
        str,
        "LoRA adapter (PEFT's folder or a hub repo id): merged into plain weights, beside quantized ones.",
        "--lora",
        metavar="DIR",
    ),
)
LOAD = (*PLACE, *PACKING, *ADAPTER)
API_KEY = (
    _option("api_key", str, "The server's key; MINICPM_API_KEY keeps it out of sight.", "--api-key", metavar="KEY"),
)
SERVER = (
    _option("server", str, "Ask this OpenAI-compatible server; no model is loaded here.", "--server", metavar="URL"),
    *API_KEY,
)
LOOKUP = (
    _option(
        "lookup",
        int,
        "Verify up to N tokens that repeat what was said in one step; the answer stays the same. 0: off.",
        "--lookup",
        metavar="N",
    ),
)
SAMPLING = (
    _option("temperature", float, "0 always takes the likeliest token.", "-t", "--temperature", metavar="T"),
    _option("top_p", float, "Likeliest tokens of this total probability; 0: one.", "--top-p", metavar="P"),
    _option("top_k", int, "The K likeliest tokens; 0: all.", "--top-k", metavar="K"),
    _option("min_p", float, "Tokens at least this likely beside the likeliest.", "--min-p", metavar="P"),
    _option("repetition_penalty", float, "Above 1: fewer repetitions.", "--repetition-penalty", metavar="F"),
    _option("presence_penalty", float, "From -2 to 2.", "--presence-penalty", metavar="F"),
    _option("frequency_penalty", float, "From -2 to 2.", "--frequency-penalty", metavar="F"),
    _option("seed", int, "The same seed, the same answer.", "--seed", metavar="N"),
    _option("max_tokens", int, "At most this many new tokens.", "-n", "--max-tokens", metavar="N"),
    _option("min_tokens", int, "No end before this many new tokens.", "--min-tokens", metavar="N"),
    _option("stop", list[str], "End the answer before this text; repeatable.", "--stop", metavar="STR"),
    _option("logit_bias", list[str], "Add to a token's score; repeatable.", "--logit-bias", metavar="ID=BIAS"),
    _option("ignore_eos", bool, "Go on where the model would end, as benchmarks do.", "--ignore-eos"),
    _option("think", bool, "Whether the model thinks before it answers.", "--think/--no-think"),
    _option("schema", str, "The answer is JSON of this schema.", "--schema", metavar="FILE|JSON"),
    _option("regex", str, "The answer matches this, from its beginning to its end.", "--regex", metavar="RE"),
    _option("think_budget", int, "At most this many tokens of thinking.", "--think-budget", metavar="N"),
)
LOGPROBS = (_option("logprobs", int, "Log-probabilities of the N likeliest tokens.", "--logprobs", metavar="N"),)
OUTPUT = (  # and what else every command takes
    _option("profile", str, "Settings of [profiles.NAME] in the config file.", "--profile", metavar="NAME"),
    _option("plain", bool, "No colours, no markdown.", "--plain"),
    _option("quiet", bool, "Only the answer and errors.", "-q", "--quiet"),
    _option("verbose", bool, "Numbers, and where an error comes from.", "-v", "--verbose"),
)

Flags = dict[str, Any]
Group = Iterable[inspect.Parameter]


def takes(*groups: Group) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of `groups`; it receives their values as its keyword argument `flags`."""
    shared = [parameter for group in groups for parameter in group]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        parameters = [*(p for p in signature.parameters.values() if p.name != "flags"), *shared]

        @functools.wraps(command)
        def called(**values: Any) -> Any:
            flags = {p.name: values.pop(p.name) for p in shared}
            return command(**values, flags=flags)

        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def examples(*lines: str) -> str:
    """The end of a command's help: lines that can be run as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


EXIT_CODES = MappingProxyType(
    {
        0: "ok",
        1: "some rows failed, --extract found nothing, --schema no end, or --replay another answer",
        2: "usage: a flag, a setting or a prompt that cannot work",
        3: "the model or a file",
        4: "memory or GPU",
        130: "interrupted",
    }
)
