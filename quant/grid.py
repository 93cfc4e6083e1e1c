"""The grids of groups of weights: which scale and zero point lose least, and rounding to them.

A group's weights are scale * (code - zero), codes 0 .. 2^bits - 1. Symmetric grids have their zero at 2^(bits-1).
Asymmetric zeros are at least 1: the first GPTQ file version stores zero - 1 and cannot hold 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

# Shares of the full range tried as the range of a grid; of each end alone where a grid has 16 steps and a zero point.
SHRINKS = tuple(1.0 - 0.02 * step for step in range(30))
ENDS = tuple(1.0 - step / 14 for step in range(8))
STORED = torch.float16  # what every file format stores scales in
SMALLEST, LARGEST = 2.0**-24, 65504.0  # of the positive float16 numbers
# Weights searched at once on a CPU, so that the temporaries stay in the second-level cache; CUDA takes more.
PIECE = {"cpu": 1 << 16, "cuda": 1 << 24}

Share = tuple[float, float]  # of the low end and of the high end


@dataclass(frozen=True, slots=True)
class Grid:
    """One grid a group. Scales are negative where that lets code 0, the far end, fall on the group's larger side."""

    bits: int
    scale: Tensor  # [..., N] float32 holding float16 values, never 0
    zero: Tensor  # [..., N] float32 holding integers

    def codes(self, w: Tensor) -> Tensor:  # [..., G, N] -> [..., G, N] float32 integers
        """The nearest codes."""
        return (w / self.scale.unsqueeze(-2)).round_().add_(self.zero.unsqueeze(-2)).clamp_(0, 2**self.bits - 1)

    def values(self, codes: Tensor) -> Tensor:  # [..., G, N] -> [..., G, N]
        return (codes - self.zero.unsqueeze(-2)).mul_(self.scale.unsqueeze(-2))

    def loss(self, w: Tensor, importance: Tensor | None = None) -> Tensor:  # [..., G, N], [..., G] -> [..., N]
        """The squared rounding error, each column's weighted by its importance."""
        return _weighted(self.values(self.codes(w)).sub_(w).square_(), importance)


def shares(bits: int, symmetric: bool) -> Iterator[Share]:
    """What `search` tries, the full range first. Negative ones stand for a negative scale."""
    if bits == 4 and not symmetric:
        yield from product(ENDS, ENDS)
        return
    yield from zip(SHRINKS, SHRINKS, strict=True)
    if bits == 4:  # a step of 16 is worth having on the right side; one of 256 is not
        yield from ((-share, -share) for share in SHRINKS)


def covering(low: Tensor, high: Tensor, bits: int, symmetric: bool, share: Share = (1.0, 1.0)) -> Grid:
    """The grids over shares of the ranges low <= 0 <= high, each [..., N]."""
    steps = 2**bits - 1
    if symmetric:
        scale = stored(torch.maximum(high, -low) * (2 * share[0] / steps))
        return Grid(bits, scale, torch.full_like(scale, 2 ** (bits - 1)))
    low, high = low * share[0], high * share[1]
    scale = stored((high - low) / steps)
    return Grid(bits, scale, (-low / scale).round_().clamp_(1, steps))


def search(w: Tensor, bits: int, symmetric: bool, importance: Tensor | None = None) -> Grid:  # [..., G, N], [..., G]
    """The grids of least squared error among `shares` of the groups' ranges, for all groups of `w` at once."""
    groups = w.reshape(-1, *w.shape[-2:])
    weights = None if importance is None else importance.reshape(len(groups), -1)
    scale, zero = w.new_empty(2, len(groups), w.shape[-1])
    for some, rows in _pieces(groups):
        part = None if weights is None else weights[some]
        best = _best(groups[some, :, rows], bits, symmetric, part)
        scale[some, rows], zero[some, rows] = best.scale, best.zero
    shape = (*w.shape[:-2], w.shape[-1])
    return Grid(bits, scale.view(shape), zero.view(shape))


def _pieces(groups: Tensor) -> Iterator[tuple[slice, slice]]:  # [C, G, N]
    """Slices of C and of N."""
    count, width, n = groups.shape
    most = max(1, PIECE[groups.device.type] // width)
    step = max(1, most // n)
    for start in range(0, count, step):
        for row in range(0, n, most):
            yield slice(start, start + step), slice(row, row + most)


def _best(w: Tensor, bits: int, symmetric: bool, importance: Tensor | None) -> Grid:  # [C, G, N], [C, G]
    low, high = w.amin(-2).clamp_(max=0), w.amax(-2).clamp_(min=0)
    scratch = torch.empty_like(w), torch.empty_like(w)
    least = torch.full_like(low, torch.inf)
    best = covering(low, high, bits, symmetric)
    for share in shares(bits, symmetric):
        grid = covering(low, high, bits, symmetric, share)
        loss = _loss(w, grid, importance, symmetric, scratch)
        better = loss < least
        least = torch.where(better, loss, least)
        best = Grid(bits, torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best


def _loss(w: Tensor, grid: Grid, importance: Tensor | None, symmetric: bool, scratch: tuple[Tensor, Tensor]) -> Tensor:
    """`Grid.loss` in steps of the scales, in place."""
    steps, wrong = scratch
    torch.mul(w, grid.scale.reciprocal().unsqueeze(-2), out=steps)
    torch.round(steps, out=wrong)
    top = 2**grid.bits - 1
    if symmetric:  # numbers for bounds take half the time of tensors
        wrong.clamp_(-(top // 2 + 1), top // 2)
    else:
        wrong.clamp_(-grid.zero.unsqueeze(-2), (top - grid.zero).unsqueeze(-2))
    return _weighted(wrong.sub_(steps).square_(), importance).mul_(grid.scale.square())


def _weighted(squares: Tensor, importance: Tensor | None) -> Tensor:  # [..., G, N], [..., G] -> [..., N]
    return squares.sum(-2) if importance is None else (importance.unsqueeze(-2) @ squares).squeeze(-2)


def stored(scale: Tensor) -> Tensor:
    """As the file will hold it, finite; a group of zeros gets the smallest positive scale."""
    sign = torch.where(scale < 0, -1.0, 1.0)
    return scale.abs().clamp_(SMALLEST, LARGEST).to(STORED).float().mul_(sign)
