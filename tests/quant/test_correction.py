"""Corrected weights against least squares in float64, over the tokens themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.correction import Shift, Wanted, corrected
from quant.errors import NotFinite
from quant.hessian import Hessian
from steps import relative_error

CPU = torch.device("cpu")
K, N, TOKENS = 48, 20, 400


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, inputs, the inputs that they should have been, and what the residual stream has lost."""
    g = torch.Generator().manual_seed(seed)
    full = torch.randn(TOKENS, K, generator=g) @ (torch.randn(K, K, generator=g) / K**0.5 + torch.eye(K))
    x = 0.9 * full + 0.2 * torch.randn(TOKENS, K, generator=g)
    return torch.randn(N, K, generator=g), x, full, torch.randn(TOKENS, N, generator=g) + full[:, :N]


def gathered(x: Tensor, full: Tensor | None = None, y: Tensor | None = None) -> tuple[Hessian, Shift | Wanted]:
    """In parts, as the tokens come; with the inputs or the outputs of full precision."""
    hessian, shift, wanted = Hessian(K, CPU), Shift(K, CPU), Wanted(N, K, CPU)
    for part in (slice(0, 150), slice(150, TOKENS)):
        hessian.add(x[part])
        if full is not None:
            shift.add(x[part], full[part])
        if y is not None:
            wanted.add(x[part], y[part])
    return hessian, shift if y is None else wanted


def least_squares(x: Tensor, wanted: Tensor) -> Tensor:  # [N, K]
    found: Tensor = torch.linalg.lstsq(x.double(), wanted.double()).solution.T
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_at_full_strength_the_output_is_the_nearest_to_what_is_wanted(stream: bool) -> None:
    w, x, full, lost = case()
    wanted = full @ w.T + (lost if stream else 0)
    hessian, aim = gathered(x, y=wanted) if stream else gathered(x, full)
    found = corrected(w, hessian, aim, strength=1.0, damp=0.0)
    assert relative_error(found, least_squares(x, wanted)) < 1e-4
    assert (x @ found.T - wanted).norm() < 0.9 * (x @ w.T - wanted).norm()


def test_inputs_and_outputs_of_full_precision_say_the_same() -> None:
    w, x, full, _ = case(5)
    one, other = (corrected(w, *gathered(x, *said)) for said in ((full,), (None, full @ w.T)))
    assert relative_error(one - w, other - w) < 1e-4


def test_damping_is_that_of_a_ridge_towards_the_weights() -> None:
    """As many more tokens as there are columns, on which nothing has moved."""
    w, x, full, _ = case(1)
    hessian, shift = gathered(x, full)
    ridge = (0.1 * TOKENS * hessian.matrix.diagonal().mean()).sqrt() * torch.eye(K)
    wanted = torch.cat((full @ w.T, ridge @ w.T))
    expected = least_squares(torch.cat((x, ridge)), wanted)
    assert relative_error(corrected(w, hessian, shift, strength=1.0), expected) < 1e-4


def test_half_the_strength_is_half_the_way() -> None:
    w, x, full, _ = case(2)
    hessian, shift = gathered(x, full)
    whole, half = (corrected(w, hessian, shift, strength=strength) for strength in (1.0, 0.5))
    assert relative_error(half - w, (whole - w) / 2) < 1e-5
    assert torch.equal(corrected(w, hessian, shift, strength=0.0), w)


def test_inputs_that_have_not_moved_change_nothing() -> None:
    w, x, _, _ = case()
    assert torch.equal(corrected(w, *gathered(x, x)), w)


def test_small_moves_of_large_inputs_are_not_lost_in_rounding() -> None:
    _, x, full, _ = case(3)
    x = 100 * x + 1000
    moved = x + 1e-3 * full
    shift = gathered(x, moved)[1]
    expected = (moved.double() - x.double()).T @ x.double() / TOKENS
    assert relative_error(shift.matrix, expected) < 1e-5


def test_dead_channels_and_no_tokens_leave_the_weights() -> None:
    w, x, full, _ = case()
    assert torch.equal(corrected(w, Hessian(K, CPU), Shift(K, CPU)), w)
    assert torch.equal(corrected(w, Hessian(K, CPU), Wanted(N, K, CPU)), w)
    x[:, [0, 7]] = 0
    found = corrected(w, *gathered(x, full))
    assert torch.equal(found[:, [0, 7]], w[:, [0, 7]])
    assert found.isfinite().all()


def test_full_precision_inputs_that_are_not_finite_are_refused() -> None:
    w, x, full, _ = case()
    full[3, 4] = float("inf")
    with pytest.raises(NotFinite, match="inputs hold"):
        corrected(w, *gathered(x, full))
