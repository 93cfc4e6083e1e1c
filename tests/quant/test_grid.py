"""Grids of groups against a search by hand, one group at a time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from quant import grid as grids
from quant.grid import ENDS, LARGEST, SHRINKS, Grid, covering, search


def weights(rows: int, group: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:  # [group, rows]
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, group, generator=generator) ** 3 + shift).T


def by_hand(group: np.ndarray, bits: int, symmetric: bool) -> list[tuple[float, int]]:
    """Scale and zero point of everything that is tried, from the definition."""
    low, high = min(group.min(), 0), max(group.max(), 0)
    if symmetric:
        signs = (1, -1) if bits == 4 else (1,)
        top = 2 * max(high, -low) / (2**bits - 1)
        return [(float(np.float16(sign * share * top)), 2 ** (bits - 1)) for sign in signs for share in SHRINKS]
    shares = product(ENDS, ENDS) if bits == 4 else zip(SHRINKS, SHRINKS, strict=True)
    found = []
    for a, b in shares:
        scale = float(np.float16((high * b - low * a) / (2**bits - 1)))
        found.append((scale, int(np.clip(np.round(-low * a / scale), 1, 2**bits - 1))))
    return found


def loss_by_hand(group: np.ndarray, scale: float, zero: int, bits: int, importance: np.ndarray) -> float:
    codes = np.clip(np.round(group / scale) + zero, 0, 2**bits - 1)
    return float((importance * ((codes - zero) * scale - group) ** 2).sum())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_finds_the_best_candidate_of_every_group(
    bits: int, symmetric: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of several groups, and of some of their rows."""
    w = torch.stack([weights(20, 64, seed, shift=0.3) for seed in range(3)])
    importance = torch.rand(3, 64, generator=torch.Generator().manual_seed(3)) * 5 if weighted else None
    counted = torch.ones(3, 64) if importance is None else importance
    for piece in (64 * 40, 64 * 7):
        monkeypatch.setitem(grids.PIECE, "cpu", piece)
        grid = search(w, bits, symmetric, importance)
        for g, i in product(range(3), range(20)):
            group, cost = w[g, :, i].double().numpy(), counted[g].double().numpy()
            found = loss_by_hand(group, float(grid.scale[g, i]), int(grid.zero[g, i]), bits, cost)
            best = min(loss_by_hand(group, *one, bits, cost) for one in by_hand(group, bits, symmetric))
            assert found == pytest.approx(best, rel=1e-3)
            assert float(grid.loss(w, importance)[g, i]) == pytest.approx(best, rel=1e-3)


def test_the_search_beats_the_full_range() -> None:
    w = weights(50, 64)
    full = covering(w.amin(0), w.amax(0), 4, True).loss(w)
    least = search(w, 4, True).loss(w)
    assert (least <= full).all()
    assert least.sum() < 0.95 * full.sum()


def test_the_larger_side_gets_the_code_more() -> None:
    """-8..7 reaches one step farther on one side: with a negative scale that is the positive one."""
    w = torch.linspace(-1, 1, 32)[:, None].repeat(1, 2)
    w[-1, 0], w[0, 1] = 1.14, -1.14
    grid = search(w, 4, True)
    assert (grid.scale < 0).tolist() == [True, False]
    assert grid.codes(w)[[-1, 0], [0, 1]].tolist() == [0, 0]


def test_both_ends_shrink_alone() -> None:
    """One outlier below, none above: the low end alone is cut."""
    w = torch.linspace(0, 1, 1024)[:, None].clone()
    w[0] = -0.5
    grid = search(w, 4, symmetric=False)
    reach = -grid.zero * grid.scale, (15 - grid.zero) * grid.scale
    assert -0.4 < reach[0] < -0.2
    assert reach[1] > 0.9


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [-9.0, 0.0, 9.0])
def test_zero_points_are_integers_from_one(bits: int, shift: float) -> None:
    """All weights positive would want zero point 0, which a file of GPTQ's first version cannot hold."""
    grid = search(weights(30, 32, shift=shift), bits, symmetric=False)
    assert torch.equal(grid.zero, grid.zero.round())
    assert grid.zero.min() >= 1
    assert grid.zero.max() <= 2**bits - 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_as_stored_finite_and_not_zero(symmetric: bool) -> None:
    for size in (1.0, 1e-8, 1e-30, 1e7, 1e30):
        grid = search(weights(9, 32) * size, 4, symmetric)
        assert torch.equal(grid.scale, grid.scale.half().float())
        assert grid.scale.abs().min() > 0
        assert grid.scale.abs().max() <= LARGEST
        assert grid.zero.min() >= 1


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_stays_zero(symmetric: bool) -> None:
    w = torch.zeros(32, 2)
    grid = search(w, 4, symmetric, torch.zeros(32))
    assert torch.equal(grid.values(grid.codes(w)), w)


def test_weights_on_a_grid_are_kept() -> None:
    grid = Grid(4, torch.tensor([0.5]), torch.tensor([3.0]))
    w = (torch.arange(16.0) - 3)[:, None] * 0.5
    found = search(w, 4, symmetric=False)
    assert torch.equal(grid.values(grid.codes(w)), w)
    assert torch.equal(found.values(found.codes(w)), w)
