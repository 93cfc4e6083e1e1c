"""Scales below zero, which symmetric grids use for their farther end: through every form of our own integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from textbook import random_groups, same
from torch import Tensor

from quant.formats import compressed, gptq
from quant.gptq import gptq_solve
from quant.hessian import Hessian
from quant.linear import make_linear
from quant.pack import GroupInt
from quant.scheme import Scheme
from steps import relative_error

CPU = torch.device("cpu")


def mixed(bits: int, symmetric: bool) -> tuple[GroupInt, Tensor]:
    """Scales of both signs, and the weights by the definition."""
    packed = random_groups(bits, 64, 256, 32, symmetric=symmetric)
    signs = torch.where(torch.rand(packed.scale.shape, generator=torch.Generator().manual_seed(4)) < 0.5, -1.0, 1.0)
    packed = replace(packed, scale=packed.scale * signs.half())
    codes, zero = packed.unsigned()
    middle = 2 ** (bits - 1)
    zero = torch.full_like(zero, middle) if symmetric else zero
    steps = codes.double().view(64, -1, 32) - zero.double()[..., None]
    return packed, (steps * packed.scale.double()[..., None]).view(64, 256)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_and_layers(bits: int, symmetric: bool) -> None:
    packed, expected = mixed(bits, symmetric)
    assert torch.equal(packed.dequantize(torch.float64), expected)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for rows in (1, 300):
        layer = make_linear([packed], CPU, torch.bfloat16)
        assert relative_error(layer(x[:rows]), x[:rows].double() @ expected.T) < 5e-3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_files(bits: int, symmetric: bool) -> None:
    packed, _ = mixed(bits, symmetric)
    for version in gptq.VERSIONS:
        assert same(gptq.unpack(gptq.pack(packed, version), bits, 32, symmetric, version), packed)
    assert same(compressed.unpack(compressed.pack(packed), bits, 32), packed)


def test_the_solver_writes_them() -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    hessian = Hessian(64, CPU)
    hessian.add(torch.randn(300, 64, generator=torch.Generator().manual_seed(1)))
    scale = gptq_solve(w, hessian, Scheme("int", 4, 32)).packed.scale
    assert 0.2 < (scale < 0).float().mean() < 0.8
