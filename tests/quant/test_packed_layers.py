"""Every packing's layer on the CPU against float64, at one row, a few and many, and at sizes no block divides."""

from __future__ import annotations

import pytest
import torch
from textbook import random_groups
from torch import Tensor

from quant.formats import fp8, int8, nf4
from quant.formats.fp8 import FP8
from quant.layers.bnb import bitsandbytes
from quant.layers.fp8 import ScaledFP8
from quant.layers.int8 import BitsAndBytes8
from quant.layers.nf4 import fits_cpu_kernel
from quant.layers.plain import capturable
from quant.linear import CPUNF4, CPUInt4, CPUInt8, Dense, Gathered, Joined, Unpacking, make_linear
from quant.pack import GroupInt, Packed
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error

CPU = torch.device("cpu")
BF16 = torch.bfloat16
# bf16 keeps 8 bits: 2^-9 a rounding, of the outputs and of the scales.
BF16_ERROR = 5e-3


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def inputs(rows: int, k: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(9)).to(dtype)


def error(layer: object, packed: Packed, rows: int, dtype: torch.dtype = BF16) -> float:
    """Of the layer's answers, and of its plain weights, whichever is larger."""
    n, k = packed.shape
    x = inputs(rows, k, dtype)
    y = layer(x)
    assert y.shape == (rows, n)
    assert y.dtype == dtype
    plain = packed.dequantize(torch.float64)
    return max(relative_error(y, x.double() @ plain.T), relative_error(layer.dequantize(), plain))


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("n", [288, 577, 1056])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_integers_with_zero_points_and_orders(bits: int, symmetric: bool, shuffled: bool, n: int, rows: int) -> None:
    packed = random_groups(bits, n, 576, 32, symmetric=symmetric, shuffled=shuffled, least=0)
    layer = make_linear([packed], CPU, BF16)
    assert isinstance(layer, Gathered if shuffled else CPUInt4)
    assert layer.out_features == n
    assert error(layer, packed, rows) < BF16_ERROR


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("group", "inner"), [(32, 32), (64, 64), (96, 32), (192, 64), (288, 32), (-1, 64)])
def test_groups_that_the_cpu_product_lacks_become_smaller_ones(
    group: int, inner: int, bits: int, symmetric: bool
) -> None:
    packed = random_groups(bits, 40, 576, group, symmetric=symmetric)
    layer = make_linear([packed], CPU, BF16)
    if group == -1 and bits == 8 and symmetric:
        assert isinstance(layer, CPUInt8)
    else:
        assert isinstance(layer, CPUInt4)
        assert layer.packed.group == inner
    assert error(layer, packed, 3) < BF16_ERROR


def test_large_zero_points_do_not_shift_8_bit_weights() -> None:
    """All weights of a group a few steps from zero, with the zero point at the end of the range."""
    g = torch.Generator().manual_seed(3)
    codes = torch.randint(240, 256, (64, 256), generator=g)
    zero = torch.full((64, 8), 248)
    packed = GroupInt.from_unsigned(8, 32, codes, torch.rand(64, 8, generator=g).half(), zero)
    for rows in (1, 300):
        assert error(make_linear([packed], CPU, BF16), packed, rows) < BF16_ERROR


@pytest.mark.parametrize("group", [16, 24])
def test_groups_of_no_multiple_of_32_are_plain(group: int) -> None:
    packed = random_groups(4, 40, 96 * 5, group)
    layer = make_linear([packed], CPU, BF16)
    assert isinstance(layer, Dense)
    assert error(layer, packed, 3) < BF16_ERROR


