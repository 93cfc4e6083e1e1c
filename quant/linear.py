"""Linear layers, one small class a packing, each with `__call__`, `dequantize()` and `nbytes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from quant.pack import GroupInt

# From this many rows on, unpacking to bf16 and one dense product is faster than torch's packed 4-bit product
# (Zen 5, 2 threads, N x K = 3072 x 576: 64 rows 0.65 against 0.27 + 1.6 ms, 256 rows 2.6 against 1.0 + 1.6 ms).
DENSE_ROWS = 256
# torch's packing takes whole blocks of 16 rows.
PACK_ROWS = 16
# Rows converted at once: the int32 copy of a chunk stays in the second-level cache.
CHUNK_ROWS = 512


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
    """Group-wise integers unpacked for every product: right on any device, and no more memory than the file."""

    def __init__(self, packed: GroupInt, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        self.out_features = packed.shape[0]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.dequantize())

    def dequantize(self) -> Tensor:
        return self.packed.dequantize(self.dtype)


class CPUInt4:
    """4-bit weights through torch's packed CPU product, bf16 activations.

    The product computes (code - 8) * scale + zero with bf16 scales and zeros, so zero = offset + 8 * scale.
    8-bit weights run as two 4-bit halves side by side along K: code = 16 * high + low, x repeated.
    The plain codes stay beside the packed ones for products of many rows.
    """

    def __init__(self, packed: GroupInt) -> None:
        self.packed = packed
        self.out_features = packed.shape[0]
        self.repeat = packed.bits == 8
        self.tiles = _pack_for_cpu(packed)
        self.scale_zero = _scale_zero(packed)
        self.pairs = _nibble_pairs() if packed.bits == 4 else None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.tiles.numel() + 2 * self.scale_zero.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= DENSE_ROWS:
            return functional.linear(x, self.dequantize())
        if self.repeat:
            x = torch.cat((x, x), -1)
        y = torch._weight_int4pack_mm_for_cpu(x, self.tiles, self.packed.group, self.scale_zero)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features]

    def dequantize(self) -> Tensor:  # [N, K] bf16
        if self.pairs is None or self.packed.offset is None:
            return self.packed.dequantize(torch.bfloat16)
        n, k = self.packed.shape
        codes = self.pairs.index_select(0, self.packed.codes.view(-1).int()).view(torch.bfloat16)
        scale, offset = (t.bfloat16()[..., None] for t in (self.packed.scale, self.packed.offset))
        return torch.addcmul(offset, codes.view(n, -1, self.packed.group), scale).view(n, k)


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


def make_linear(stored: Sequence[Tensor | GroupInt], device: torch.device, dtype: torch.dtype) -> Linear:
    """One layer over the rows of all `stored` matrices, in the fastest form that `device` runs at `dtype`."""
    groups = [s for s in stored if isinstance(s, GroupInt)]
    if not groups:
        return Dense(_joined([s for s in stored if isinstance(s, Tensor)], device, dtype))
    if len(groups) == len(stored) and all(g.like(groups[0]) for g in groups):
        return _packed_linear(GroupInt.cat(groups) if len(groups) > 1 else groups[0], device, dtype)
    return Joined([make_linear([s], device, dtype) for s in stored])


def _joined(parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copies part after part into place, so that no second copy of the whole exists."""
    weight = torch.empty(sum(p.shape[0] for p in parts), parts[0].shape[1], dtype=dtype, device=device)
    row = 0
    for part in parts:
        weight[row : row + part.shape[0]].copy_(part)
        row += part.shape[0]
    return weight


def _packed_linear(packed: GroupInt, device: torch.device, dtype: torch.dtype) -> Linear:
    if device.type != "cpu":
        return Unpacking(packed.to(device), dtype)
    if dtype == torch.bfloat16 and packed.group in (32, 64, 128, 256):
        return CPUInt4(packed)
    return Dense(packed.dequantize(dtype))


def _pack_for_cpu(packed: GroupInt) -> Tensor:
    """torch's own tile order of 4-bit codes; rows are padded to whole blocks with zeros."""
    chunks = []
    for start in range(0, packed.shape[0], CHUNK_ROWS):
        codes = _unsigned_nibbles(packed.rows(slice(start, start + CHUNK_ROWS)))
        codes = functional.pad(codes, (0, 0, 0, -codes.shape[0] % PACK_ROWS))
        chunks.append(torch._convert_weight_to_int4pack_for_cpu(codes, 1))
    return torch.cat(chunks)


def _unsigned_nibbles(packed: GroupInt) -> Tensor:  # [N, K] or [N, 2K] int32, 0..15
    codes = packed.integers().int()
    return torch.cat(((codes >> 4) + 8, codes & 15), -1) if packed.bits == 8 else codes


def _scale_zero(packed: GroupInt) -> Tensor:  # [K/group, N, 2] bf16
    scale = packed.scale.float()
    if packed.bits == 8:
        zero = torch.cat((torch.zeros_like(scale), 8 * scale), -1)
        scale = torch.cat((16 * scale, scale), -1)
    else:
        zero = 8 * scale if packed.offset is None else 8 * scale + packed.offset.float()
    both = torch.stack((scale, zero), -1).transpose(0, 1).bfloat16()
    return functional.pad(both, (0, 0, 0, -both.shape[1] % PACK_ROWS)).contiguous()


def _nibble_pairs() -> Tensor:  # [256] int32: the two bf16 values of a byte's halves
    byte = torch.arange(256)
    return torch.stack((byte & 15, byte >> 4), -1).to(torch.bfloat16).view(torch.int32)[:, 0]
