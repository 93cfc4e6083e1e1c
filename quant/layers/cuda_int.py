"""Group-wise 4- and 8-bit weights on CUDA, each number of rows through the product that is fastest for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quant.kernels import gemv, int_rows
from quant.kernels.dequantize import Dequantizer
from quant.kernels.layout import DeviceInt
from quant.layers.around import Gate, Norm


class CUDAInt:
    """Up to `fused_rows` rows by the kernel that computes what is around the product too; then tensor cores on packed
    weights; then cuBLAS on unpacked ones. Columns in the order of the inputs."""

    def __init__(
        self, packed: DeviceInt, dtype: torch.dtype, folder: Path | None = None, *, compiled: bool = True
    ) -> None:
        self.packed, self.dtype, self.folder = packed, dtype, folder
        self.out_features = packed.N
        fits = compiled and gemv.supported(packed, dtype)
        self.gemv = gemv.Gemv(packed, dtype, folder) if fits else None
        self.fused_rows = gemv.MOST_ROWS if fits else 0
        self.dequantize = Dequantizer(packed, dtype, folder)
        self.rows = int_rows.IntRows(packed, dtype, folder) if int_rows.supported(packed, dtype, folder) else None
        self.packed_rows = int_rows.most_rows(packed)

    def over(self, packed: DeviceInt) -> CUDAInt:
        """The same kind of layer over other weights."""
        return CUDAInt(packed, self.dtype, self.folder, compiled=self.gemv is not None)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:  # [T, K]
        if self.gemv and 0 < len(x) <= self.fused_rows:
            return self.gemv(x)
        if self.rows and 0 < len(x) <= self.packed_rows:
            return self.rows(x)
        return functional.linear(x, self.dequantize())

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
        assert self.gemv is not None
        return self.gemv(x, norm, gate, onto, alpha, float32_out=float32_out)

    def added(self, x: Tensor, onto: Tensor, alpha: float, inplace: bool = False) -> Tensor:  # [T, N]
        """onto + alpha * W @ x for any number of rows; with `inplace`, `onto` may be overwritten by it."""
        if self.gemv and 0 < len(x) <= self.fused_rows:
            return self.gemv(x, onto=onto, alpha=alpha)
        if self.rows and 0 < len(x) <= self.packed_rows:
            return self.rows(x, onto, alpha, onto if inplace else None)
        return torch.addmm(onto, x, self.dequantize().T, alpha=alpha, out=onto if inplace else None)
