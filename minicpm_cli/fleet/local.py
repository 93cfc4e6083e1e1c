"""A fleet's workers on this machine: a process for each device."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from minicpm_cli.errors import DeviceError
from minicpm_cli.fleet.link import ProcessLink
from minicpm_cli.fleet.messages import Order
from minicpm_cli.hub.files import ModelFiles
from minicpm_cli.settings import LoadOptions


def starter(
    devices: Sequence[str], options: LoadOptions, files: ModelFiles, threads: int | None, cache: Path | None
) -> Callable[[int], ProcessLink]:
    """Starts the process for the device of a number, and tells it what to load.

    On one CPU they share the cores, unless `threads` says how many each takes.

    Raises DeviceError where there are too few GPUs.
    """
    if "cpu" in devices:
        threads = threads or max(_cores() // len(devices), 1)
    else:
        _check_there(len(devices))
    return lambda number: ProcessLink(Order(replace(options, device=devices[number]), files, threads, cache))


def _check_there(count: int) -> None:
    import torch

    there = torch.cuda.device_count()
    if there < count:
        raise DeviceError(f"--gpus {count}: this machine has {there} that torch can use. Ask for fewer.")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
