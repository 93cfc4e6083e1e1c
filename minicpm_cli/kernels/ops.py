"""The tuple of operations that a decoder calls, chosen once for its device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from minicpm_cli.kernels.batch import ForwardBatch


class RMSNorm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


class Rope(Protocol):
    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, /) -> None: ...


class SiluMul(Protocol):
    def __call__(self, gate_up: Tensor, /) -> Tensor: ...


class ReluMul(Protocol):
    def __call__(self, gate_up: Tensor, threshold: float, /) -> Tensor: ...


class Attend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, scale: float, /) -> Tensor: ...


class Ops(NamedTuple):
    rms_norm: RMSNorm
    rope_: Rope
    silu_mul: SiluMul
    relu_mul: ReluMul
    attend: Attend


REFERENCE = Ops(reference.rms_norm, reference.rope_, reference.silu_mul, reference.relu_mul, reference.attend)


def ops_for(device: torch.device) -> Ops:
    """The operations for `device`. CUDA runs the reference too until it has kernels of its own."""
    return REFERENCE
