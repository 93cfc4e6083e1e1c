"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes in int32 words along the inputs, zero points along the outputs.

Version 1 ("gptq") stores each zero point less one, modulo 2^bits; version 2 ("gptq_v2") stores it as it is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.tensors import Tensors, check, check_bits, need
from quant.formats.words import from_words, grouping, in_input_order, to_words
from quant.pack import GroupInt

Version = Literal["gptq", "gptq_v2"]
VERSIONS: tuple[Version, ...] = ("gptq", "gptq_v2")


def pack(packed: GroupInt, version: Version = "gptq") -> dict[str, Tensor]:
    """qweight int32 [K*bits/32, N], qzeros int32 [G, N*bits/32], scales [G, N], g_idx int32 [K].

    Raises FormatError where the sizes do not fill whole words, and for a zero point of 0 in version 1: some
    readers take the wrapped value for 2^bits, and some packers spoil its neighbours.
    """
    (n, k), bits = packed.shape, packed.bits
    if n * bits % 32 or k * bits % 32:
        raise FormatError(f"GPTQ's {bits}-bit files need sizes divisible by {32 // bits}; this matrix is {n} x {k}.")
    codes, zero, index = in_input_order(packed)
    if version == "gptq":
        if not bool(zero.all()):
            raise FormatError('Zero point 0 does not fit version 1 of GPTQ files; write checkpoint_format "gptq_v2".')
        zero = zero - 1
    return {
        "qweight": to_words(codes, bits).T.contiguous(),
        "qzeros": to_words(zero.T, bits),
        "scales": packed.scale.T.contiguous(),
        "g_idx": index,
    }


def unpack(tensors: Tensors, bits: int, group: int, sym: bool, version: Version) -> GroupInt:
    """From the tensors of one layer (g_idx may be absent); `group` is the configured size, -1 for the whole row.

    A symmetric file says itself which version it is. Raises FormatError where the tensors do not fit together.
    """
    check_bits(bits)
    qweight, qzeros, scales = need(tensors, "qweight", "qzeros", "scales")
    (count, n), k = scales.shape, qweight.shape[0] * 32 // bits
    check("qweight", qweight, (k * bits // 32, n), torch.int32)
    check("qzeros", qzeros, (count, -(-n * bits // 32)), torch.int32)
    columns = grouping(k, group, count, tensors.get("g_idx"))
    zero = _zero_points(from_words(qzeros, bits, n).T, bits, sym, version)
    return columns.pack(bits, from_words(qweight.T, bits, k), scales.T, zero)


def _zero_points(stored: Tensor, bits: int, sym: bool, version: Version) -> Tensor | None:  # None: the middle
    middle = 2 ** (bits - 1)
    if sym and any(bool((stored == value).all()) for value in (middle - 1, middle)):
        return None
    return stored if version == "gptq_v2" else (stored + 1) & (2**bits - 1)
