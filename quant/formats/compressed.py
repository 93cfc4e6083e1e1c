"""compressed-tensors' pack-quantized checkpoints (llm-compressor, vLLM): W4A16 and W8A16, words along the inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.errors import FormatError
from quant.formats.tensors import Tensors, check, check_bits, need
from quant.formats.words import from_words, grouping, in_input_order, to_words
from quant.pack import GroupInt


def pack(packed: GroupInt) -> dict[str, Tensor]:
    """weight_packed int32 [N, ceil(K*bits/32)], weight_scale [N, G], weight_shape int64 [2]; where they say
    something, also weight_zero_point int32 [ceil(N*bits/32), G] and weight_g_idx int32 [K]."""
    codes, zero, index = in_input_order(packed)
    tensors = {
        "weight_packed": to_words(codes, packed.bits),
        "weight_scale": packed.scale.contiguous(),
        "weight_shape": torch.tensor(packed.shape, dtype=torch.int64),
    }
    if not packed.symmetric:
        tensors["weight_zero_point"] = to_words(zero.T, packed.bits).T.contiguous()
    if packed.order is not None:
        tensors["weight_g_idx"] = index
    return tensors


def unpack(tensors: Tensors, bits: int, group: int) -> GroupInt:
    """From the tensors of one layer; `group` is the configured size, -1 for one scale a row ("channel")."""
    check_bits(bits)
    words, scale, shape = need(tensors, "weight_packed", "weight_scale", "weight_shape")
    n, k = (int(size) for size in shape.flatten().tolist())
    if k * bits % 8:
        raise FormatError(
            f"Rows of {k} codes of {bits} bits do not fill whole bytes; use another variant of the model."
        )
    check("weight_packed", words, (n, -(-k * bits // 32)), torch.int32)
    count = scale.numel() // n
    columns = grouping(k, group, count, tensors.get("weight_g_idx"))
    zero = _zero_points(tensors.get("weight_zero_point"), bits, n, count)
    return columns.pack(bits, from_words(words, bits, k), scale.reshape(n, count), zero)


def _zero_points(stored: Tensor | None, bits: int, n: int, count: int) -> Tensor | None:  # [N, G] unsigned
    if stored is None:
        return None
    if stored.dtype == torch.int8:  # early versions: signed and not packed
        check("weight_zero_point", stored, (n, count))
        return stored.int().add(2 ** (bits - 1)).to(torch.uint8)
    check("weight_zero_point", stored, (-(-n * bits // 32), count), torch.int32)
    return from_words(stored.T, bits, n).T
