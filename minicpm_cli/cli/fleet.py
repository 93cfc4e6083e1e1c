"""Several engines for one command: which devices they take, and how they are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicpm_cli.cli.opening import files_of
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.settings import LoadOptions, Settings

if TYPE_CHECKING:
    from minicpm_cli.fleet.link import Link
    from minicpm_cli.hub.files import ModelFiles


@dataclass(frozen=True, slots=True)
class Crew:
    """An engine for each of `devices`; on a Ray cluster at `ray`, if that is given."""

    devices: tuple[str, ...] = ()
    ray: str | None = None


def crew(options: LoadOptions, gpus: int | None, workers: int | None, ray: str | None) -> Crew | None:
    """None where a single engine in this process is asked for. Raises UsageError."""
    for flag, count in (("--gpus", gpus), ("--workers", workers)):
        if count is not None and count < 1:
            raise UsageError(f"{flag} is {count}; it must be at least 1.")
    if gpus is not None:
        return _gpus(options, gpus, workers, ray)
    if ray is not None:
        if workers is None:
            raise UsageError("--ray needs --workers N: how many engines, each with a GPU (a core, with --device cpu).")
        return Crew(("cpu" if options.device == "cpu" else "cuda",) * workers, ray)
    if workers is None:
        return None
    if options.device != "cpu":
        raise UsageError("--workers shares this CPU out: give --device cpu with it, --gpus N for GPUs, or --ray.")
    return Crew(("cpu",) * workers)


def _gpus(options: LoadOptions, gpus: int, workers: int | None, ray: str | None) -> Crew:
    if workers is not None or ray is not None:
        raise UsageError("--gpus is an engine for each GPU of this machine; --workers and --ray are something else.")
    if options.device not in ("auto", "cuda"):
        raise UsageError(f"--gpus {gpus} takes the first {gpus} GPUs, and --device is {options.device}.")
    return Crew(tuple(f"cuda:{number}" for number in range(gpus)))


@contextmanager
def fleet(invocation: Invocation, settings: Settings, crew: Crew) -> Iterator[LanguageModel]:
    """Closed at the end, with its processes. Raises DeviceError where there are too few GPUs."""
    with ProgressLine(invocation.terminal) as progress:
        files = files_of(settings, progress)
        progress(f"loading {files.name} {len(crew.devices)} times", 0, None)
        from minicpm_cli.fleet.fleet import Fleet
        from minicpm_cli.llm.prompter import Prompter

        prompter = Prompter.open(settings.options, files)
        start = _starter(crew, settings, files)
        links = [start(number) for number in range(len(crew.devices))]
        opened = Fleet(prompter, links, invocation.terminal.note, start)
    try:
        info = opened.info
        checkpoint = prompter.checkpoint.with_options(settings.options)
        prompter.checkpoint = replace(checkpoint, cfg=checkpoint.cfg.with_context(info.context))
        for note in info.notes:
            invocation.terminal.note(note)
        invocation.terminal.detail(f"{info.name}: {info.scheme} on {info.device}, {info.max_seqs} seats")
        yield opened
    finally:
        opened.close()


def _starter(crew: Crew, settings: Settings, files: ModelFiles) -> Callable[[int], Link]:
    """Begins the worker of a number, now or again."""
    if crew.ray is None:
        from minicpm_cli.fleet import local

        return local.starter(crew.devices, settings.options, files, settings.threads, settings.cache_dir)
    from minicpm_cli.fleet import ray_link
    from minicpm_cli.fleet.messages import Order

    cpu = crew.devices[0] == "cpu"
    threads = settings.threads or (1 if cpu else None)
    order = Order(replace(settings.options, device=crew.devices[0]), files, threads, settings.cache_dir)
    count, cpus = len(crew.devices), threads or 1
    return ray_link.starter(ray_link.connect(crew.ray, count, cpus), order, cpus)
