"""Packed integers to plain weights in one pass over memory: for many rows cuBLAS on these wins."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.kernels import dequantize_cuda
from quant.kernels.layout import DeviceInt


class Dequantizer:
    """The weights of one matrix, computed in float32 and rounded once."""

    def __init__(self, w: DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.packed, self.dtype = w, dtype
        self._compiled = dequantize_cuda.Dequantize(w, dtype, folder) if dequantize_cuda.supported(w, dtype) else None

    def __call__(self, out: Tensor | None = None) -> Tensor:  # [N, K]
        """`out` is contiguous and of the type that was asked for."""
        w = self.packed
        if out is None:
            out = torch.empty(w.N, w.K, dtype=self.dtype, device=w.words.device)
        elif out.shape != (w.N, w.K) or out.dtype != self.dtype or not out.is_contiguous():
            raise FormatError(f"out is {list(out.shape)} {out.dtype}, not a contiguous {[w.N, w.K]} {self.dtype}")
        if self._compiled is not None and out.data_ptr() % dequantize_cuda.ALIGNMENT == 0:
            self._compiled(out)
        else:
            from quant.kernels import dequantize_triton  # triton takes a second to import

            dequantize_triton.fill(w, out)
        return out


def dequantize(w: DeviceInt, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:  # [N, K]
    """For once."""
    return Dequantizer(w, dtype)(out)
