"""The token embedding, plain or packed: rows are looked up and unpacked one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quant.pack import Packed


class Embedding:
    """Rows of a [V, K] table in `dtype`; a packed table is unpacked in float32 for the rows asked."""

    def __init__(self, table: Tensor | Packed, device: torch.device, dtype: torch.dtype) -> None:
        self.table = table.to(device, dtype, copy=True) if isinstance(table, Tensor) else table.to(device)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, ids: Tensor) -> Tensor:  # [T] int64 -> [T, K]
        if isinstance(self.table, Tensor):
            return functional.embedding(ids, self.table)
        return self.table.rows(ids).dequantize(self.dtype)
