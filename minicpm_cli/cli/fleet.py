"""Several engines for one command: which devices they take, and how they are opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from minicpm_cli.cli.opening import files_of
from minicpm_cli.cli.progress import ProgressLine
from minicpm_cli.cli.runtime import Invocation
from minicpm_cli.errors import DeviceError, UsageError
from minicpm_cli.llm.info import LanguageModel
from minicpm_cli.settings import LoadOptions, Settings


def devices(options: LoadOptions, gpus: int | None, workers: int | None) -> list[str]:
    """One for each engine; none where a single engine in this process was asked for. Raises UsageError."""
    if gpus is not None and workers is not None:
        raise UsageError("--gpus is an engine for each GPU, --workers several on the CPU: give one of them.")
    for flag, count in (("--gpus", gpus), ("--workers", workers)):
        if count is not None and count < 1:
            raise UsageError(f"{flag} is {count}; it must be at least 1.")
    if gpus is not None:
        if options.device not in ("auto", "cuda"):
            raise UsageError(f"--gpus {gpus} takes the first {gpus} GPUs, and --device is {options.device}.")
        return [f"cuda:{number}" for number in range(gpus)]
    if workers is not None:
        if options.device != "cpu":
            raise UsageError("--workers shares the CPU out: give --device cpu with it, or --gpus N for GPUs.")
        return ["cpu"] * workers
    return []


@contextmanager
def fleet(invocation: Invocation, settings: Settings, places: list[str]) -> Iterator[LanguageModel]:
    """Closed at the end, with its processes. Raises DeviceError where there are too few GPUs."""
    with ProgressLine(invocation.terminal) as progress:
        files = files_of(settings, progress)
        progress(f"loading {files.name} {len(places)} times", 0, None)
        from minicpm_cli.fleet.fleet import Fleet
        from minicpm_cli.fleet.link import ProcessLink
        from minicpm_cli.fleet.messages import Order
        from minicpm_cli.llm.prompter import Prompter

        prompter = Prompter.open(settings.options, files)
        _check_there(places)
        threads = _threads(settings, places)
        orders = [Order(replace(settings.options, device=at), files, threads, settings.cache_dir) for at in places]
        opened = Fleet(prompter, [ProcessLink(order) for order in orders], invocation.terminal.note)
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


def _check_there(places: list[str]) -> None:
    if places[0] == "cpu":
        return
    import torch

    there = torch.cuda.device_count()
    if there < len(places):
        raise DeviceError(f"--gpus {len(places)}: this machine has {there} that torch can use. Ask for fewer.")


def _threads(settings: Settings, places: list[str]) -> int | None:
    """Of each engine; on a CPU they share the cores."""
    if settings.threads is not None or places[0] != "cpu":
        return settings.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // len(places), 1)
