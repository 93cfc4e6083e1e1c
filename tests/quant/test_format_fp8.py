"""fp8 weights: rounding against the textbook's grid of e4m3 values, and the checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch

from quant.errors import FormatError
from quant.formats import fp8
from quant.formats.fp8 import FP8


def grid() -> torch.Tensor:
    """Every non-negative e4m3 value: exponent bias 7, 3 bits of mantissa, no infinity, the last code is NaN."""
    subnormal = [m / 8 * 2**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)


def test_rounding_is_to_the_nearest_value() -> None:
    w = torch.randn(20, 33, generator=torch.Generator().manual_seed(0))
    codes, scale = fp8.quantize(w)
    assert torch.allclose(scale[:, 0].double(), w.abs().amax(-1).double() / 448, rtol=1e-6)
    scaled = (w / scale).double().abs()
    nearest = (scaled[..., None] - grid()).abs().min(-1).values
    assert torch.allclose((codes.double().abs() - scaled).abs(), nearest, rtol=1e-6, atol=1e-9)
    assert torch.equal(codes.float().sign(), w.sign() * (codes.float() != 0))


def test_there_and_back() -> None:
    codes, scale = fp8.quantize(torch.randn(13, 24))
    packed = FP8(codes, scale[:, 0])
    tensors = fp8.pack(packed)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "weight": ((13, 24), torch.float8_e4m3fn),
        "weight_scale": ((13, 1), torch.float32),
    }
    assert torch.equal(fp8.unpack(tensors).dequantize(), packed.dequantize())
    assert torch.equal(packed.dequantize(), codes.float() * scale)


def test_one_scale_for_all_and_scales_in_bf16() -> None:
    codes, _ = fp8.quantize(torch.randn(6, 8))
    read = fp8.unpack({"weight": codes, "weight_scale": torch.tensor([0.5], dtype=torch.bfloat16)})
    assert torch.equal(read.dequantize(), codes.float() * 0.5)
    assert fp8.pack(read)["weight_scale"].dtype == torch.bfloat16


def test_rows_and_joining() -> None:
    codes, scale = fp8.quantize(torch.randn(9, 16))
    packed = FP8(codes, scale[:, 0])
    parts = [packed.rows(torch.arange(4)), packed.rows(slice(4, 9))]
    assert parts[0].like(parts[1])
    assert torch.equal(FP8.cat(parts).dequantize(), packed.dequantize())
    assert packed.nbytes == 9 * 16 + 9 * 4


def test_zeros_and_the_largest() -> None:
    codes, scale = fp8.quantize(torch.tensor([[0.0, 0.0], [448.0, -448.0], [1e-30, 0.0], [3e38, -1.0]]))
    assert torch.isfinite(codes.float()).all()
    assert torch.isfinite(scale).all()
    assert torch.equal(codes[1].float(), torch.tensor([448.0, -448.0]))


def test_files_that_do_not_match_are_refused() -> None:
    codes, scale = fp8.quantize(torch.randn(8, 8))
    for tensors in ({"weight": codes.float(), "weight_scale": scale}, {"weight": codes, "weight_scale": scale[:2]}):
        with pytest.raises(FormatError):
            fp8.unpack(tensors)
