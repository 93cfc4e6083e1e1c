"""Round-to-nearest against the textbook formula in float64, for every scheme."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from textbook import same
from torch import Tensor

from quant import rtn as module
from quant.errors import QuantError, SchemeError
from quant.formats import gptq, nf4
from quant.formats.nf4 import NF4
from quant.pack import GroupInt
from quant.rtn import rtn
from quant.scheme import Scheme
from steps import relative_error


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def grouped(w: Tensor, scheme: Scheme) -> GroupInt:
    packed = rtn(w, scheme)
    assert isinstance(packed, GroupInt)
    return packed


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    width=st.sampled_from([8, 32, 40]),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
    shift=st.sampled_from([0.0, 0.05, -0.05]),
)
def test_every_weight_takes_its_nearest_code(
    bits: int, n: int, groups: int, width: int, symmetric: bool, seed: int, shift: float
) -> None:
    w = weights(n, groups * width, seed) + shift
    packed = grouped(w, Scheme("int", bits, width, symmetric=symmetric))
    _, zero = packed.unsigned()
    scale = packed.scale.double()[..., None]
    every = scale * (torch.arange(2**bits) - zero.double()[..., None])  # [N, G, 2^bits]
    blocks = w.double().view(n, groups, width)
    nearest = (blocks[..., None] - every[:, :, None]).abs().amin(-1)
    mine = (blocks - packed.dequantize(torch.float64).view(blocks.shape)).abs()
    assert torch.allclose(mine, nearest, rtol=1e-3, atol=1e-7)
    # The ends of a group's range may lack a little more than half a step: scales are float16, zero points whole.
    assert bool((mine <= scale * 0.76).all())


def test_scales_of_symmetric_groups() -> None:
    packed = grouped(torch.tensor([[-3.0, 0, 0.9, 2, 0, 0, 0, 1.5]]), Scheme("int", 4, 8))
    assert packed.symmetric
    assert packed.scale.item() == torch.tensor(6 / 15).half().item()
    assert packed.unsigned()[0].tolist() == [[0, 8, 10, 13, 8, 8, 8, 12]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [0.0, 1.0, -1.0])
def test_asymmetric_zero_points_fit_every_file(shift: float, bits: int) -> None:
    packed = grouped(weights(16, 64) + shift, Scheme("int", bits, 32, symmetric=False))
    assert int(packed.unsigned()[1].min()) >= 1
    assert same(gptq.unpack(gptq.pack(packed), bits, 32, False, "gptq"), packed)


def test_zeros_and_tiny_weights_stay_zero() -> None:
    w = torch.cat((torch.zeros(2, 32), torch.full((1, 32), 1e-9), torch.full((1, 32), 1e5)))
    for kind in ("int", "nf4", "int8", "fp8"):
        plain = rtn(w[:3], Scheme(kind, group=32)).dequantize()
        assert torch.isfinite(plain).all()
        assert plain.abs().max() < 1e-6
    assert relative_error(grouped(w, Scheme("int", 8, 32)).dequantize()[3], w[3].double()) < 0.005


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (Scheme("int", 4, 32), 0.095),
        (Scheme("int", 4, -1, symmetric=False), 0.12),
        (Scheme("int", 8, 32), 0.0056),
        (Scheme("nf4"), 0.092),
        (Scheme("int8"), 0.0072),
        (Scheme("fp8"), 0.026),
    ],
)
def test_errors_on_normal_weights(scheme: Scheme, expected: float) -> None:
    w = weights(300, 576)
    assert relative_error(rtn(w, scheme).dequantize(), w.double()) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("kind", ["int", "nf4", "int8", "fp8"])
@pytest.mark.parametrize("k", [96, 160])
def test_chunks_do_not_show(kind: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, scheme = weights(333, k), Scheme(kind, group=32)
    whole = rtn(w, scheme).dequantize()
    monkeypatch.setattr(module, "CHUNK", 64 * k)
    assert torch.equal(rtn(w, scheme).dequantize(), whole)


def test_nf4_keeps_the_type_of_the_weights() -> None:
    packed = rtn(weights(16, 64).half(), Scheme("nf4"))
    assert isinstance(packed, NF4)
    assert packed.dtype == torch.float16
    assert torch.equal(packed.codes, nf4.quantize(weights(16, 64).half()).codes)


def test_sizes_that_do_not_divide_are_refused_with_others() -> None:
    with pytest.raises(SchemeError, match=r"576.*32, 64, 96, 192 do"):
        rtn(weights(16, 576), Scheme("int"))


@pytest.mark.parametrize("kind", ["int", "nf4", "int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(kind: str, bad: float) -> None:
    w = weights(16, 64)
    w[3, 5] = bad
    with pytest.raises(QuantError, match="NaN"):
        rtn(w, Scheme(kind, group=32))
