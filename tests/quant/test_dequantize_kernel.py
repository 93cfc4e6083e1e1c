"""The one pass from packed integers to plain weights, against the layout's own definition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from quant.errors import FormatError
from quant.kernels.dequantize import dequantize
from quant.kernels.layout import DeviceInt


def packed(n: int, k: int, bits: int, group: int, kind: str, device: str) -> DeviceInt:
    g = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = torch.randn(n, k // group, generator=g).half()
    zero = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8) if kind == "zero" else None
    shift = torch.randn(scale.shape, generator=g) if kind == "shift" else None
    return DeviceInt(bits, group, *(None if t is None else t.to(device) for t in (words, scale, zero, shift)))


@pytest.mark.parametrize(
    ("n", "k", "bits", "group", "kind", "dtype"),
    [
        (33, 576, 4, 96, "sym", torch.bfloat16),
        (7, 288, 4, 32, "zero", torch.float16),
        (16, 320, 4, 64, "shift", torch.bfloat16),
        (5, 264, 4, 264, "sym", torch.float32),
        (19, 384, 8, 192, "sym", torch.bfloat16),
        (1, 260, 8, 4, "zero", torch.float16),
        (3, 96, 8, 32, "shift", torch.float32),
    ],
)
def test_weights_are_the_layouts(n, k, bits, group, kind, dtype, kernel_device):
    w = packed(n, k, bits, group, kind, kernel_device)
    out = torch.full((n, k), float("nan"), dtype=dtype, device=kernel_device)
    assert dequantize(w, dtype, out) is out
    # A sum of scale * code and shift may be fused, and the interpreter cuts bfloat16 off instead of rounding.
    exact = kind != "shift" and (kernel_device, dtype) != ("cpu", torch.bfloat16)
    rtol = 0 if exact else torch.finfo(dtype).eps
    torch.testing.assert_close(out, w.dequantize(dtype), rtol=rtol, atol=0 if exact else 4 * rtol)


def test_a_scratch_of_another_shape_is_refused():
    w = packed(4, 64, 4, 32, "sym", "cpu")
    with pytest.raises(FormatError, match=r"\[4, 32\]"):
        dequantize(w, torch.float16, torch.empty(4, 32, dtype=torch.float16))


def test_a_layer_without_rows_to_multiply(kernel_device):
    """Also where no kernel takes the packed weights, as on GPUs before Hopper."""
    from quant.layers.cuda_int import CUDAInt

    layer = CUDAInt(packed(8, 32, 4, 32, "sym", kernel_device), torch.float16, compiled=False)
    none = torch.zeros(0, 32, dtype=torch.float16, device=kernel_device)
    assert layer(none).shape == (0, 8)
    assert layer.added(none, none.new_zeros(0, 8), 1.0).shape == (0, 8)
    layer.packed_rows = 0
    assert layer(none).shape == (0, 8)
    assert layer.added(none, none.new_zeros(0, 8), 1.0).shape == (0, 8)
