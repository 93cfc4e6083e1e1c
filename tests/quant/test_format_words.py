"""AWQ and compressed-tensors files against the textbook reading of their words, and there and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import bits_of, code_at, random_groups, same, weights
from torch import Tensor

from quant.errors import FormatError
from quant.formats import awq, compressed

# AutoAWQ's packing puts column ORDER[i] of eight at bit 4 * i.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq_code(words: Tensor, row: int, column: int) -> int:
    return bits_of(int(words[row, column // 8]), ORDER.index(column % 8), 4)


@pytest.mark.parametrize("group", [32, 48, -1])
def test_awq_says_what_the_weights_are(group: int) -> None:
    n, k = 24, 96
    packed = random_groups(4, n, k, group, least=0)
    tensors = awq.pack(packed)
    assert tensors["qweight"].shape == (k, n // 8)
    count = tensors["scales"].shape[0]
    codes = [[awq_code(tensors["qweight"], c, row) for c in range(k)] for row in range(n)]
    zeros = [[awq_code(tensors["qzeros"], g, row) for g in range(count)] for row in range(n)]
    index = [c // packed.group for c in range(k)]
    assert torch.equal(weights(codes, zeros, tensors["scales"].T, index), packed.dequantize())
    assert same(awq.unpack(tensors, group), packed)


def test_awq_refuses_what_it_cannot_hold() -> None:
    for packed in (
        random_groups(8, 16, 32, 32),
        random_groups(4, 12, 32, 32),
        random_groups(4, 16, 64, 32, shuffled=True),
    ):
        with pytest.raises(FormatError, match="use GPTQ"):
            awq.pack(packed)


def test_awq_refuses_tensors_that_do_not_match() -> None:
    tensors = awq.pack(random_groups(4, 16, 64, 32))
    with pytest.raises(FormatError, match="qweight"):
        awq.unpack(tensors | {"qweight": tensors["qweight"].T}, 32)
    with pytest.raises(FormatError, match="scales"):
        awq.unpack(tensors, 64)


def compressed_weights(tensors: dict[str, Tensor], bits: int, group: int) -> Tensor:
    n, k = tensors["weight_shape"].tolist()
    middle = 2 ** (bits - 1)
    codes = [[code_at(tensors["weight_packed"], row, c, bits) - middle for c in range(k)] for row in range(n)]
    count = tensors["weight_scale"].shape[1]
    zeros = [[0] * count for _ in range(n)]
    if "weight_zero_point" in tensors:
        points = tensors["weight_zero_point"].T
        zeros = [[code_at(points, g, row, bits) - middle for g in range(count)] for row in range(n)]
    index = tensors.get("weight_g_idx", torch.arange(k) // group).tolist()
    return weights(codes, zeros, tensors["weight_scale"], index)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_say_what_the_weights_are(bits: int, symmetric: bool, shuffled: bool) -> None:
    packed = random_groups(bits, 13, 96, 32, symmetric=symmetric, shuffled=shuffled, dtype=torch.bfloat16, least=0)
    tensors = compressed.pack(packed)
    assert ("weight_zero_point" in tensors) == (not symmetric)
    assert ("weight_g_idx" in tensors) == shuffled
    assert torch.equal(compressed_weights(tensors, bits, 32), packed.dequantize())
    assert same(compressed.unpack(tensors, bits, 32), packed)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 40),
    groups=st.integers(1, 4),
    width=st.sampled_from([2, 6, 10, 32]),
    symmetric=st.booleans(),
    shuffled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_compressed_there_and_back_at_odd_sizes(
    bits: int, n: int, groups: int, width: int, symmetric: bool, shuffled: bool, seed: int
) -> None:
    packed = random_groups(bits, n, groups * width, width, symmetric=symmetric, shuffled=shuffled, seed=seed)
    again = compressed.unpack(compressed.pack(packed), bits, width)
    assert torch.equal(again.dequantize(), packed.dequantize())


def test_one_scale_a_row() -> None:
    packed = random_groups(8, 13, 40, -1, symmetric=True)
    tensors = compressed.pack(packed)
    assert tensors["weight_scale"].shape == (13, 1)
    assert same(compressed.unpack(tensors, 8, -1), packed)


def test_early_zero_points_are_plain_signed_bytes() -> None:
    packed = random_groups(4, 13, 64, 32, least=0)
    assert packed.zero is not None
    tensors = compressed.pack(packed) | {"weight_zero_point": (packed.zero.int() - 8).to(torch.int8)}
    assert same(compressed.unpack(tensors, 4, 32), packed)


def test_compressed_refuses_tensors_that_do_not_match() -> None:
    tensors = compressed.pack(random_groups(4, 16, 64, 32))
    for change in (
        {"weight_packed": tensors["weight_packed"][:, :-1]},
        {"weight_scale": tensors["weight_scale"][:, :1]},
        {"weight_zero_point": tensors["weight_zero_point"][:1]},
        {"weight_shape": torch.tensor([16, 65])},
    ):
        with pytest.raises(FormatError):
            compressed.unpack(tensors | change, 4, 32)
