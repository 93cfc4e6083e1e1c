"""Products of a batch of rows by the copy engine: forms that fit, and on a GPU against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quant.kernels import rows_bulk, targets
from quant.kernels.layout import DeviceInt
from steps import relative_error

BF16, F16 = torch.bfloat16, torch.float16
BOUND = {BF16: 5e-3, F16: 8e-4}  # weights and results are rounded to the activations' type


def packed(n: int, k: int, bits: int, group: int, device: str) -> DeviceInt:
    g = torch.Generator().manual_seed(n + k)
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = (torch.rand(n, k // group, generator=g) * 0.02 + 0.01).half()
    zero = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8)
    return DeviceInt(bits, group, words.to(device), scale.to(device), zero.to(device), None)


def inputs(rows: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, k, generator=g).to("cuda", dtype), torch.randn(rows, n, generator=g).to("cuda", dtype)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("k", [64, 288, 1056, 2304, 5760, 16384])
def test_forms_fit_the_memory_of_a_block(bits, k):
    for n in (24, 288, 2304, 11520, 32768, 122753):
        weight = torch.empty(n, k, dtype=BF16, device="meta")
        if bits != 16:
            words = torch.empty(n, k * bits // 32, dtype=torch.int32, device="meta")
            scale = torch.empty(n, k // 32, dtype=F16, device="meta")
            weight = DeviceInt(bits, 32, words, scale, None, scale.float())
        for rows in (1, 9, 16, 17, 40, 64, 65, 96, 128, 200, 256):
            form = rows_bulk.choose(rows, weight, BF16)
            assert form.shared_bytes(k) <= targets.SHARED_BYTES
            assert form.depth * 2 * 8 <= rows_bulk.BARRIER_BYTES
            assert form.parts <= -(-k // form.stage)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "dtype"),
    [
        (9, 288, 1056, 16, BF16),
        (64, 1056, 288, 16, F16),
        (128, 2304, 5760, 16, BF16),
        (70, 12275, 2304, 16, BF16),
        (17, 1057, 1056, 4, BF16),
        (64, 2304, 5760, 4, F16),
        (128, 6912, 2304, 4, BF16),
        (100, 2304, 2304, 8, BF16),
    ],
)
def test_products_on_a_gpu(rows, n, k, bits, dtype):
    """Also in place, and the same at every call."""
    g = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=g).to("cuda", dtype) if bits == 16 else packed(n, k, bits, 32, "cuda")
    x, onto = inputs(rows, n, k, dtype)
    product = rows_bulk.Product(w, dtype)
    weights = w.double() if isinstance(w, Tensor) else w.dequantize(torch.float64)
    out = product(x, onto, 0.5)
    assert relative_error(out, onto.double() + 0.5 * (x.double() @ weights.T)) < BOUND[dtype]
    for _ in range(20):
        assert torch.equal(product(x, onto, 0.5), out)
    assert product(x, onto, 0.5, onto) is onto
    assert torch.equal(onto, out)
    assert relative_error(product(x[:, :]), x.double() @ weights.T) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 16])
def test_a_broken_input_shows_in_its_row_alone(bits):
    x, _ = inputs(64, 320, 1024, BF16)
    x[3, 5], x[7, 1000] = float("nan"), float("inf")
    w = torch.randn(320, 1024, device="cuda").to(BF16) if bits == 16 else packed(320, 1024, bits, 128, "cuda")
    finite = rows_bulk.Product(w, BF16)(x).isfinite()
    assert finite[[row for row in range(64) if row not in (3, 7)]].all()
    assert not finite[[3, 7]].any()


@pytest.mark.gpu
def test_rows_of_a_wider_tensor_are_read_where_they_lie():
    x, _ = inputs(32, 1, 1536, BF16)
    product = rows_bulk.Product(torch.randn(192, 512, device="cuda").to(BF16), BF16)
    assert torch.equal(product(x[:, 512:1024]), product(x[:, 512:1024].contiguous()))
    assert torch.equal(product(x[:, 3:515]), product(x[:, 3:515].contiguous()))


def test_more_memory_than_a_block_has_is_noticed():
    weight = torch.empty(64, 2304, dtype=BF16, device="meta")
    form = rows_bulk.choose(64, weight, BF16)
    assert replace(form, depth=8, batch=256, warp_groups=4).shared_bytes(2304) > targets.SHARED_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [9, 33, 64, 65])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_layers_take_a_batch_by_whichever_product_is_fastest(bits, rows):
    """Into a sum that may be overwritten, too."""
    from quant.layers.cuda_dense import CUDADense
    from quant.layers.cuda_int import CUDAInt

    n, k = 776, 1024
    w = packed(n, k, bits, 128, "cuda") if bits < 16 else torch.randn(n, k, device="cuda").to(BF16)
    layer, weights = (
        (CUDADense(w), w.double()) if isinstance(w, Tensor) else (CUDAInt(w, BF16), w.dequantize().double())
    )
    x, onto = inputs(rows, n, k, BF16)
    ref = x.double() @ weights.T
    assert relative_error(layer(x), ref) < BOUND[BF16]
    ref = onto.double() + 0.5 * ref
    assert relative_error(layer.added(x, onto, 0.5), ref) < BOUND[BF16]
    assert relative_error(layer.added(x, onto.clone(), 0.5, inplace=True), ref) < BOUND[BF16]
    strided = torch.stack((onto, onto), -1)[..., 0]
    assert relative_error(layer.added(x, strided, 0.5, inplace=True), ref) < BOUND[BF16]
