"""The layers that run bitsandbytes' kernels, on the CPU, where the same calls work."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from quant.formats import int8, nf4
from quant.layers.int8 import OUTLIER, BitsAndBytes8
from quant.layers.nf4 import BitsAndBytes4
from steps import relative_error

BF16 = torch.bfloat16


def random(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4_bits(kind: str, nested: bool, rows: int) -> None:
    packed = nf4.quantize(random(288, 576, 0) * 0.02, kind=kind, nested=nested)
    layer = BitsAndBytes4(packed, BF16)
    x = random(rows, 576, 1).to(BF16)
    plain = packed.dequantize(torch.float64)
    assert layer(x).dtype == BF16
    assert relative_error(layer(x), x.double() @ plain.T) < 5e-3
    assert relative_error(layer.dequantize(), plain) < 5e-3
    assert layer.nbytes == packed.nbytes


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_8_bits(rows: int) -> None:
    packed = int8.quantize(random(288, 576, 0) * 0.02)
    layer = BitsAndBytes8(packed, BF16)
    x = random(rows, 576, 1).to(BF16)
    plain = packed.dequantize(torch.float64)
    # The inputs have 8 bits for each row: 1/127 of the largest of 576, uniformly rounded.
    assert 1e-3 < relative_error(layer(x), x.double() @ plain.T) < 0.015
    assert relative_error(layer.dequantize(), plain) < 5e-3


def test_outliers_do_not_spoil_the_rest() -> None:
    packed = int8.quantize(random(288, 576, 0) * 0.02)
    x = random(5, 576, 1).clamp(-OUTLIER / 2, OUTLIER / 2)
    x[:, [3, 100]] = 300.0
    plain = packed.dequantize(torch.float64)
    x = x.to(BF16)
    rest = x.clone()
    rest[:, [3, 100]] = 0
    layer = BitsAndBytes8(packed, torch.float32)
    error = layer(x.float()).double() - x.double() @ plain.T
    # Without the threshold, one step of the inputs would be 300/127 and the rest mostly zero.
    assert error.norm() / (rest.double() @ plain.T).norm() < 0.02


def test_bitsandbytes_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    BitsAndBytes8(int8.quantize(random(16, 64, 0)), BF16)(random(2, 64, 1).to(BF16))
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("bitsandbytes").getEffectiveLevel() == logging.ERROR
