"""The grid of one group of weights: which scale and zero point lose least, and rounding to it.

A group's weights are scale * (code - zero), codes 0 .. 2^bits - 1. Symmetric grids have their zero at 2^(bits-1).
Asymmetric zeros are at least 1: the first GPTQ file version stores zero - 1 and cannot hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Shares of the full range tried as the range of the grid.
SHRINKS = tuple(1.0 - 0.02 * step for step in range(30))
STORED = torch.float16  # what every file format stores scales in
SMALLEST = 2.0**-24  # of the positive float16 numbers


@dataclass(frozen=True, slots=True)
class Grid:
    """One grid a row."""

    bits: int
    scale: Tensor  # [M] float32 holding float16 values, > 0
    zero: Tensor  # [M] float32 holding integers

    def codes(self, w: Tensor) -> Tensor:  # [M, G] -> [M, G] float32 integers
        """The nearest codes."""
        return (w / self.scale[:, None]).round_().add_(self.zero[:, None]).clamp_(0, 2**self.bits - 1)

    def values(self, codes: Tensor) -> Tensor:  # [M, G] -> [M, G]
        return (codes - self.zero[:, None]).mul_(self.scale[:, None])

    def loss(self, w: Tensor, importance: Tensor | None) -> Tensor:  # [M, G], [G] -> [M]
        """The squared rounding error, each column's weighted by its importance."""
        squares = self.values(self.codes(w)).sub_(w).square_()
        return squares.sum(-1) if importance is None else squares @ importance


def full_range(w: Tensor, bits: int, symmetric: bool, shrink: float = 1.0) -> Grid:  # [M, G]
    """The grid over `shrink` times the range of each row of `w`, zero included."""
    low, high = w.amin(-1).clamp_(max=0) * shrink, w.amax(-1).clamp_(min=0) * shrink
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = _stored((high - low) / (2**bits - 1))
    if symmetric:
        return Grid(bits, scale, torch.full_like(scale, 2 ** (bits - 1)))
    return Grid(bits, scale, (-low / scale).round_().clamp_(1, 2**bits - 1))


def search(w: Tensor, bits: int, symmetric: bool, importance: Tensor | None = None) -> Grid:  # [M, G], [G]
    """The grid of least squared error for each row of `w`, among shrunken ranges of the row."""
    best = full_range(w, bits, symmetric)
    least = best.loss(w, importance)
    for shrink in SHRINKS[1:]:
        grid = full_range(w, bits, symmetric, shrink)
        loss = grid.loss(w, importance)
        better = loss < least
        least = torch.where(better, loss, least)
        best = Grid(bits, torch.where(better, grid.scale, best.scale), torch.where(better, grid.zero, best.zero))
    return best


def _stored(scale: Tensor) -> Tensor:
    """As the file will hold it; a row of zeros gets any positive scale."""
    return scale.to(STORED).float().clamp_(min=SMALLEST)
