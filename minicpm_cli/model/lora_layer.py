"""Packed weights with an adapter beside them, which would be lost in their rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicpm_cli.model.lora_source import Factors
from quant.layers.plain import Linear, capturable


class LowRankBeside:
    """y = W x + B (A x). What is computed inside W's product elsewhere (norm, gate, sum) is done step by step here.

    On a CPU the factors are float32: one row of the demo's in bfloat16 takes 14 and 17 us where these take 2 and 5.
    """

    def __init__(
        self,
        layer: Linear,
        parts: Sequence[tuple[int, Factors]],  # the first of the layer's rows that the factors add to
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layer, self.out_features, self.capturable = layer, layer.out_features, capturable(layer)
        self.dtype = torch.float32 if device.type == "cpu" else dtype
        self.a = torch.cat([factors.a for _, factors in parts]).T.to(device, self.dtype)  # [K, R]
        self.b = tuple(factors.b.T.contiguous().to(device, self.dtype) for _, factors in parts)  # [r, N'] each
        self.rows = tuple(slice(row, row + b.shape[1]) for (row, _), b in zip(parts, self.b, strict=True))
        self.ranks = [len(b) for b in self.b]

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes + self.a.nbytes + sum(b.nbytes for b in self.b)

    def __call__(self, x: Tensor) -> Tensor:  # [T, K] -> [T, N]
        y = self.layer(x)
        low = torch.split(x.to(self.dtype) @ self.a, self.ranks, -1)
        for rows, b, h in zip(self.rows, self.b, low, strict=True):
            if y.dtype == self.dtype:
                y[:, rows].addmm_(h, b)
            else:
                y[:, rows].add_(h @ b)
        return y

    def dequantize(self) -> Tensor:
        plain = self.layer.dequantize().clone()
        for rows, b, a in zip(self.rows, self.b, torch.split(self.a, self.ranks, -1), strict=True):
            plain[rows] += (a @ b).T
        return plain
