"""The blocked solver against the textbook: one column at a time, the inverse Hessian updated after each, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.gptq import NotFinite, gptq_solve, gptq_solve_all, inverse_factor, round_columns
from quant.grid import search
from quant.hessian import Hessian
from quant.scheme import Scheme

CPU = torch.device("cpu")


def inputs(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Correlated channels of very different sizes, as a model's are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    sizes = torch.rand(k, generator=generator).mul(3).exp()
    return torch.randn(tokens, k, generator=generator) @ mix * sizes


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def hessian_of(x: Tensor) -> Hessian:
    hessian = Hessian(x.shape[1], CPU)
    hessian.add(x)
    return hessian


def scheme(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False) -> Scheme:
    return Scheme("int", bits, group, symmetric, act_order)


def textbook(w: Tensor, h: Tensor, s: Scheme, damp: float) -> tuple[np.ndarray, np.ndarray]:
    """Optimal brain quantization in a fixed order (GPTQ, section 3): codes and values, [N, K]."""
    w, h = w.double().clone(), h.double()
    k = w.shape[1]
    inverse = torch.linalg.inv(h + damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64))
    codes, values = torch.zeros_like(w), torch.zeros_like(w)
    for j in range(k):
        if j % s.width(k) == 0:
            grid = search(w[:, j : j + s.width(k)], s.bits, s.symmetric)
        codes[:, j] = ((w[:, j] / grid.scale).round() + grid.zero).clamp(0, 2**s.bits - 1)
        values[:, j] = (codes[:, j] - grid.zero) * grid.scale
        w -= torch.outer((w[:, j] - values[:, j]) / inverse[j, j], inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1.0  # out of the game: row and column are zero
    return codes.numpy(), values.numpy()


def loss(w: Tensor, q: Tensor, x: Tensor) -> float:
    """Relative error of the output."""
    return float(((q - w) @ x.T).norm() / (w @ x.T).norm())


@pytest.mark.parametrize(
    ("k", "s"),
    [
        (96, scheme()),
        (96, scheme(group=96)),
        (192, scheme(group=64, symmetric=False)),
        (320, scheme(group=-1)),
        (320, scheme(group=160, symmetric=False)),
        (256, scheme(bits=8, group=32, symmetric=False)),
        (512, scheme(bits=8, group=256)),
    ],
    ids=lambda v: v.name if isinstance(v, Scheme) else str(v),
)
def test_blocks_change_nothing(k: int, s: Scheme) -> None:
    """In float64 the lazy blocks give the textbook's codes, all of them."""
    w, h = weights(10, k).double(), hessian_of(inputs(3 * k, k)).matrix.double()
    factor, used = inverse_factor(h, 0.01)
    rounded = round_columns(w.T.contiguous(), factor, s)
    codes, _ = textbook(w, h, s, used)
    assert np.array_equal(rounded.codes.T.numpy(), codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_float32_is_as_good_as_the_textbook(bits: int, symmetric: bool) -> None:
    x, w, s = inputs(600, 192), weights(24, 192), scheme(bits, 64, symmetric)
    solved = gptq_solve(w, hessian_of(x), s)
    _, expected = textbook(w, hessian_of(x).matrix, s, 0.01)
    assert loss(w, solved.packed.dequantize(), x) == pytest.approx(
        loss(w, torch.from_numpy(expected).float(), x), rel=0.01
    )


def test_the_factor_is_that_of_the_inverse() -> None:
    h = hessian_of(inputs(400, 64)).matrix.double()
    factor, used = inverse_factor(h, 0.02)
    assert factor is not None
    damped = h + 0.02 * h.diagonal().mean() * torch.eye(64, dtype=torch.float64)
    assert torch.equal(factor, factor.triu())
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(64, dtype=torch.float64), atol=1e-8)
    assert used == 0.02


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_better_than_rounding_to_nearest_and_the_error_is_true(symmetric: bool, act_order: bool) -> None:
    x, w = inputs(800, 192), weights(40, 192)
    solved = gptq_solve(w, hessian_of(x), scheme(4, 64, symmetric, act_order))
    grid = search(w.view(-1, 64), 4, symmetric)
    nearest = grid.values(grid.codes(w.view(-1, 64))).view(w.shape)
    assert solved.error == pytest.approx(loss(w, solved.packed.dequantize(), x), rel=1e-3)
    assert solved.error < 0.8 * loss(w, nearest, x)


