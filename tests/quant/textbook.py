"""The integer file formats written out with Python integers, one code at a time, and matrices to try them on."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.pack import GroupInt


def bits_of(word: int, position: int, bits: int) -> int:
    """Code number `position` of a 32-bit word, which torch gives as a signed number."""
    return ((word % 2**32) >> (position * bits)) % 2**bits


def code_at(words: Tensor, row: int, column: int, bits: int) -> int:
    """Code `column` of a row that is packed along its length, lowest bits first."""
    per = 32 // bits
    return bits_of(int(words[row, column // per]), column % per, bits)


def weights(codes: list[list[int]], zeros: list[list[int]], scale: Tensor, index: list[int]) -> Tensor:
    """scale * (code - zero) in float32, for scale and zeros [N][G] and the group index of each column."""
    out = torch.empty(len(codes), len(codes[0]))
    for n, row in enumerate(codes):
        for k, code in enumerate(row):
            g = index[k]
            out[n, k] = float(scale[n, g].float()) * (code - zeros[n][g])
    return out


def random_groups(
    bits: int,
    n: int,
    k: int,
    group: int,
    *,
    symmetric: bool = False,
    shuffled: bool = False,
    least: int = 1,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> GroupInt:
    """Random codes, scales, zero points (from `least` on); shuffled: columns in random order, ascending in groups."""
    g = torch.Generator().manual_seed(seed)
    count = 1 if group == -1 else k // group
    codes = torch.randint(0, 2**bits, (n, k), generator=g)
    zero = None if symmetric else torch.randint(least, 2**bits, (n, count), generator=g)
    scale = (torch.rand(n, count, generator=g) * 0.02 + 0.001).to(dtype)
    order = None
    if shuffled:
        order = torch.randperm(k, generator=g).view(count, -1).sort(-1).values.flatten()
    return GroupInt.from_unsigned(bits, group, codes, scale, zero, order)


def same(a: GroupInt, b: GroupInt) -> bool:
    """Whether two packed matrices hold the same tensors."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("codes", "scale", "offset", "zero", "order")]
    tensors = all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs
    )
    return tensors and (a.bits, a.group) == (b.bits, b.group)
