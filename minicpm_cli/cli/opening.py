"""From settings to a loaded model, telling the user what takes its time."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minicpm_cli.chat.terminal import Terminal
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.llm.info import LanguageModel, Prompts
from minicpm_cli.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from minicpm_cli.hub.files import ModelFiles

DEMO = (
    "no model was chosen, so this is demo (SmolLM2-135M-Instruct), which is only good for trying things out. "
    "Real ones: -m minicpm4-0.5b, minicpm5-1b, minicpm4-8b, ... (minicpm models)"
)
_OF_LOADING = {"threads", *(f.name for f in fields(LoadOptions))} - {"model", "server", "api_key"}


def open_llm(settings: Settings, terminal: Terminal) -> LanguageModel:
    """Fetches what is missing, loads the weights; or reaches the server that has them."""
    if settings.options.server is not None:
        return _served(settings, settings.options.server, terminal)
    _say_demo(settings, terminal)
    from minicpm_cli.llm.warm import heard_interrupts, warm_up, without_collector

    warm_up(settings.options.device)
    with ProgressLine(terminal) as progress:
        files = files_of(settings, progress)
        progress("loading " + files.name, 0, None)
        with heard_interrupts(), without_collector():
            from minicpm_cli.llm.prompter import Prompter

            prompter = Prompter.open(settings.options, files)  # needs no torch, which is being loaded meanwhile
            from minicpm_cli.llm.llm import LLM

        def layers(done: int, total: int) -> None:
            progress(f"loading {files.name}", done, total, "layers")

        threads, cache = settings.threads, settings.cache_dir
        llm = LLM.open(settings.options, files, layers, threads=threads, cache=cache, prompter=prompter)
    info = llm.info
    terminal.detail(
        f"{info.name}: {info.architecture}, {info.scheme} on {info.device}, context {info.context} tokens, "
        f"{info.weight_bytes / 1e9:.2f} GB weights, {info.cache_bytes / 1e9:.2f} GB cache, "
        f"loaded in {info.load_seconds:.2f} s"
    )
    for line in info.details:
        terminal.detail(line)
    return llm


def open_prompts(settings: Settings, terminal: Terminal) -> Prompts:
    """Tokenizer, template and config; no weights are read."""
    if settings.options.server is not None:
        return _served(settings, settings.options.server, terminal)
    _say_demo(settings, terminal)
    with ProgressLine(terminal) as progress:
        files = files_of(settings, progress)
    from minicpm_cli.llm.prompter import Prompter

    return Prompter.open(settings.options, files)


def with_adapter_here(settings: Settings, terminal: Terminal) -> Settings:
    """With the folder of an adapter that was named by its repository, fetched where it is missing."""
    lora = settings.options.lora
    if lora is None or settings.options.server is not None or Path(lora).is_dir():
        return settings
    from minicpm_cli.hub import adapter

    with ProgressLine(terminal) as progress:
        folder = adapter(lora, progress)
    return replace(settings, options=replace(settings.options, lora=str(folder)))


def _served(settings: Settings, url: str, terminal: Terminal) -> LanguageModel:
    from minicpm_cli.llm.remote import RemoteLLM

    flags = [row.origin.removeprefix("flag ") for row in settings.rows if row.name in _OF_LOADING]
    if idle := [flag for flag in flags if flag.startswith("--")]:
        terminal.note(f"{', '.join(idle)}: the server has loaded its model in its own way, so that changes nothing")
    model = None if settings.model_is_default else settings.options.model
    return RemoteLLM.open(url, settings.options.api_key, model, settings.sampling)


def _say_demo(settings: Settings, terminal: Terminal) -> None:
    if settings.model_is_default:
        terminal.note(DEMO)


def files_of(settings: Settings, progress: ProgressLine) -> ModelFiles:
    """Fetched where they are missing."""
    from minicpm_cli.hub import resolve

    files = resolve(settings.options.model, settings, progress)
    return replace(files, name=files.name or settings.options.model)
