"""Layers that are right for any weights and on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quant.pack import Packed

ROWS = 64  # of a block that `room_for` completes


class Linear(Protocol):
    """y = x @ W.T for x [T, K] and W [N, K]; y is [T, N] in x's dtype."""

    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor: ...
    def dequantize(self) -> Tensor: ...


def room_for(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:  # [rows, columns]
    """Empty plain weights. On a GPU whole blocks of rows, zeros behind the last: see `whole_rows`."""
    whole = torch.empty(rows + (-rows % ROWS if device.type == "cuda" else 0), columns, dtype=dtype, device=device)
    whole[rows:].zero_()
    return whole[:rows]


def whole_rows(weight: Tensor) -> Tensor:  # [N, K] -> [N', K]
    """`weight` with what lies behind it, such as the zeros of `room_for`, up to a whole block; no answer is used.

    cuBLAS answers in rows of N, and for an odd N (most vocabularies) takes its slowest kernels: 64 x 122753 x 2304 in
    684 us on an H200, where the bytes need 135.
    """
    rows = weight.shape[0] + -weight.shape[0] % ROWS
    room = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    return weight.as_strided((rows, weight.shape[1]), weight.stride()) if rows * weight.shape[1] <= room else weight


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


def capturable(layer: Linear) -> bool:
    """Whether a CUDA graph can hold the layer: nothing in it asks the host."""
    return bool(getattr(layer, "capturable", True))


class Gathered:
    """A layer whose columns are stored in another order than the inputs come in (act-order)."""

    def __init__(self, layer: Linear, order: Tensor) -> None:  # [K]: stored column j belongs to input order[j]
        self.layer, self.order = layer, order
        self.out_features, self.capturable = layer.out_features, capturable(layer)

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
        self.capturable = all(map(capturable, parts))

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([p(x) for p in self.parts], -1)

    def dequantize(self) -> Tensor:
        return torch.cat([p.dequantize() for p in self.parts])
