"""Group-wise integer weights as plain tensors: the layout every reader fills and every layer starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GGUF_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
GGUF_GROUP = 32


@dataclass(frozen=True, slots=True)
class GroupInt:
    """W[n, k] = scale[n, k // group] * code[n, k] + offset[n, k // group].

    4 bits: codes 0..15, two a byte along K, the even element in the low half. 8 bits: codes are int8.
    """

    bits: int
    group: int
    codes: Tensor  # [N, K/2] uint8 for 4 bits, [N, K] int8 for 8
    scale: Tensor  # [N, K/group] float16
    offset: Tensor | None  # [N, K/group] float16; None: zero

    @property
    def shape(self) -> tuple[int, int]:
        n, width = self.codes.shape
        return n, width * (8 // self.bits)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.offset)
        return sum(t.numel() * t.element_size() for t in parts if t is not None)

    def rows(self, index: Tensor | slice) -> GroupInt:
        """The rows `index` ([M] int64 or a slice) as a packed matrix of their own."""
        offset = None if self.offset is None else self.offset[index]
        return GroupInt(self.bits, self.group, self.codes[index], self.scale[index], offset)

    def to(self, device: torch.device) -> GroupInt:
        offset = None if self.offset is None else self.offset.to(device)
        return GroupInt(self.bits, self.group, self.codes.to(device), self.scale.to(device), offset)

    def integers(self) -> Tensor:  # [N, K] uint8 or int8
        """The codes one an element."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).view(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights, computed in float32 and rounded once to `dtype`."""
        n, k = self.shape
        w = self.integers().view(n, -1, self.group).float() * self.scale[..., None].float()
        if self.offset is not None:
            w += self.offset[..., None].float()
        return w.view(n, k).to(dtype)

    @staticmethod
    def cat(parts: Sequence[GroupInt]) -> GroupInt:
        """One matrix out of the rows of several of the same format."""
        first = parts[0]
        offsets = [p.offset for p in parts if p.offset is not None]
        return GroupInt(
            first.bits,
            first.group,
            torch.cat([p.codes for p in parts]),
            torch.cat([p.scale for p in parts]),
            torch.cat(offsets) if offsets else None,
        )

    def like(self, other: GroupInt) -> bool:
        """Whether the two can be joined by `cat`."""
        same = (self.bits, self.group, self.offset is None, self.shape[1])
        return same == (other.bits, other.group, other.offset is None, other.shape[1])


Packed = GroupInt


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
    return GroupInt(4, GGUF_GROUP, _interleave(blocks[..., 2:], n, k), scale, scale * -8)


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)[..., 0]


def _interleave(nibbles: Tensor, n: int, k: int) -> Tensor:  # [N, blocks, 16] -> [N, K/2]
    """From halves (j, j + 16) a byte to neighbours (2j, 2j + 1) a byte, two bytes at a time."""
    pairs = nibbles.contiguous().view(torch.int16)
    low = (pairs & 0x0F) | ((pairs >> 4) & 0xF0)
    high = ((pairs >> 4) & 0x0F) | ((pairs >> 8) & 0xF0)
    return torch.cat((low, high), -1).to(torch.uint8).view(n, k // 2)
