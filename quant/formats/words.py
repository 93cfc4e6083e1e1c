"""What the integer formats share: codes in 32-bit words, and group indices of single columns (act-order)."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.pack import GroupInt, pair_nibbles


def to_words(codes: Tensor, bits: int) -> Tensor:  # [R, C] 0..2^bits-1 -> [R, ceil(C * bits / 32)] int32
    """Packs along the last dimension, the first code in the lowest bits; the last word is filled up with zeros."""
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[1] % (32 // bits)))
    halves = pair_nibbles(codes) if bits == 4 else codes
    return halves.reshape(-1).view(torch.int32).view(codes.shape[0], -1)


def from_words(words: Tensor, bits: int, count: int) -> Tensor:  # [R, W] int32 -> [R, count] uint8
    """The reverse of `to_words`."""
    raw = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)
    if bits == 4:
        raw = torch.stack((raw & 15, raw >> 4), -1).view(raw.shape[0], -1)
    return raw[:, :count]


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the columns of a file fall into groups: `order` sorts them by group, `groups[i]` is the file's index of
    our i-th group of `width` columns. Where a file's groups differ in size, `width` divides them all."""

    width: int
    groups: Tensor | None  # [K/width] int64; None: 0, 1, 2, ...
    order: Tensor | None  # [K] int64; None: as they are

    def pack(self, bits: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> GroupInt:
        """From unsigned codes [N, K], scales and zero points [N, G] in the file's order."""
        if self.order is not None:
            codes = codes[:, self.order]
        if self.groups is not None:
            scale, zero = scale[:, self.groups], None if zero is None else zero[:, self.groups]
        return GroupInt.from_unsigned(bits, self.width, codes, scale.contiguous(), zero, self.order)


def grouping(k: int, group: int, count: int, index: Tensor | None) -> Grouping:
    """Reads the group index of each column ([K]; None, negative or all zeros: `group` neighbours each)."""
    width = k if group == -1 else group
    if index is None or bool((index < 0).all()) or (count > 1 and not bool(index.any())):
        index = torch.arange(k) // width
        fits = -(-k // width) == count
    else:
        index = index.long().cpu()
        fits = index.shape == (k,) and int(index.min()) >= 0 and int(index.max()) < count
    if not fits:
        raise FormatError(f"Rows of {k} with groups of {group} do not fit {count} scales a row: the files differ.")
    sizes = index.bincount(minlength=count)
    width = gcd(*sizes.tolist())
    groups = None if bool((sizes == width).all()) else torch.arange(count).repeat_interleave(sizes // width)
    order = None if bool((index.diff() >= 0).all()) else index.argsort(stable=True)
    return Grouping(width, groups, order)


def in_input_order(packed: GroupInt) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K] in the order of the inputs, unsigned zero points [N, G], and the group index [K] int32."""
    if packed.offset is not None:
        raise FormatError("Weights with offsets (GGUF) have no zero points; dequantize and quantize them again.")
    codes, zero = packed.unsigned()
    index = torch.arange(packed.shape[1], dtype=torch.int32, device=codes.device) // packed.group
    if packed.order is not None:
        inverse = packed.order.argsort()
        codes, index = codes[:, inverse], index[inverse]
    return codes, zero, index
