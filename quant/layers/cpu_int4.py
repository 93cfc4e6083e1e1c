"""Group-wise 4- and 8-bit weights on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quant.pack import GroupInt

# From this many rows on, unpacking and one dense product is faster than torch's packed product
# (Zen 5, N x K = 3072 x 576: 128 rows 2.3 and 2.6 ms on 1 thread, 1.4 and 1.3 ms on 2; 256 rows 2.1 and 2.6 on 2).
# 8 bits are two such products (4096 x 1536, 1 thread: 16 rows 2.3 against 2.5 ms, 32 rows 2.6 against 8.9).
DENSE_ROWS = {4: 160, 8: 32}
# Groups that the product takes.
GROUPS = (256, 128, 64, 32)
# torch's packing takes whole blocks of 16 rows.
PACK_ROWS = 16
# Rows converted at once: the int32 copy of a chunk stays in the second-level cache.
CHUNK_ROWS = 512


def group_for_cpu(packed: GroupInt) -> int | None:
    """The largest group of the CPU's product that divides the groups of `packed`."""
    return next((g for g in GROUPS if packed.group % g == 0), None)


class CPUInt4:
    """4-bit weights through torch's packed CPU product, bf16 activations; columns in the order of the inputs.

    The product computes (code - 8) * scale + zero with bf16 scales and zeros, so zero = offset + (8 - zero) * scale.
    8-bit weights run as two 4-bit halves side by side along K: code = 16 * high + low, x repeated.
    The plain codes stay beside the packed ones for products of many rows.
    """

    def __init__(self, packed: GroupInt) -> None:
        self.packed = packed
        self.out_features = packed.shape[0]
        self.repeat = packed.bits == 8
        self.dense_rows = DENSE_ROWS[packed.bits]
        self.tiles = _pack_for_cpu(packed)
        self.scale_zero = _scale_zero(packed)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.tiles.numel() + 2 * self.scale_zero.numel()

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self.dense_rows:
            return functional.linear(x, self.dequantize())
        if self.repeat:
            x = torch.cat((x, x), -1)
        y = torch._weight_int4pack_mm_for_cpu(x, self.tiles, self.packed.group, self.scale_zero)
        return y if y.shape[1] == self.out_features else y[:, : self.out_features]

    def dequantize(self) -> Tensor:  # [N, K] bf16
        return self.packed.dequantize(torch.bfloat16)


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
    scale, middle = packed.scale.float(), 8.0 if packed.zero is None else 8 - packed.zero.float()
    if packed.offset is None:  # a multiple of the scale as it will be, so that code = zero gives 0
        scale = scale.bfloat16().float()
    zero = scale * middle
    if packed.offset is not None:
        zero += packed.offset.float()
    if packed.bits == 8:
        # bf16 would round a large zero to a quarter of a step: the high half takes what the low half's bf16 leaves.
        rest = zero - zero.bfloat16().float()
        zero, scale = torch.cat((rest, zero), -1), torch.cat((16 * scale, scale), -1)
    both = torch.stack((scale, zero), -1).transpose(0, 1).bfloat16()
    return functional.pad(both, (0, 0, 0, -both.shape[1] % PACK_ROWS)).contiguous()
