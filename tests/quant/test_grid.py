"""Grids of groups against a search by hand, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.grid import SHRINKS, Grid, full_range, search


def weights(rows: int, group: int, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, group, generator=generator) ** 3 + shift


def loss_by_hand(row: np.ndarray, scale: float, zero: int, bits: int, importance: np.ndarray) -> float:
    codes = np.clip(np.round(row / scale) + zero, 0, 2**bits - 1)
    return float((importance * ((codes - zero) * scale - row) ** 2).sum())


def best_by_hand(row: np.ndarray, bits: int, symmetric: bool, importance: np.ndarray) -> float:
    """The least loss over the shrunken ranges, from the definition."""
    losses = []
    for shrink in SHRINKS:
        low, high = min(row.min(), 0) * shrink, max(row.max(), 0) * shrink
        if symmetric:
            high = max(high, -low)
            low = -high
        scale = float(np.float16((high - low) / (2**bits - 1)))
        zero = 2 ** (bits - 1) if symmetric else int(np.clip(np.round(-low / scale), 1, 2**bits - 1))
        losses.append(loss_by_hand(row, scale, zero, bits, importance))
    return min(losses)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_search_finds_the_best_candidate_of_every_row(bits: int, symmetric: bool, weighted: bool) -> None:
    w = weights(20, 64, shift=0.3)
    importance = torch.linspace(0.1, 5, 64) if weighted else None
    grid = search(w, bits, symmetric, importance)
    counted = torch.ones(64) if importance is None else importance
    for i, row in enumerate(w.double().numpy()):
        found = loss_by_hand(row, float(grid.scale[i]), int(grid.zero[i]), bits, counted.double().numpy())
        assert found == pytest.approx(best_by_hand(row, bits, symmetric, counted.double().numpy()), rel=1e-3)


def test_the_search_beats_the_full_range() -> None:
    w = weights(50, 64)
    least, full = search(w, 4, True).loss(w, None), full_range(w, 4, True).loss(w, None)
    assert (least <= full).all()
    assert least.sum() < 0.95 * full.sum()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shift", [-9.0, 0.0, 9.0])
def test_zero_points_are_integers_from_one(bits: int, shift: float) -> None:
    """All weights positive would want zero point 0, which a file of GPTQ's first version cannot hold."""
    grid = search(weights(30, 32, shift=shift), bits, symmetric=False)
    assert torch.equal(grid.zero, grid.zero.round())
    assert grid.zero.min() >= 1
    assert grid.zero.max() <= 2**bits - 1


def test_scales_are_as_stored() -> None:
    for scale in (search(weights(9, 32), 4, True).scale, search(weights(9, 32) * 1e-8, 4, False).scale):
        assert torch.equal(scale, scale.half().float())
        assert (scale > 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_stays_zero(symmetric: bool) -> None:
    w = torch.zeros(2, 32)
    grid = search(w, 4, symmetric)
    assert torch.equal(grid.values(grid.codes(w)), w)


def test_weights_on_a_grid_are_kept() -> None:
    grid = Grid(4, torch.tensor([0.5]), torch.tensor([3.0]))
    w = (torch.arange(16.0) - 3)[None] * 0.5
    found = search(w, 4, symmetric=False)
    assert torch.equal(grid.values(grid.codes(w)), w)
    assert torch.equal(found.values(found.codes(w)), w)
