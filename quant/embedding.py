"""The token embedding, plain or packed: rows are looked up and unpacked one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quant.layers.plain import room_for
from quant.pack import Packed


class Embedding:
    """Rows of a [V, K] table in `dtype`; a packed table is unpacked in float32 for the rows asked."""

    def __init__(self, table: Tensor | Packed, device: torch.device, dtype: torch.dtype) -> None:
        self.table = _placed(table, device, dtype) if isinstance(table, Tensor) else table.to(device)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, ids: Tensor) -> Tensor:  # [T] int64 -> [T, K]
        if isinstance(self.table, Tensor):
            return functional.embedding(ids, self.table)
        return self.table.rows(ids).dequantize(self.dtype)


def _placed(table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:  # [V, K]
    """A copy, with the room that an output head over it needs."""
    placed = room_for(table.shape[0], table.shape[1], dtype, device)
    return placed.copy_(table)
