"""How group-wise integers lie on the device: words that unpack into pairs of neighbours, the same for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.pack import GroupInt

MIDDLE = {4: 8, 8: 128}
# Words permuted at once: the temporaries of a vocabulary's head would else be as large as three heads.
CHUNK_WORDS = 1 << 24


@dataclass(frozen=True, slots=True)
class DeviceInt:
    """W[n, k] = scale * (code - zero), or scale * code + shift where a shift is given, columns in stored order.

    4 bits: word j of a row holds elements 8j..8j+7 as codes 0..15, element 2i at bits 4i and element 2i+1 at bits
    16+4i, so (w >> 4i) & 0x000f000f is a pair of neighbours, the even one in the low half. 8 bits: word j holds
    elements 4j..4j+3 as codes 0..255 at bytes 0, 2, 1, 3, so (w >> 8i) & 0x00ff00ff is a pair.
    """

    bits: int
    group: int
    words: Tensor  # [N, K/8] int32 for 4 bits, [N, K/4] for 8
    scale: Tensor  # [N, G] float16, bfloat16 or float32
    zero: Tensor | None  # [N, G] uint8; None: 8 or 128, unless there is a shift
    shift: Tensor | None  # [N, G] float32

    @property
    def N(self) -> int:
        return self.words.shape[0]

    @property
    def K(self) -> int:
        return self.words.shape[1] * (32 // self.bits)

    @property
    def kind(self) -> int:
        """As kernels are told: 0 where every zero point is the middle, 1 with zero points, 2 with shifts."""
        return 2 if self.shift is not None else 0 if self.zero is None else 1

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self.scale, self.zero, self.shift) if t is not None)

    def codes(self) -> Tensor:  # [N, K] uint8
        """The codes one an element."""
        pairs = 16 // self.bits
        shifts = torch.arange(0, 16, self.bits, device=self.words.device)[:, None]
        halves = torch.tensor((0, 16), device=self.words.device)
        codes = (self.words[..., None, None] >> (shifts + halves)) & (2**self.bits - 1)  # [N, words, pairs, 2]
        assert codes.shape[-2] == pairs
        return codes.to(torch.uint8).view(self.N, self.K)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:  # [N, K]
        """The weights, computed in float32 and rounded once to `dtype`: the kernels' oracle."""
        codes = self.codes().float().view(self.N, -1, self.group)
        scale = self.scale.float()[..., None]
        if self.shift is not None:
            return (scale * codes + self.shift[..., None]).view(self.N, self.K).to(dtype)
        zero = MIDDLE[self.bits] if self.zero is None else self.zero[..., None]
        return (scale * (codes - zero)).view(self.N, self.K).to(dtype)


def pack(packed: GroupInt) -> DeviceInt:
    """The same weights, where they are, in the order that they are stored in; `packed.order` is the caller's."""
    middle, zero, shift = MIDDLE[packed.bits], packed.zero, None
    signed = packed.bits == 8
    if packed.offset is not None:
        floor = torch.zeros_like(packed.scale, dtype=torch.float32) if zero is None else zero.float()
        shift, zero = packed.offset.float() - packed.scale.float() * (floor + (middle if signed else 0)), None
    elif packed.symmetric:
        zero = None
    elif zero is None:  # 4 bits only: 8 bits without a zero are symmetric
        zero = torch.zeros_like(packed.scale, dtype=torch.uint8)
    elif signed:
        zero = zero.contiguous().view(torch.uint8) ^ 128
    scale = packed.scale.contiguous()
    return DeviceInt(packed.bits, packed.group, _words(packed), scale, _contiguous(zero), shift)


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _words(packed: GroupInt) -> Tensor:
    source = packed.codes.contiguous().view(torch.int32)
    words = torch.empty_like(source)
    permute = _pair_bytes if packed.bits == 8 else _pair_nibbles
    step = max(1, CHUNK_WORDS // source.shape[1])
    for start in range(0, source.shape[0], step):
        words[start : start + step] = permute(source[start : start + step])
    return words


def _pair_nibbles(w: Tensor) -> Tensor:
    """From eight codes in order to the even four in the low half and the odd four in the high half."""
    even, odd = ((half & 0x0F0F0F0F) for half in (w, w >> 4))
    even, odd = ((half | (half >> 4)) & 0x00FF00FF for half in (even, odd))
    even, odd = ((half | (half >> 8)) & 0x0000FFFF for half in (even, odd))
    return even | (odd << 16)


def _pair_bytes(w: Tensor) -> Tensor:
    """Signed codes to unsigned, and the middle two bytes exchanged."""
    flipped = w ^ -0x7F7F7F80  # the top bit of every byte: 0x80808080 as an int32
    outer = flipped & -0x00FFFF01  # 0xff0000ff
    return outer | ((flipped & 0x0000FF00) << 8) | ((flipped >> 8) & 0x0000FF00)
