"""Packed integers to plain weights in one pass over memory: for many rows cuBLAS on these wins."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.kernels import dequantize_cuda
from quant.kernels.layout import DeviceInt


def dequantize(
    w: DeviceInt,
    dtype: torch.dtype,
    out: Tensor | None = None,  # [N, K]
    folder: Path | None = None,  # of compiled kernels
) -> Tensor:  # [N, K]
    """The weights, computed in float32 and rounded once; `out` is contiguous and of `dtype`."""
    if out is None:
        out = torch.empty(w.N, w.K, dtype=dtype, device=w.words.device)
    elif out.shape != (w.N, w.K) or out.dtype != dtype or not out.is_contiguous():
        raise FormatError(f"out is {list(out.shape)} {out.dtype}, not a contiguous {[w.N, w.K]} {dtype}")
    if dequantize_cuda.supported(w, out):
        dequantize_cuda.fill(w, out, folder)
    else:
        from quant.kernels import dequantize_triton  # triton takes a second to import

        dequantize_triton.fill(w, out)
    return out
