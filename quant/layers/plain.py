"""Layers that are right for any weights and on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quant.pack import Packed


class Linear(Protocol):
    """y = x @ W.T for x [T, K] and W [N, K]; y is [T, N] in x's dtype."""

    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...
    def dequantize(self) -> Tensor: ...


class Dense:
    """Plain weights."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self.weight = weight
        self.out_features = weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)

    def dequantize(self) -> Tensor:
        return self.weight


class Unpacking:
    """Packed weights, unpacked for every product: no more memory than the file takes."""

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.out_features = packed.shape[0]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.dequantize())

    def dequantize(self) -> Tensor:
        return self.packed.dequantize(self.dtype)


class Gathered:
    """A layer whose columns are stored in another order than the inputs come in (act-order)."""

    def __init__(self, layer: Linear, order: Tensor) -> None:  # [K]: stored column j belongs to input order[j]
        self.layer, self.order = layer, order
        self.out_features = layer.out_features

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes + self.order.numel() * self.order.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x.index_select(-1, self.order))

    def dequantize(self) -> Tensor:
        return self.layer.dequantize()[:, self.order.argsort()]


class Joined:
    """Several layers over the same input, where their formats do not allow one matrix."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(p.out_features for p in parts)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([p(x) for p in self.parts], -1)

    def dequantize(self) -> Tensor:
        return torch.cat([p.dequantize() for p in self.parts])
