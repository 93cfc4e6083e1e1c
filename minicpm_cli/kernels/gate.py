"""The gate of a feed-forward block: act(gate) * up over the two halves of one product's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.launch import Remembered, dependent, early

BLOCK = 1024  # columns of a program; 8 elements, one 16-byte load, for each of 128 threads


def silu_mul(gate_up: Tensor) -> Tensor:  # [T, 2I] -> [T, I]
    """silu(gate) * up, rounded once."""
    return _launch(gate_up, None)


def relu_mul(gate_up: Tensor, threshold: float) -> Tensor:  # [T, 2I] -> [T, I]
    """fatrelu (ProSparse, section 3.3): the gate where it is at least `threshold`, else 0."""
    return _launch(gate_up, threshold)


def _launch(gate_up: Tensor, threshold: float | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), device=gate_up.device, dtype=gate_up.dtype)
    if out.numel():
        rows = gate_up.reshape(-1, 2 * width)
        _gate[(len(rows), triton.cdiv(width, BLOCK))](
            rows, out, rows.stride(0), width, threshold or 0.0,
            SILU=threshold is None, BLOCK=BLOCK, EARLY=early(rows), **dependent(rows),
        )  # fmt: skip
    return out


@Remembered
@triton.jit
def _gate(gate_up, out, stride, width, threshold, SILU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    if EARLY:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + i, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        small = tl.exp(-tl.abs(gate))  # exp(-gate) would overflow far out
        gate *= tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    else:
        gate = tl.where(gate >= threshold, gate, 0.0)
    tl.store(out + row * width + i, (gate * up).to(out.dtype.element_ty), mask=inside)
