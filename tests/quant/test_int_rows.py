"""Packed products of a batch of rows against float64, at odd shapes, groups, zeros and shifts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.errors import SchemeError
from quant.kernels import int_rows, rows_cuda, targets
from quant.kernels.layout import DeviceInt
from quant.layers.cuda_int import CUDAInt

BF16, F16 = torch.bfloat16, torch.float16
BOUND = {BF16: 5e-3, F16: 8e-4}  # scales, weights and results are rounded to the activations' type


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", ["sym", "zero", "shift"])
@pytest.mark.parametrize(
    ("n", "k", "bits", "groups"),
    [(288, 512, 4, (32, 128, 256, 512)), (1057, 2304, 4, (256, 2304)), (130, 2560, 8, (32, 128, 256, 2560))],
)
def test_products_match_float64(n, k, bits, groups, kind, dtype):
    """Also the widest groups, and the same at every call."""
    for group in groups:
        w = packed(n, k, bits, group, kind, "cuda")
        weights = w.dequantize(torch.float64)
        for rows in (2, 9, 17, 33, 65, 100, 128):
            x, onto = (
                torch.randn(rows, m, generator=torch.Generator().manual_seed(m)).to("cuda", dtype) for m in (k, n)
            )
            out = int_rows.product(x, w, onto, 0.5)
            assert error(out, onto.double() + 0.5 * (x.double() @ weights.T)) < BOUND[dtype], (group, rows)
            assert all(torch.equal(int_rows.product(x, w, onto, 0.5), out) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_heads_of_a_vocabulary(bits):
    """More tiles than any other matrix has; the layer, too."""
    w = packed(64 * rows_cuda.MANY_TILES + 25, 256, bits, 128, "zero", "cuda")
    weights = w.dequantize(torch.float64)
    for rows in (9, 24, 40, 64, 65, 128, 300, 1000):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to("cuda", BF16)
        out = int_rows.product(x, w)
        assert error(out, x.double() @ weights.T) < BOUND[BF16], rows
        assert torch.equal(CUDAInt(w, BF16)(x), out)
        assert all(torch.equal(int_rows.product(x, w), out) for _ in range(3))


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
    assert error(first, onto.double() + 0.5 * (x.double() @ w.dequantize(torch.float64).T)) < BOUND[dtype]


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


@pytest.mark.gpu
def test_rows_of_a_wider_tensor_are_read_where_they_lie():
    w = packed(64, 256, 4, 128, "sym", "cuda")
    wide = torch.randn(4, 512, generator=torch.Generator().manual_seed(1)).to("cuda", BF16)
    assert torch.equal(int_rows.product(wide[:, 256:], w), int_rows.product(wide[:, 256:].contiguous(), w))


@pytest.mark.gpu
def test_columns_of_another_tensor_are_gathered_first():
    w = packed(64, 256, 4, 128, "sym", "cuda")
    wide = torch.randn(4, 259, generator=torch.Generator().manual_seed(1)).to("cuda", BF16)
    onto = torch.randn(64, 4, generator=torch.Generator().manual_seed(2)).to("cuda", BF16).T
    x = wide[:, 3:]
    assert torch.equal(int_rows.product(x, w, onto), int_rows.product(x.contiguous(), w, onto.contiguous()))


def test_what_the_kernels_cannot_read_is_refused():
    w = packed(8, 72, 4, 72, "sym", "cpu")
    assert not int_rows.supported(w, BF16)
    with pytest.raises(SchemeError, match="72 columns"):
        int_rows.product(torch.zeros(2, 72, dtype=BF16), w)


def test_a_head_is_never_unpacked():
    assert int_rows.most_rows(packed(2304, 64, 4, 64, "sym", "cpu")) == 128
    assert int_rows.most_rows(packed(40_000, 64, 4, 64, "sym", "cpu")) > 100_000


def test_which_kernel_takes_how_many_rows():
    def taken(n: int, bits: int) -> list[int]:
        w = packed(n, 64, bits, 64, "sym", "cpu")
        return [rows for rows in (9, 16, 17, 32, 33, 64, 65, 128) if int_rows.by_copy_engine(rows, w)]

    assert taken(2304, 4) == taken(40_000, 4) == [17, 32, 33, 64, 65, 128]
    assert taken(2304, 8) == [65, 128]
    assert taken(11_520, 8) == [33, 64, 65, 128]
    assert taken(40_000, 8) == [9, 16, 33, 64, 65, 128]
