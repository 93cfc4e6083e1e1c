"""RMSNorm, a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.launch import Remembered, dependent, early


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H]
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32. The rows may lie apart, as columns of a wider matrix."""
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if out.numel():
        rows, width = x.reshape(-1, x.shape[-1]), x.shape[-1]
        pad = triton.next_power_of_2(width)
        _rms_norm[(len(rows),)](
            rows, weight, out, rows.stride(0), width, eps,
            PAD=pad, EARLY=early(x), num_warps=min(max(pad // 512, 1), 8), **dependent(x),
        )  # fmt: skip
    return out


@Remembered
@triton.jit
def _rms_norm(x, weight, out, x_stride, width, eps, PAD: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < width
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)  # depends on nothing: on its way before the wait
    if EARLY:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(out + row * width + i, (value * scale * w).to(out.dtype.element_ty), mask=inside)
