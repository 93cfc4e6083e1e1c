"""Packed integers times the rows of a batch of sequences: 2 to about 128, between a GEMV and a prefill."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quant.kernels import rows_bulk, rows_cuda
from quant.kernels.layout import DeviceInt


def supported(w: DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> bool:
    """Whether `IntRows` computes it: rows of whole 16-byte pieces."""
    if rows_cuda.supported(w, dtype, folder):
        return True
    from quant.kernels import rows_triton

    return rows_triton.supported(w, dtype)


class IntRows:
    """The products of one matrix, each number of rows by the kernel that is fastest for it."""

    def __init__(self, w: DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> None:
        self.packed, self.folder = w, folder  # of compiled kernels
        self.first_rows = first_rows(w)
        self.compiled = rows_cuda.supported(w, dtype, folder)
        self.bulk = rows_bulk.Product(w, dtype, folder) if rows_bulk.supported(w, dtype) else None

    def __call__(
        self,
        x: Tensor,  # [T, K] bfloat16 or float16
        onto: Tensor | None = None,  # [T, N]
        alpha: float = 1.0,
        out: Tensor | None = None,  # [T, N], may be `onto`; else it is made
    ) -> Tensor:  # [T, N]
        """onto + alpha * x @ W^T, weights rounded to x's type, sums in float32; the same bits at every call."""
        if self.bulk is not None and len(x) >= self.first_rows and self.bulk.ready(len(x)):
            return self.bulk(x, onto, alpha, out)
        if self.compiled and _faster_compiled(len(x), self.packed):
            return rows_cuda.product(x, self.packed, onto, alpha, self.folder)
        from quant.kernels import rows_triton  # triton takes a second to import

        return rows_triton.product(x, self.packed, onto, alpha)


def product(
    x: Tensor,  # [T, K]
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
) -> Tensor:  # [T, N]
    """Once."""
    return IntRows(w, x.dtype)(x, onto, alpha)


def first_rows(w: DeviceInt) -> int:
    """From which number of rows on the copy engine's kernel is the fastest.

    A chain of MiniCPM-2B's products on an H200, against the other two kernels: in 4 bits 1.42 ms at 32 rows (1.78),
    1.73 at 64 (2.12), 2.14 at 128 (3.67), but 1.25 at 16 (1.18); in 8 bits 2.76 at 128 (3.08), and at 64 rows only gate
    and up (19 us of 27); the head in 4 bits 133 us at 64 rows (132).
    """
    tiles = -(-w.N // 64)
    if tiles > rows_cuda.MANY_TILES:
        return 1 << 30
    return 17 if w.bits == 4 else 33 if tiles > rows_cuda.PROCESSORS else 65


def _faster_compiled(rows: int, w: DeviceInt) -> bool:
    """Whether the kernel in rows.cu is faster than Triton's, by the products of MiniCPM-2B in 4 bits on an H200."""
    tiles = -(-w.N // 64)
    if w.group == w.K:  # Triton's does not take it
        return True
    if rows <= 16:
        return tiles <= rows_cuda.MANY_TILES
    return 32 < rows <= 64 and not rows_cuda.PROCESSORS < tiles <= rows_cuda.MANY_TILES
