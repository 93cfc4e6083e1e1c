"""Where a quantization runs: device, type of the activations, and what is free and how fast there."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch

from minicpm_cli.llm.device import choose_device, choose_dtype, free_bytes
from minicpm_cli.quantize.plan import Machine
from minicpm_cli.quantize.stream import CPU_TOKENS, CUDA_TOKENS
from minicpm_cli.settings import LoadOptions

PROBE_SECONDS, PROBE_SIZE = 0.1, 1024


def device_of(options: LoadOptions, threads: int | None) -> tuple[torch.device, torch.dtype]:
    """`auto` computes in float32 on a CPU, where it is as fast, and in bf16 on a GPU. Raises DeviceError."""
    if threads is not None:
        torch.set_num_threads(threads)
    device = choose_device(options.device)
    if options.dtype == "auto" and device.type == "cpu":
        return device, torch.float32
    return device, choose_dtype(options.dtype, device)


def machine_of(device: torch.device, dtype: torch.dtype, target: Path) -> Machine:
    host = free_bytes(torch.device("cpu"))
    return Machine(
        device=str(device),
        itemsize=dtype.itemsize,
        chunk=CPU_TOKENS if device.type == "cpu" else CUDA_TOKENS,
        free=free_bytes(device),
        host_free=host,
        disk_free=shutil.disk_usage(_existing(target)).free,
        rate=measured_rate(device, dtype),
    )


def measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square product, the best of what fits in PROBE_SECONDS after a first one."""
    a = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device, dtype=dtype)
    (a @ a)[0, 0].item()  # loads cuBLAS: counted, that alone made two minutes on a GPU look like 14 hours
    best, end = float("inf"), time.monotonic() + PROBE_SECONDS
    while time.monotonic() < end:
        begun = time.monotonic()
        (a @ a)[0, 0].item()
        best = min(best, time.monotonic() - begun)
    return 2.0 * PROBE_SIZE**3 / best


def _existing(path: Path) -> Path:
    """The folder that `path` will be written to."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