def test_act_order_is_the_plain_solve_of_sorted_columns() -> None:
    x, w = inputs(800, 128), weights(12, 128)
    order = x.square().sum(0).argsort(descending=True)
    solved = gptq_solve(w, hessian_of(x), scheme(act_order=True)).packed
    plain = gptq_solve(w[:, order], hessian_of(x[:, order]), scheme()).packed
    assert solved.order is not None
    assert torch.equal(solved.order, order)
    assert torch.equal(solved.integers(), plain.integers())
    assert torch.equal(solved.dequantize()[:, order], plain.dequantize())


def test_several_matrices_are_as_each_alone() -> None:
    hessian, ws = hessian_of(inputs(500, 64)), [weights(8, 64, 2), weights(5, 64, 3), weights(16, 64, 4)]
    for together, w in zip(gptq_solve_all(ws, hessian, scheme(act_order=True)), ws, strict=True):
        alone = gptq_solve(w, hessian, scheme(act_order=True))
        assert torch.equal(together.packed.dequantize(), alone.packed.dequantize())
        assert together.error == pytest.approx(alone.error, rel=1e-4)


@pytest.mark.parametrize("act_order", [False, True])
def test_dead_channels_disturb_nobody(act_order: bool) -> None:
    x, w = inputs(500, 64), weights(8, 64)
    x[:, [0, 17, 63]] = 0
    solved = gptq_solve(w, hessian_of(x), scheme(act_order=act_order), damp=0.0)
    assert solved.damp == 0  # the others needed none
    assert solved.error < 0.1
    assert (solved.packed.dequantize() - w)[:, [0, 17, 63]].abs().max() < 0.5  # rounded, not dropped


def test_an_input_of_zeros_is_rounded_to_nearest() -> None:
    w = weights(8, 64)
    solved = gptq_solve(w, hessian_of(torch.zeros(10, 64)), scheme())
    grid = search(w.view(-1, 32), 4, symmetric=True)
    assert torch.equal(solved.packed.dequantize(), grid.values(grid.codes(w.view(-1, 32))).view(8, 64))
    assert solved.error == 0


def test_damping_rises_until_the_hessian_can_be_factored() -> None:
    x = inputs(400, 64).repeat_interleave(2, 1)  # every channel twice
    solved = gptq_solve(weights(8, 128), hessian_of(x), scheme(), damp=0.0)
    assert 0 < solved.damp < 1
    assert solved.fallback is None
    assert solved.error < 0.1


def test_few_tokens_are_no_failure() -> None:
    solved = gptq_solve(weights(8, 128), hessian_of(inputs(3, 128)), scheme())
    assert solved.fallback is None


def test_the_last_resort_is_rounding_to_nearest_and_says_so() -> None:
    w, hessian = weights(8, 64), Hessian(64, CPU)
    hessian.add(torch.ones(1, 64))
    hessian._sum -= 100 * torch.ones(64, 64).tril(-1)  # no damping makes this one positive
    solved = gptq_solve(w, hessian, scheme())
    grid = search(w.view(-1, 32), 4, symmetric=True)
    assert solved.fallback is not None
    assert "damping" in solved.fallback
    assert torch.equal(solved.packed.dequantize(), grid.values(grid.codes(w.view(-1, 32))).view(8, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    x, w = inputs(100, 64), weights(8, 64)
    with pytest.raises(NotFinite, match="inputs of a, b hold"):
        gptq_solve_all([w, w], hessian_of(torch.cat((x, torch.full((1, 64), value)))), scheme(), names=["a", "b"])
    bad = w.clone()
    bad[3, 5] = value
    with pytest.raises(NotFinite, match="weights of b hold"):
        gptq_solve_all([w, bad], hessian_of(x), scheme(), names=["a", "b"])


@pytest.mark.parametrize("k", [1, 5, 64, 130])
def test_hessian_is_the_mean_of_outer_products(k: int) -> None:
    x, hessian = inputs(50, k), Hessian(k, CPU)
    hessian.add(x[:20].view(4, 5, k))
    hessian.add(x[20:].bfloat16())
    exact = torch.cat((x[:20], x[20:].bfloat16().float())).double()
    assert hessian.tokens == 50
    assert torch.allclose(hessian.matrix.double(), exact.T @ exact / 50, rtol=1e-5, atol=1e-4)
