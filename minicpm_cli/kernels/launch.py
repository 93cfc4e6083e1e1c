"""Programmatic dependent launch: a kernel's blocks are in place before its predecessor has ended, and wait there."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can overlap so: Hopper and later."""
    return x.is_cuda and _capability(x.device) >= (9, 0)


def dependent(x: Tensor) -> dict[str, bool]:
    """The launch option that goes with it. A kernel launched with it must wait before it reads what another wrote."""
    return {"launch_pdl": True} if early(x) else {}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
