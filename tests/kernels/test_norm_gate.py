"""Norms and gates as kernels against float64, at widths that fill no block, and from rows that lie apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minicpm_cli.kernels import reference
from steps import relative_error

pytest.importorskip("triton", reason="the kernels are written in it")
from minicpm_cli.kernels.gate import relu_mul, silu_mul
from minicpm_cli.kernels.norm import rms_norm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 5e-3}  # the interpreter cuts bf16 off


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 77, 2304])
def test_rms_norm(width: int, dtype: torch.dtype, kernel_device: str) -> None:
    wide = random(3, width + 5, dtype=dtype, device=kernel_device)
    weight = random(width, dtype=dtype, device=kernel_device, seed=1)
    for x in (wide[:, :width].contiguous(), wide[:, :width]):
        expected = reference.rms_norm(x.double(), weight.double(), 1e-3)
        assert relative_error(rms_norm(x, weight, 1e-3), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 1100])
def test_gates(width: int, dtype: torch.dtype, kernel_device: str) -> None:
    x = random(3, 2 * width, dtype=dtype, device=kernel_device)
    assert relative_error(silu_mul(x), reference.silu_mul(x.double())) < TOLERANCE[dtype]
    for threshold in (0.0, 0.5):
        assert relative_error(relu_mul(x, threshold), reference.relu_mul(x.double(), threshold)) < TOLERANCE[dtype]


def test_gates_far_out(kernel_device: str) -> None:
    """exp overflows to infinity at -100; the gate is 0 there, not NaN."""
    x = torch.tensor([[-100.0, 100.0, -0.0, 2.0, 3.0, 4.0]], device=kernel_device)
    assert silu_mul(x).tolist() == [pytest.approx([0.0, 300.0, 0.0], abs=1e-30)]


def test_nothing_to_do(kernel_device: str) -> None:
    x = torch.empty(0, 8, device=kernel_device)
    assert rms_norm(x, x.new_ones(8), 1e-5).shape == (0, 8)
    assert silu_mul(x).shape == (0, 4)