@pytest.mark.parametrize("scale", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_any_type(scale: torch.dtype) -> None:
    packed = random_groups(4, 48, 128, 64, dtype=scale)
    assert error(make_linear([packed], CPU, BF16), packed, 2) < BF16_ERROR


def test_parts_with_one_order_are_one_gathered_matrix() -> None:
    whole = random_groups(4, 96, 128, 32, shuffled=True)
    parts = [whole.rows(slice(0, 32)), whole.rows(slice(32, 96))]
    layer = make_linear(parts, CPU, BF16)
    assert isinstance(layer, Gathered)
    assert isinstance(layer.layer, CPUInt4)
    assert error(layer, whole, 3) < BF16_ERROR


def test_parts_with_different_orders_are_joined() -> None:
    parts = [random_groups(4, 32, 128, 32, shuffled=True, seed=seed) for seed in (1, 2)]
    parts.append(random_groups(4, 32, 128, 32))
    layer = make_linear(parts, CPU, BF16)
    assert isinstance(layer, Joined)
    x = inputs(3, 128)
    plain = torch.cat([p.dequantize(torch.float64) for p in parts])
    assert relative_error(layer(x), x.double() @ plain.T) < BF16_ERROR
    assert relative_error(layer.dequantize(), plain) < BF16_ERROR


def test_unpacking_with_an_order_as_on_a_gpu() -> None:
    packed = random_groups(4, 40, 96, 32, shuffled=True)
    assert error(Unpacking(packed, torch.float32), packed, 3, torch.float32) < 1e-6


@pytest.mark.parametrize("start", [1, 24])
def test_int8_codes_at_any_address_of_a_mapped_file(start: int) -> None:
    packed = int8.quantize(weights(192, 256))
    codes = torch.empty(packed.codes.numel() + start, dtype=torch.int8)[start:].view(192, 256).copy_(packed.codes)
    assert error(make_linear([int8.Int8(codes, packed.absmax)], CPU, BF16), packed, 24) < BF16_ERROR


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("shape", [(288, 576), (577, 64), (1056, 97), (40, 48)])
def test_int8_on_the_cpu(shape: tuple[int, int], rows: int) -> None:
    packed = int8.quantize(weights(*shape))
    layer = make_linear([packed], CPU, BF16)
    assert isinstance(layer, Dense if shape[1] % 32 else CPUInt8)
    assert error(layer, packed, rows) < BF16_ERROR


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(288, 576), (577, 64), (64, 96)])
def test_nf4_on_the_cpu(shape: tuple[int, int], kind: str, nested: bool, rows: int) -> None:
    packed = nf4.quantize(weights(*shape), kind=kind, nested=nested)
    layer = make_linear([packed], CPU, BF16)
    assert isinstance(layer, CPUNF4 if fits_cpu_kernel(packed) else Dense)
    assert error(layer, packed, rows) < BF16_ERROR


def test_nf4_takes_the_cpu_kernel_where_bitsandbytes_has_one() -> None:
    assert fits_cpu_kernel(nf4.quantize(weights(64, 128))) == bool(bitsandbytes().functional.has_avx512bf16())


def test_nf4_takes_the_cpu_kernel_only_for_whole_blocks() -> None:
    assert not fits_cpu_kernel(nf4.quantize(weights(577, 64)))
    assert not fits_cpu_kernel(nf4.quantize(weights(64, 96)))


def test_parts_of_nf4_are_one_matrix_unless_their_scales_are_nested() -> None:
    parts = [nf4.quantize(weights(n, 128, n)) for n in (32, 64)]
    layer = make_linear(parts, CPU, BF16)
    assert not isinstance(layer, Joined)
    x = inputs(3, 128)
    plain = torch.cat([p.dequantize(torch.float64) for p in parts])
    assert relative_error(layer(x), x.double() @ plain.T) < BF16_ERROR
    nested = [nf4.quantize(weights(n, 128, n), nested=True) for n in (32, 64)]
    assert isinstance(make_linear(nested, CPU, BF16), Joined)


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("shape", [(288, 576), (577, 97)])
def test_fp8_on_the_cpu(shape: tuple[int, int], rows: int) -> None:
    packed = rtn(weights(*shape), Scheme("fp8"))
    assert isinstance(packed, FP8)
    layer = make_linear([packed], CPU, BF16)
    assert isinstance(layer, Dense)
    assert error(layer, packed, rows) < BF16_ERROR


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("n", [288, 577])
def test_the_scaled_product_of_fp8(n: int, rows: int) -> None:
    """torch has it on the CPU too (slow), which is enough to check scales and padding: inputs are exact in e4m3."""
    packed = rtn(weights(n, 96), Scheme("fp8"))
    assert isinstance(packed, FP8)
    codes, _ = fp8.quantize(inputs(rows, 96))
    x = codes.bfloat16()
    layer = ScaledFP8(packed, BF16)
    y = layer(x)
    assert y.shape == (rows, n)
    assert layer.codes.shape[0] % 16 == 0  # which only CUDA insists on
    assert relative_error(y, x.double() @ packed.dequantize(torch.float64).T) < BF16_ERROR
    assert relative_error(layer.dequantize(), packed.dequantize(torch.float64)) < BF16_ERROR


def test_fp8_rounds_its_inputs_to_3_bits() -> None:
    packed = rtn(weights(288, 96), Scheme("fp8"))
    assert isinstance(packed, FP8)
    assert 0.01 < error(ScaledFP8(packed, BF16), packed, 30) < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["int", "nf4", "int8", "fp8"])
def test_other_activations_on_the_cpu_are_plain(kind: str, dtype: torch.dtype) -> None:
    packed = rtn(weights(40, 64), Scheme(kind, group=32))
    layer = make_linear([packed], CPU, dtype)
    assert isinstance(layer, Dense)
    assert torch.equal(layer.dequantize(), packed.dequantize(dtype))


def test_a_layer_that_asks_the_host_is_never_captured() -> None:
    plain = Dense(torch.zeros(2, 4))
    asking = Dense(torch.zeros(2, 4))
    asking.capturable = False  # type: ignore[attr-defined]
    assert capturable(Joined([plain, plain]))
    assert not capturable(Joined([plain, asking]))
    assert not capturable(Gathered(asking, torch.arange(4)))
    assert not capturable(object.__new__(BitsAndBytes8))
