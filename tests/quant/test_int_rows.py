"""Packed products of a batch of rows against float64, at odd shapes, groups, zeros and shifts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.kernels.layout import DeviceInt

pytest.importorskip("triton")
from quant.kernels import int_rows, rows_cuda, rows_triton, targets

BF16, F16 = torch.bfloat16, torch.float16
# Scales, weights and results are rounded to the activations' type; the interpreter cuts bfloat16 off instead.
BOUND = {("cuda", BF16): 5e-3, ("cuda", F16): 8e-4, ("cpu", BF16): 1e-2, ("cpu", F16): 8e-4}


def packed(n: int, k: int, bits: int, group: int, kind: str, device: str, seed: int = 0) -> DeviceInt:
    """Random codes and scales; kind: sym, zero or shift."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), generator=g, dtype=torch.int64).to(torch.int32)
    scale = (torch.rand(n, k // group, generator=g) * 0.02 + 0.01).to(F16)
    zero = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8) if kind == "zero" else None
    shift = -scale.float() * (2 ** (bits - 1) + torch.rand(scale.shape, generator=g)) if kind == "shift" else None
    parts = (None if t is None else t.to(device) for t in (words, scale, zero, shift))
    return DeviceInt(bits, group, *parts)


def error(out: Tensor, ref: Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "kind", "dtype"),
    [
        (2, 288, 512, 4, 128, "sym", BF16),
        (17, 65, 320, 4, 32, "shift", BF16),
        (9, 96, 576, 4, 96, "zero", BF16),
        (33, 70, 384, 4, 192, "zero", F16),
        (5, 64, 1056, 4, 352, "sym", F16),
        (4, 72, 288, 8, 32, "sym", BF16),
        (3, 72, 256, 8, 64, "zero", BF16),
        (6, 40, 256, 8, 128, "shift", BF16),
        (2, 72, 192, 8, 64, "zero", F16),
        (130, 24, 128, 4, 64, "sym", BF16),
    ],
)
def test_product_matches_float64(rows, n, k, bits, group, kind, dtype, kernel_device):
    w = packed(n, k, bits, group, kind, kernel_device)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    ref = x.double() @ w.dequantize(torch.float64).T
    assert error(int_rows.product(x, w), ref) < BOUND[kernel_device, dtype]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("group", [128, 256, 768])
@pytest.mark.parametrize(("rows", "bits"), [(33, 4), (100, 4), (100, 8)])
def test_groups_wider_than_what_a_block_reads_at_once(rows, bits, group, dtype, kernel_device):
    w = packed(130, 768, bits, group, "sym", kernel_device)
    x = torch.randn(rows, 768, generator=torch.Generator().manual_seed(1)).to(kernel_device, dtype)
    ref = x.double() @ w.dequantize(torch.float64).T
    assert error(rows_triton.product(x, w), ref) < BOUND[kernel_device, dtype]


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_the_columns_add_up_the_same_every_time(parts, kernel_device):
    w = packed(96, 1152, 4, 128, "sym", kernel_device)
    x = torch.randn(3, 1152, generator=torch.Generator().manual_seed(1)).to(kernel_device, BF16)
    onto = torch.randn(3, 96, generator=torch.Generator().manual_seed(2)).to(kernel_device, BF16)
    tiling = rows_triton.Tiling(64, 16, 256, parts, 3, 4)
    first, second = (rows_triton.product(x, w, onto, 0.25, tiling) for _ in range(2))
    assert torch.equal(first, second)
    ref = onto.double() + 0.25 * (x.double() @ w.dequantize(torch.float64).T)
    assert error(first, ref) < BOUND[kernel_device, BF16]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "n", "k", "bits", "group", "kind", "dtype", "shape"),
    [
        (64, 288, 288, 4, 32, "zero", BF16, (64, 1, 1, 4)),
        (17, 1057, 1056, 4, 96, "shift", BF16, (32, 2, 3, 4)),
        (100, 320, 5760, 4, 5760, "sym", BF16, (64, 3, 7, 4)),
        (33, 320, 768, 8, 128, "zero", F16, (48, 1, 2, 5)),
        (9, 130, 768, 8, 32, "shift", BF16, (16, 1, 3, 4)),
        (64, 256, 2304, 8, 64, "zero", BF16, (64, 4, 8, 3)),
    ],
)
def test_every_form_of_the_cuda_kernel(rows, n, k, bits, group, kind, dtype, shape):
    w = packed(n, k, bits, group, kind, "cuda")
    x, onto = (torch.randn(rows, m, generator=torch.Generator().manual_seed(m)).to("cuda", dtype) for m in (k, n))
    form = rows_cuda.form_of(w, dtype, *shape)
    first, second = (rows_cuda.product(x, w, onto, 0.5, form=form) for _ in range(2))
    assert torch.equal(first, second)
    assert error(first, onto.double() + 0.5 * (x.double() @ w.dequantize(torch.float64).T)) < BOUND["cuda", dtype]


@pytest.mark.parametrize("k", [64, 2304, 4096, 5760, 16384])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 32), (8, 64)])
def test_forms_fit_the_memory_of_a_block(k, bits, group):
    """The more groups, the more memory their scales, zeros and shifts take."""
    if k % group:
        pytest.skip("groups divide rows")
    for n in (24, 2304, 11520, 32768, 73448, 122753):
        words = torch.empty(n, k * bits // 32, dtype=torch.int32, device="meta")
        scale = torch.empty(n, k // group, dtype=F16, device="meta")
        w = DeviceInt(bits, group, words, scale, None, scale.float())
        forms = [rows_cuda.choose(rows, w, BF16) for rows in (1, 9, 16, 40, 64, 128)]
        forms += [rows_cuda.choose_experts(pairs, 8, w, BF16, None) for pairs in (1, 16, 128)]
        for form in forms:
            assert form.shared_bytes(k) <= targets.SHARED_BYTES
            assert form.parts <= min(8, -(-k // rows_cuda.STAGE))


def test_rows_of_a_wider_tensor_are_read_where_they_lie(kernel_device):
    w = packed(64, 256, 4, 128, "sym", kernel_device)
    wide = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).to(kernel_device, BF16)
    assert torch.equal(int_rows.product(wide[:, 256:], w), int_rows.product(wide[:, 256:].contiguous(), w))


def test_columns_of_another_tensor_are_gathered_first(kernel_device):
    w = packed(64, 256, 4, 128, "sym", kernel_device)
    wide = torch.randn(4, 259, generator=torch.Generator().manual_seed(1)).to(kernel_device, BF16)
    onto = torch.randn(64, 4, generator=torch.Generator().manual_seed(2)).to(kernel_device, BF16).T
    x = wide[:, 3:]
    assert torch.equal(int_rows.product(x, w, onto), int_rows.product(x.contiguous(), w, onto.contiguous()))


def test_what_the_copy_engine_cannot_read_is_refused():
    w = packed(8, 72, 4, 72, "sym", "cpu")
    assert not int_rows.supported(w, BF16)
    with pytest.raises(SchemeError, match="72 columns"):
        int_rows.product(torch.zeros(2, 72, dtype=BF16), w)
