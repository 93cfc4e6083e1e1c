"""The blocked solver against the textbook: one column at a time, the inverse Hessian updated after each, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quant.errors import NotFinite
from quant.gptq import column_importance, gptq_solve, gptq_solve_all, inverse_factor, round_matrix
from quant.grid import search
from quant.hessian import Hessian
from quant.scheme import Scheme

CPU = torch.device("cpu")


def inputs(tokens: int, k: int, seed: int = 0) -> Tensor:
    """Correlated channels of very different sizes, as a model's are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    sizes = torch.rand(k, generator=generator).mul(3).exp()
    x: Tensor = torch.randn(tokens, k, generator=generator) @ mix * sizes
    return x


def weights(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def hessian_of(x: Tensor) -> Hessian:
    hessian = Hessian(x.shape[1], CPU)
    hessian.add(x)
    return hessian


def scheme(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False) -> Scheme:
    return Scheme("int", bits, group, symmetric, act_order)


def nearest(w: Tensor, s: Scheme) -> Tensor:  # [N, K]
    """Rounded to the best grids, without calibration."""
    groups = w.view(-1, s.width(w.shape[1])).T
    grid = search(groups, s.bits, s.symmetric)
    return grid.values(grid.codes(groups)).T.reshape(w.shape)


def textbook(w: Tensor, h: Tensor, s: Scheme, damp: float) -> Tensor:  # [N, K] float64
    """Optimal brain quantization in the order of the inputs' size (GPTQ, section 3), one column after the other."""
    plain, w, h, k, group = w.double(), w.double().clone(), h.double(), w.shape[1], s.width(w.shape[1])
    damped = h + damp * h.diagonal().mean() * torch.eye(k, dtype=torch.float64)
    left, inverse = h.diagonal().argsort(descending=True, stable=True).tolist(), torch.linalg.inv(damped)
    grids: dict[int, tuple[Tensor, Tensor]] = {}
    values = torch.zeros_like(w)
    while left:
        j = left[0]
        if j not in grids:
            columns = left[:group] if s.act_order else list(range(j - j % group, j - j % group + group))
            costs = prices(inverse, columns) if s.act_order else damped.diagonal()[columns]
            grid = search((w if s.act_order else plain)[:, columns].T, s.bits, s.symmetric, costs)
            grids |= dict.fromkeys(columns, (grid.scale, grid.zero))
        scale, zero = grids[j]
        values[:, j] = (((w[:, j] / scale).round() + zero).clamp(0, 2**s.bits - 1) - zero) * scale
        w -= torch.outer((w[:, j] - values[:, j]) / inverse[j, j], inverse[j])
        inverse = without(inverse, j)
        left = left[1:]
    return values


def without(inverse: Tensor, j: int) -> Tensor:
    """The inverse of the matrix that lacks row and column j; zeros and a one in their place."""
    inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    inverse[j, j] = 1.0
    return inverse


def prices(inverse: Tensor, columns: list[int]) -> Tensor:
    """What an error of 1 in each costs once all the later columns have made up for it."""
    found = []
    for j in columns:
        found.append(1 / inverse[j, j])
        inverse = without(inverse, j)
    return torch.stack(found)


def loss(w: Tensor, q: Tensor, x: Tensor) -> float:
    """Relative error of the output."""
    return float(((q - w) @ x.T).norm() / (w @ x.T).norm())


@pytest.mark.parametrize("act_order", [False, True])
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
def test_blocks_change_nothing(k: int, s: Scheme, act_order: bool) -> None:
    """In float64 the lazy blocks give the textbook's weights, all of them."""
    s = replace(s, act_order=act_order)
    w, h = weights(10, k).double(), hessian_of(inputs(3 * k, k)).matrix.double()
    order = h.diagonal().argsort(descending=True, stable=True)
    factor, used = inverse_factor(h[order][:, order], 0.01)
    packed = round_matrix(w, factor, s, order, column_importance(h, used))
    assert packed.order is None or act_order
    assert torch.equal(packed.dequantize().double(), textbook(w, h, s, used))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_float32_is_as_good_as_the_textbook(bits: int, symmetric: bool, act_order: bool) -> None:
    x, w, s = inputs(600, 192), weights(24, 192), scheme(bits, 64, symmetric, act_order)
    solved = gptq_solve(w, hessian_of(x), s)
    expected = textbook(w, hessian_of(x).matrix, s, 0.01).float()
    assert loss(w, solved.packed.dequantize(), x) == pytest.approx(loss(w, expected, x), rel=0.01)


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
    assert solved.error == pytest.approx(loss(w, solved.packed.dequantize(), x), rel=1e-3)
    assert solved.error < 0.8 * loss(w, nearest(w, scheme(4, 64, symmetric)), x)


@pytest.mark.parametrize("act_order", [False, True])
def test_only_act_order_moves_columns_and_groups_keep_their_place_without(act_order: bool) -> None:
    x, w = inputs(800, 128), weights(12, 128)
    packed = gptq_solve(w, hessian_of(x), scheme(act_order=act_order)).packed
    if not act_order:
        assert packed.order is None
        return
    assert packed.order is not None
    assert torch.equal(packed.order, x.square().sum(0).argsort(descending=True))


def test_the_groups_of_large_inputs_get_the_better_grids() -> None:
    """One weight in each group is far out; its input is small. Unweighted grids would stretch to it."""
    x, w = inputs(800, 64), weights(64, 64) * 0.1
    w[:, ::16], x[:, ::16] = 2.0, x[:, ::16] * 1e-3
    solved = gptq_solve(w, hessian_of(x), scheme(group=16))
    assert loss(w, solved.packed.dequantize(), x) < 0.7 * loss(w, nearest(w, scheme(group=16)), x)
    assert solved.packed.scale.abs().mean() < 0.8 * 2.0 / 8


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
    assert torch.equal(solved.packed.dequantize(), nearest(w, scheme()))
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
    assert solved.fallback is not None
    assert "damping" in solved.fallback
    assert torch.equal(solved.packed.dequantize(), nearest(w, scheme()))


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
