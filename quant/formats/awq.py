"""AutoAWQ's gemm checkpoints: 4-bit codes in int32 words along the outputs, eight columns interleaved."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.tensors import Tensors, check, need
from quant.formats.words import from_words, grouping, in_input_order, to_words
from quant.pack import GroupInt

BITS = 4
# The nibbles of a word, lowest first, hold these of its eight columns.
INTERLEAVE = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(packed: GroupInt) -> dict[str, Tensor]:
    """qweight int32 [K, N/8], qzeros int32 [G, N/8], scales [G, N]; FormatError for what gemm cannot hold."""
    n, k = packed.shape
    if packed.bits != BITS or n % 8 or packed.order is not None:
        raise FormatError(
            f"AWQ holds 4 bits without act-order and N divisible by 8, not {packed.bits} bits at {n} x {k}; use GPTQ."
        )
    codes, zero, _ = in_input_order(packed)
    return {"qweight": _interleaved(codes.T), "qzeros": _interleaved(zero.T), "scales": packed.scale.T.contiguous()}


def unpack(tensors: Tensors, group: int) -> GroupInt:
    """From the tensors of one layer; `group` is the configured size, -1 for the whole row."""
    qweight, qzeros, scales = need(tensors, "qweight", "qzeros", "scales")
    (count, n), k = scales.shape, qweight.shape[0]
    check("qweight", qweight, (k, n // 8), torch.int32)
    check("qzeros", qzeros, (count, n // 8), torch.int32)
    columns = grouping(k, group, count, None)
    return columns.pack(BITS, _columns(qweight).T, scales.T, _columns(qzeros).T)


def _interleaved(codes: Tensor) -> Tensor:  # [R, N] -> [R, N/8] int32
    eights = codes.reshape(codes.shape[0], -1, 8)[..., list(INTERLEAVE)]
    return to_words(eights.reshape(codes.shape), BITS)


def _columns(words: Tensor) -> Tensor:  # [R, N/8] int32 -> [R, N] uint8
    inverse = [INTERLEAVE.index(c) for c in range(8)]
    return from_words(words, BITS, words.shape[1] * 8).view(words.shape[0], -1, 8)[..., inverse].flatten(1)
