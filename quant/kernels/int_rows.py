"""Packed integers times the rows of a batch of sequences: 2 to about 128, between a GEMV and a prefill."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quant.kernels import rows_cuda
from quant.kernels.layout import DeviceInt


def supported(w: DeviceInt, dtype: torch.dtype) -> bool:
    """Whether `product` computes it: rows of whole 16-byte pieces."""
    if rows_cuda.supported(w, dtype):
        return True
    from quant.kernels import rows_triton

    return rows_triton.supported(w, dtype)


def product(
    x: Tensor,  # [T, K] bfloat16 or float16
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
    folder: Path | None = None,  # of compiled kernels
) -> Tensor:  # [T, N]
    """onto + alpha * x @ W^T, weights rounded to x's type, sums in float32; the same bits at every call."""
    if rows_cuda.supported(w, x.dtype) and _faster_compiled(len(x), w):
        return rows_cuda.product(x, w, onto, alpha, folder)
    from quant.kernels import rows_triton  # triton takes a second to import

    return rows_triton.product(x, w, onto, alpha)


def _faster_compiled(rows: int, w: DeviceInt) -> bool:
    """Whether the kernel in rows.cu is the faster one, by the products of MiniCPM-2B in 4 bits on an H200."""
    tiles = -(-w.N // 64)
    if w.group == w.K:  # Triton's does not take it
        return True
    if rows <= 16:
        return tiles <= rows_cuda.MANY_TILES
    return 32 < rows <= 64 and not rows_cuda.PROCESSORS < tiles <= rows_cuda.MANY_TILES
