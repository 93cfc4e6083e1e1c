"""RMSNorm, alone or with the addition to the residual stream that comes before it; a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.launch import dependent, early


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H]
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32. The rows may lie apart, as columns of a wider matrix."""
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if out.numel():
        rows = x.reshape(-1, x.shape[-1])
        _launch(rows, None, None, weight, eps, 0.0, out)
    return out


def add_rms_norm(
    h: Tensor,  # [T, H]
    delta: Tensor,  # [T, H]
    alpha: float,
    weight: Tensor,  # [H]
    eps: float,
) -> tuple[Tensor, Tensor]:
    """h + alpha * delta, rounded to h's dtype, and its norm."""
    total, out = torch.empty_like(h), torch.empty_like(h)
    if out.numel():
        _launch(h, delta, total, weight, eps, alpha, out)
    return total, out


def _launch(
    x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, eps: float, alpha: float, out: Tensor
) -> None:
    width = x.shape[1]
    pad = triton.next_power_of_2(width)
    _rms_norm[(len(x),)](
        x, delta, total, weight, out, x.stride(0), delta.stride(0) if delta is not None else 0, width, eps, alpha,
        PAD=pad, EARLY=early(x), num_warps=min(max(pad // 512, 1), 8), **dependent(x),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x, delta, total, weight, out, x_stride, delta_stride, width, eps, alpha, PAD: tl.constexpr, EARLY: tl.constexpr
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < width
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)  # depends on nothing: on its way before the wait
    if EARLY:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        value += alpha * tl.load(delta + row * delta_stride + i, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * width + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / width + eps)
    tl.store(out + row * width + i, (value * scale * w).to(out.dtype.element_ty), mask=inside)
