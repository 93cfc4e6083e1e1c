"""Input statistics of a linear layer: the mean of x x^T over the calibration tokens, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

# Blocks of rows on and below the diagonal: 5/8 of the full product's work at four blocks.
ROW_BLOCKS = 4


class Hessian:
    """The squared output error of rows E is E H E^T, so H is all that a solver needs to know of the inputs.

    Layers that read the same input (q, k and v; gate and up) share one.
    """

    def __init__(self, k: int, device: torch.device) -> None:
        self.tokens = 0
        self._sum = torch.zeros(k, k, device=device)  # blocks above the diagonal stay zero

    @property
    def k(self) -> int:
        return self._sum.shape[0]

    @property
    def device(self) -> torch.device:
        return self._sum.device

    def add(self, x: Tensor) -> None:  # [T, K]
        """Counts the T tokens of `x` in."""
        x = x.reshape(-1, self.k).to(self._sum)
        for start, end in self._row_blocks():
            self._sum[start:end, :end].addmm_(x[:, start:end].T, x[:, :end])
        self.tokens += len(x)

    @property
    def matrix(self) -> Tensor:  # [K, K] float32, a copy
        """The mean; zeros before the first token."""
        lower = self._sum.tril()
        return (lower + lower.tril(-1).T).div_(max(self.tokens, 1))

    def _row_blocks(self) -> list[tuple[int, int]]:
        step = -(-self.k // ROW_BLOCKS)
        return [(start, min(start + step, self.k)) for start in range(0, self.k, step)]
