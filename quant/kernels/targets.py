"""Which of the kernels a device runs: those in Triton, and those in CUDA C++ for Hopper's instructions and memory."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch

from quant.kernels import nvrtc

SHARED_BYTES = 227 << 10  # of a block: what the launches of the kernels in CUDA C++ are planned for


@functools.cache
def triton_compiles(device: torch.device) -> bool:
    """Whether Triton is installed and knows the GPU: from compute capability 8.0 on."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@functools.cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernels in CUDA C++ do not run on `device`, whichever device is current; None where they do.

    Later GPUs for desktops (capability 12) have the instructions, but 99 KB of shared memory for a block.
    """
    if device.type != "cuda":
        return "it is not a CUDA device"
    gpu = torch.cuda.get_device_properties(device)
    if (gpu.major, gpu.minor) < (9, 0):
        return f"the GPU's compute capability is {gpu.major}.{gpu.minor}; the kernels need 9.0 (Hopper) or later"
    room = getattr(gpu, "shared_memory_per_block_optin", SHARED_BYTES)
    if room < SHARED_BYTES:
        return f"a block of the GPU has {room >> 10} KB of shared memory; the kernels need {SHARED_BYTES >> 10} KB"
    return nvrtc.unavailable()
