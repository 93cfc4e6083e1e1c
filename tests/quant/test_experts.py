"""Experts joined into two matrices: the layers over the parts are what they were."""

from __future__ import annotations

import pytest
import torch

from quant.kernels.layout import pack
from quant.layers.around import Gate
from quant.layers.cuda_int import CUDAInt
from quant.layers.experts import join_experts, stack
from quant.layers.plain import Dense
from quant.rtn import rtn
from quant.scheme import ROW, Scheme

pytest.importorskip("triton")


def packed_layers(symmetric: bool, bits: int = 4, group: int = 32) -> list[CUDAInt]:
    generator = torch.Generator().manual_seed(0)
    scheme = Scheme("int", bits=bits, group=group, symmetric=symmetric)
    matrices = [torch.randn(24, 64, generator=generator) for _ in range(3)]
    return [CUDAInt(pack(rtn(m, scheme)), torch.bfloat16, compiled=False) for m in matrices]  # type: ignore[arg-type]


@pytest.mark.parametrize("symmetric", [True, False])
def test_parts_of_the_whole_are_the_experts(symmetric: bool) -> None:
    layers = packed_layers(symmetric)
    found = stack(layers)
    assert found is not None
    whole, parts = found
    for before, after in zip(layers, parts, strict=True):
        assert torch.equal(before.packed.dequantize(), after.packed.dequantize())  # type: ignore[attr-defined]
        assert after.packed.words.untyped_storage().data_ptr() == whole.words.untyped_storage().data_ptr()  # type: ignore[union-attr, attr-defined]
    assert torch.equal(whole.dequantize(), torch.cat([layer.packed.dequantize() for layer in layers]))


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, ROW), (4, ROW)])
def test_experts_of_every_packing_are_one_product(bits: int, group: int) -> None:
    layers = packed_layers(True, bits, group)
    assert join_experts(layers, layers, 2, Gate("silu")) is not None


def test_layers_of_other_kinds_stay_apart() -> None:
    mixed = [packed_layers(True)[0], packed_layers(False)[1]]
    assert stack(mixed) is None
    plain = [Dense(torch.randn(8, 16)) for _ in range(2)]
    assert join_experts(plain, plain, 2, Gate("silu")) is None
