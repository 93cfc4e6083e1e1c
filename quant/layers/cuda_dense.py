"""Plain weights on CUDA: a kernel of our own for a few rows, with what is around the product; another for a batch, and
cuBLAS where that is faster."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quant.kernels import rows_bulk
from quant.kernels.gemv import MOST_ROWS, Gemv
from quant.layers.around import Gate, Norm
from quant.layers.plain import whole_rows


class CUDADense:
    """`weight` where it is, float16 or bfloat16; rows of a multiple of 8 columns (`gemv.supported`)."""

    def __init__(self, weight: Tensor, folder: Path | None = None) -> None:  # [N, K]
        self.weight, self.whole = weight, whole_rows(weight)
        self.out_features = weight.shape[0]
        self.fused_rows = MOST_ROWS
        self.gemv = Gemv(weight, weight.dtype, folder)
        self.rows = rows_bulk.Product(weight, weight.dtype, folder)
        self.batch_rows = rows_bulk.most_rows(weight) if rows_bulk.supported(weight, weight.dtype) else 0

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:  # [T, K]
        if 0 < len(x) <= MOST_ROWS:
            return self.gemv(x)
        if 0 < len(x) <= self.batch_rows and self.rows.ready(len(x)):
            return self.rows(x)
        return functional.linear(x, self.whole)[:, : self.out_features]

    def fused(
        self,
        x: Tensor,  # [T, K]
        norm: Norm | None = None,
        gate: Gate | None = None,
        onto: Tensor | None = None,
        alpha: float = 1.0,
        *,
        float32_out: bool = False,
    ) -> Tensor:
        """onto + alpha * gate(W @ norm(x)) for 1 to `fused_rows` rows, rounded once."""
        return self.gemv(x, norm, gate, onto, alpha, float32_out=float32_out)

    def added(self, x: Tensor, onto: Tensor, alpha: float, inplace: bool = False) -> Tensor:  # [T, N]
        """onto + alpha * W @ x for any number of rows; with `inplace`, `onto` may be overwritten by it."""
        if 0 < len(x) <= MOST_ROWS:
            return self.gemv(x, onto=onto, alpha=alpha)
        if 0 < len(x) <= self.batch_rows and self.rows.ready(len(x)):
            return self.rows(x, onto, alpha, onto if inplace else None)
        return torch.addmm(onto, x, self.weight.T, alpha=alpha, out=onto if inplace else None)

    def dequantize(self) -> Tensor:
        return self.weight
