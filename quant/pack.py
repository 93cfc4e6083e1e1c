"""Group-wise integer weights as plain tensors: the layout every reader fills and every layer starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant.formats.fp8 import FP8
from quant.formats.int8 import Int8
from quant.formats.nf4 import NF4

GGUF_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
GGUF_GROUP = 32
# Weights unpacked at once on the CPU: larger chunks are no faster, and take 4 bytes a weight for a while.
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupInt:
    """W[n, order[j]] = scale[n, j // group] * (code[n, j] - zero[n, j // group]) + offset[n, j // group].

    4 bits: codes and zeros 0..15, two codes a byte along K, the even element in the low half. 8 bits: codes and
    zeros are int8, that is 128 less than the unsigned ones of most files. `group` -1 stands for K.
    """

    bits: int
    group: int
    codes: Tensor  # [N, K/2] uint8 for 4 bits, [N, K] int8 for 8
    scale: Tensor  # [N, K/group] float16, bfloat16 or float32
    offset: Tensor | None  # [N, K/group] as scale; None: zero
    zero: Tensor | None = None  # [N, K/group] uint8 for 4 bits, int8 for 8; None: zero
    order: Tensor | None = None  # [K] int64: the input column that stored column j belongs to; None: j

    def __post_init__(self) -> None:
        if self.group == -1:
            object.__setattr__(self, "group", self.shape[1])

    @classmethod
    def from_unsigned(
        cls,
        bits: int,
        group: int,
        codes: Tensor,  # [N, K] 0..2^bits-1, any integer type
        scale: Tensor,  # [N, K/group]
        zero: Tensor | None = None,  # [N, K/group] 0..2^bits-1; None: the middle, 2^(bits-1)
        order: Tensor | None = None,  # [K]
    ) -> GroupInt:
        """Packs plain unsigned codes, as quantizers compute them and files hold them."""
        if bits == 8:
            zero = None if zero is None else _signed(zero)
            return cls(8, group, _signed(codes), scale, None, zero, order)
        zero = torch.full_like(scale, 8, dtype=torch.uint8) if zero is None else zero.to(torch.uint8)
        return cls(4, group, pair_nibbles(codes), scale, None, zero, order)

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.codes.shape
        return n, width * (8 // self.bits)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.offset, self.zero, self.order)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    @property
    def symmetric(self) -> bool:
        """Whether every zero point is the middle of the codes and there is no offset."""
        middle = 8 if self.bits == 4 else 0
        return self.offset is None and (middle == 0 if self.zero is None else bool((self.zero == middle).all()))

    def rows(self, index: Tensor | slice) -> GroupInt:
        """The rows `index` ([M] int64 or a slice) as a packed matrix of their own."""
        offset, zero = (None if t is None else t[index] for t in (self.offset, self.zero))
        return replace(self, codes=self.codes[index], scale=self.scale[index], offset=offset, zero=zero)

    def to(self, device: torch.device) -> GroupInt:
        offset, zero, order = (None if t is None else t.to(device) for t in (self.offset, self.zero, self.order))
        codes, scale = self.codes.to(device), self.scale.to(device)
        return GroupInt(self.bits, self.group, codes, scale, offset, zero, order)

    def integers(self) -> Tensor:  # [N, K] uint8 or int8
        """The codes one an element."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)

    def unsigned(self) -> tuple[Tensor, Tensor]:  # [N, K] and [N, K/group] uint8
        """Codes and zero points as 0..2^bits-1, the reverse of `from_unsigned`; offsets have no place in it."""
        zero = self.scale.new_zeros(self.scale.shape, dtype=torch.uint8) if self.zero is None else self.zero
        return (self.integers(), zero) if self.bits == 4 else (_unsigned(self.codes), _unsigned(zero))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights in the order of the inputs, computed in float32 and rounded once to `dtype`."""
        n, k = self.shape
        if self.codes.device.type == "cpu" and n * k > CHUNK:
            w = torch.empty(n, k, dtype=dtype)
            step = max(1, CHUNK // k)
            for start in range(0, n, step):
                w[start : start + step] = self.rows(slice(start, start + step))._plain()
        else:
            w = self._plain().to(dtype)
        return w if self.order is None else w[:, self.order.argsort()]

    def _plain(self) -> Tensor:  # [N, K] float32, columns as stored
        if self.bits == 8:
            codes = self.codes.float()
        else:
            codes = _nibble_pairs(self.codes.device).index_select(0, self.codes.flatten().int()).view(torch.float32)
        w = codes.view(self.codes.shape[0], -1, self.group)
        if self.zero is not None:
            w -= self.zero[..., None]
        w *= self.scale[..., None].float()
        if self.offset is not None:
            w += self.offset[..., None].float()
        return w.view(self.shape)

    def regrouped(self, group: int) -> GroupInt:
        """The same weights in smaller groups, which divide the present ones."""
        times = self.group // group
        offset, zero = (None if t is None else t.repeat_interleave(times, 1) for t in (self.offset, self.zero))
        return replace(self, group=group, scale=self.scale.repeat_interleave(times, 1), offset=offset, zero=zero)

    @staticmethod
    def cat(parts: Sequence[GroupInt]) -> GroupInt:
        """One matrix out of the rows of several of the same format and order of columns."""
        offsets = [p.offset for p in parts if p.offset is not None]
        zeros = [p.zero for p in parts if p.zero is not None]
        return replace(
            parts[0],
            codes=torch.cat([p.codes for p in parts]),
            scale=torch.cat([p.scale for p in parts]),
            offset=torch.cat(offsets) if offsets else None,
            zero=torch.cat(zeros) if zeros else None,
        )

    def like(self, other: object) -> bool:
        """Whether the two can be joined by `cat`."""
        if not isinstance(other, GroupInt):
            return False
        same = self._format == other._format
        if self.order is None or other.order is None:
            return same and self.order is other.order
        return same and torch.equal(self.order, other.order)

    @property
    def _format(self) -> tuple[object, ...]:
        return self.bits, self.group, self.shape[1], self.scale.dtype, self.offset is None, self.zero is None


def pair_nibbles(codes: Tensor) -> Tensor:  # [N, K] 0..15 -> [N, K/2] uint8
    flat = codes.to(torch.uint8).reshape(-1)
    aligned = flat.clone() if flat.storage_offset() % 2 else flat
    pairs = aligned.view(torch.int16)
    return (pairs | (pairs >> 4)).to(torch.uint8).view(codes.shape[0], -1)


def _nibble_pairs(device: torch.device) -> Tensor:  # [256] int64: the two float32 values of a byte's halves
    byte = torch.arange(256, device=device)
    return torch.stack((byte & 15, byte >> 4), -1).float().view(torch.int64)[:, 0]


def _signed(codes: Tensor) -> Tensor:  # 0..255 -> -128..127: the top bit flips
    return (codes.to(torch.uint8) ^ 128).view(torch.int8)


def _unsigned(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8) ^ 128


Packed = GroupInt | NF4 | Int8 | FP8


def join(parts: Sequence[Packed]) -> Packed:
    """One matrix out of the rows of several that are `like` each other."""
    kind: Any = type(parts[0])
    joined: Packed = parts[0] if len(parts) == 1 else kind.cat(parts)
    return joined


def from_gguf(kind: str, raw: Tensor, shape: tuple[int, int]) -> GroupInt:
    """Unpacks GGUF blocks of 32 weights without loss.

    `raw` is uint8 [N, K/32 * block bytes]. Q4_0 is (code - 8) * d, Q4_1 code * d + m, Q8_0 code * d (ggml's
    block_q4_0, block_q4_1 and block_q8_0); in a 4-bit block byte j holds elements j and j + 16.
    """
    n, k = shape
    blocks = raw.reshape(n, k // GGUF_GROUP, GGUF_BLOCK_BYTES[kind])
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    if kind == "Q8_0":
        return GroupInt(8, GGUF_GROUP, blocks[..., 2:].contiguous().view(torch.int8).view(n, k), scale, None)
    if kind == "Q4_1":
        return GroupInt(4, GGUF_GROUP, _interleave(blocks[..., 4:], n, k), scale, _half(blocks[..., 2:4]))
    middle = torch.full_like(scale, 8, dtype=torch.uint8)
    return GroupInt(4, GGUF_GROUP, _interleave(blocks[..., 2:], n, k), scale, None, middle)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)[..., 0]


def _interleave(nibbles: Tensor, n: int, k: int) -> Tensor:  # [N, blocks, 16] -> [N, K/2]
    """From halves (j, j + 16) a byte to neighbours (2j, 2j + 1) a byte, two bytes at a time."""
    pairs = nibbles.contiguous().view(torch.int16)
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return torch.cat((low, high), -1).to(torch.uint8).view(n, k // 2)
