"""Embedding rows and rotary angles, against float64."""

from __future__ import annotations

import pytest
import torch

from steps import relative_error

pytest.importorskip("triton")


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 1000), (5, 2304)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embed(kernel_device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    from minicpm_cli.kernels.begin import embed

    table = torch.randn(33, width, generator=torch.Generator().manual_seed(0)).to(kernel_device, dtype)
    ids = torch.tensor([32, 0, 5, 5, 17, 1, 2], device=kernel_device)[:rows]
    found, exact = embed(ids, table, 12.0), table[ids].double() * 12.0
    assert found.dtype == dtype
    if kernel_device == "cuda":
        assert torch.equal(found, exact.to(dtype))
    assert relative_error(found, exact) < {torch.float32: 1e-7, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


@pytest.mark.parametrize("half", [16, 32, 48, 64])
def test_angles_far_from_the_beginning(kernel_device: str, half: int) -> None:
    from minicpm_cli.kernels.begin import angles

    positions = torch.tensor([0, 1, 4095, 131071], device=kernel_device)
    frequencies = (10000.0 ** -(torch.arange(half) / half)).to(kernel_device)
    cos, sin = angles(positions, frequencies, 1.25)
    exact = (positions[:, None].float() * frequencies).double()[:, None]  # the product is rounded as the model does
    assert cos.shape == sin.shape == (4, 1, half)
    assert relative_error(cos, 1.25 * exact.cos()) < 1e-6
    assert relative_error(sin, 1.25 * exact.sin()) < 1e-6
