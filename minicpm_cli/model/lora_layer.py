"""Packed weights with an adapter beside them, which would be lost in their rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicpm_cli.model.lora_source import Factors
from quant.layers.plain import Linear, capturable


class LowRankBeside:
    """y = W x + B (A x). What is computed inside W's product elsewhere (norm, gate, sum) is done step by step here."""

    def __init__(
        self,
        layer: Linear,
        parts: Sequence[tuple[int, Factors]],  # the first of the layer's rows that the factors add to
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layer, self.out_features, self.capturable = layer, layer.out_features, capturable(layer)
        self.a = torch.cat([factors.a for _, factors in parts]).to(device, dtype)  # [R, K]
        self.b = tuple(factors.b.T.contiguous().to(device, dtype) for _, factors in parts)  # [r, N'] each
        self.first = tuple(row for row, _ in parts)

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes + self.a.nbytes + sum(b.nbytes for b in self.b)

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        y = self.layer(x)
        low = torch.split(x @ self.a.T, [len(b) for b in self.b], -1)
        for row, b, h in zip(self.first, self.b, low, strict=True):
            y[:, row : row + b.shape[1]].addmm_(h, b)
        return y

    def dequantize(self) -> Tensor:
        plain = self.layer.dequantize().clone()
        ranks = [len(b) for b in self.b]
        for row, b, a in zip(self.first, self.b, torch.split(self.a, ranks), strict=True):
            plain[row : row + b.shape[1]].addmm_(b.T, a)
        return plain
