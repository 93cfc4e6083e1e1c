"""Packed integers times the rows of a batch: 2 to about 128, between a GEMV and a prefill; a head's any."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.kernels import rows_bulk, rows_cuda
from quant.kernels.layout import DeviceInt

PACKED_ROWS = 128
ANY = 1 << 30
supported = rows_cuda.supported


class IntRows:
    """The products of one matrix, each number of rows by the kernel that is fastest for it."""

    def __init__(self, w: DeviceInt, dtype: torch.dtype, folder: Path | None = None) -> None:
        if not supported(w, dtype, folder):
            raise SchemeError(
                f"no kernel here for {w.bits} bits in groups of {w.group}, {w.K} columns, times {dtype}: it wants "
                "Hopper, float16 or bfloat16, columns and groups in whole 32"
            )
        self.packed, self.folder = w, folder  # of compiled kernels
        self.bulk = rows_bulk.Product(w, dtype, folder)

    def __call__(
        self,
        x: Tensor,  # [T, K] bfloat16 or float16
        onto: Tensor | None = None,  # [T, N]
        alpha: float = 1.0,
        out: Tensor | None = None,  # [T, N], may be `onto`; else it is made
    ) -> Tensor:  # [T, N]
        """onto + alpha * x @ W^T, weights rounded to x's type, sums in float32; the same bits at every call."""
        if by_copy_engine(len(x), self.packed) and self.bulk.ready(len(x)):
            return self.bulk(x, onto, alpha, out)
        return rows_cuda.product(x, self.packed, onto, alpha, self.folder)


def product(
    x: Tensor,  # [T, K]
    w: DeviceInt,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
) -> Tensor:  # [T, N]
    """Once."""
    return IntRows(w, x.dtype)(x, onto, alpha)


def most_rows(w: DeviceInt) -> int:
    """Up to which packed weights are multiplied; from then on unpacking into scratch and cuBLAS win, but for a head.

    That of MiniCPM-2B would take 0.57 GB of scratch, and 1,030 us at 128 rows instead of 189 (8 bits, an H200).
    """
    return ANY if _tiles(w) > rows_cuda.MANY_TILES else PACKED_ROWS


def by_copy_engine(rows: int, w: DeviceInt) -> bool:
    """Whether the copy engine's kernel is faster than the one in rows.cu, on an H200.

    A chain of MiniCPM-2B's products in 4 bits: 1.42 ms at 32 rows (1.78), 1.73 at 64 (2.12), but 1.25 at 16 (1.18). Its
    head, us at 16, 32, 64 and 128 rows: in 4 bits 84, 92, 115, 177 (75, 92, 121, 231); in 8 bits 103, 155, 128, 189
    (114, 127, 154, 286). In 8 bits, us at 64 and 96 rows: gate and up 18.7, 17.7 (20.0, 26.9); down 13.2, 13.3 (11.3,
    17.3).
    """
    tiles = _tiles(w)
    if w.bits == 4:
        return rows > 16
    if tiles > rows_cuda.MANY_TILES:
        return not 16 < rows <= 32
    return rows > (32 if tiles > rows_cuda.PROCESSORS else 64)


def _tiles(w: DeviceInt) -> int:
    return -(-w.N // 64)
