"""Every layer class against float64, at one row, a few, and many, and at sizes that no block divides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.embedding import Embedding
from quant.layers.cpu_int4 import DENSE_ROWS
from quant.layers.plain import room_for, whole_rows
from quant.linear import CPUInt4, Dense, Joined, Unpacking, make_linear
from quant.pack import GroupInt
from steps import relative_error

CPU = torch.device("cpu")


def group_int(bits: int, n: int, k: int, group: int = 32, offset: bool = True, seed: int = 0) -> GroupInt:
    g = torch.Generator().manual_seed(seed)
    scale = (torch.rand(n, k // group, generator=g) * 0.02 + 0.001).half()
    shift = (torch.randn(n, k // group, generator=g) * 0.1).half() if offset else None
    if bits == 4:
        codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    return GroupInt(bits, group, codes, scale, shift)


def inputs(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(9)).to(dtype)


def expected(x: Tensor, packed: GroupInt) -> Tensor:
    return x.double() @ packed.dequantize(torch.float64).T


@pytest.mark.parametrize("rows", [1, 3, DENSE_ROWS[8], DENSE_ROWS[4] + 5])
@pytest.mark.parametrize("shape", [(16, 64), (100, 96), (288, 576), (1057, 64)])
@pytest.mark.parametrize(("bits", "offset"), [(4, True), (4, False), (8, False)])
def test_cpu_int4_in_bf16(bits: int, offset: bool, shape: tuple[int, int], rows: int) -> None:
    packed = group_int(bits, *shape, offset=offset)
    layer = make_linear([packed], CPU, torch.bfloat16)
    assert isinstance(layer, CPUInt4)
    x = inputs(rows, shape[1], torch.bfloat16)
    y = layer(x)
    assert y.shape == (rows, shape[0])
    # bf16 keeps 8 bits: 2^-9 a rounding, of the output and of each group's scale and zero.
    assert relative_error(y, expected(x, packed)) < 5e-3


@pytest.mark.parametrize("group", [32, 64, 128])
def test_cpu_int4_group_sizes(group: int) -> None:
    packed = group_int(4, 48, 256, group)
    x = inputs(2, 256, torch.bfloat16)
    assert relative_error(make_linear([packed], CPU, torch.bfloat16)(x), expected(x, packed)) < 5e-3


def test_float32_on_the_cpu_is_plain_and_exact() -> None:
    packed = group_int(4, 40, 64)
    layer = make_linear([packed], CPU, torch.float32)
    assert isinstance(layer, Dense)
    assert torch.equal(layer.dequantize(), packed.dequantize())


def test_unpacking_for_every_product() -> None:
    packed = group_int(8, 40, 64)
    x = inputs(3, 64, torch.float32)
    assert relative_error(Unpacking(packed, torch.float32)(x), expected(x, packed)) < 1e-6


def test_alike_parts_become_one_matrix() -> None:
    parts = [group_int(4, n, 64, seed=n) for n in (16, 32)]
    layer = make_linear(parts, CPU, torch.bfloat16)
    assert isinstance(layer, CPUInt4)
    assert torch.equal(layer.packed.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_mixed_parts_stay_apart_but_answer_as_one() -> None:
    plain = torch.randn(24, 64, generator=torch.Generator().manual_seed(4))
    packed = group_int(8, 40, 64)
    layer = make_linear([plain, packed], CPU, torch.float32)
    assert isinstance(layer, Joined)
    x = inputs(3, 64, torch.float32)
    whole = torch.cat([x.double() @ plain.double().T, expected(x, packed)], -1)
    assert relative_error(layer(x), whole) < 1e-6
    assert layer.out_features == 64


def test_dense_unpacking_for_many_rows_equals_the_plain_one() -> None:
    packed = group_int(4, 48, 96)
    layer = make_linear([packed], CPU, torch.bfloat16)
    assert relative_error(layer.dequantize(), packed.dequantize(torch.float64)) < 5e-3


def test_embedding_unpacks_the_rows_it_is_asked_for() -> None:
    packed = group_int(8, 50, 64)
    ids = torch.tensor([3, 3, 49, 0])
    table = packed.dequantize()
    assert torch.equal(Embedding(packed, CPU, torch.float32)(ids), table[ids])
    assert torch.equal(Embedding(table, CPU, torch.float32)(ids), table[ids])


def test_rows_behind_plain_weights() -> None:
    room = torch.zeros(3 * 64 * 8).view(3 * 64, 8)
    weight = room[:70]
    assert whole_rows(weight).shape == (128, 8)
    assert whole_rows(weight).data_ptr() == weight.data_ptr()
    assert whole_rows(room[128:190]).shape == (192 - 128, 8)
    alone = torch.zeros(70, 8)
    assert whole_rows(alone) is alone


def test_room_on_the_cpu_is_what_was_asked() -> None:
    assert room_for(70, 8, torch.float32, torch.device("cpu")).untyped_storage().nbytes() == 70 * 8 * 4
