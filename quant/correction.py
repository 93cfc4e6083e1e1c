"""Weights that make up for the layers before them: what reaches a layer is not what reached it before quantization.

Asymmetric calibration: a layer is solved for the output that it had behind the full-precision layers, a part of the
way (Arai and Ichikawa, "Quantization Error Propagation", arXiv 2504.09629; Li et al., "GPTAQ", arXiv 2504.02692).
Layers that add to the residual stream make up for what the stream has lost on its way, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant.errors import NotFinite
from quant.gptq import mean_diagonal
from quant.hessian import Hessian


class Shift:
    """How the inputs x of layers differ from those of full precision, x', over the calibration tokens, in float32."""

    def __init__(self, k: int, device: torch.device) -> None:
        self.tokens = 0
        self._sum = torch.zeros(k, k, device=device)

    def add(self, x: Tensor, full: Tensor) -> None:  # [T, K] each
        """Counts T tokens in."""
        x = x.reshape(-1, self._sum.shape[1]).to(self._sum)
        self._sum.addmm_((full.reshape(x.shape).to(x) - x).T, x)
        self.tokens += len(x)

    @property
    def matrix(self) -> Tensor:  # [K, K]
        """The mean of (x' - x) x^T."""
        return self._sum / max(self.tokens, 1)

    def missing(self, w: Tensor, h: Tensor) -> Tensor:  # [N, K], [K, K] -> [N, K]
        """The mean of (W x' - W x) x^T."""
        return w @ self.matrix


class Wanted:
    """What a layer should put out, y, at its inputs x: less than a `Shift` where one layer narrows its input, and y may
    hold what others have lost."""

    def __init__(self, n: int, k: int, device: torch.device) -> None:
        self.tokens = 0
        self._sum = torch.zeros(n, k, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:  # [T, K], [T, N]
        """Counts T tokens in."""
        n, k = self._sum.shape
        self._sum.addmm_(y.reshape(-1, n).to(self._sum).T, x.reshape(-1, k).to(self._sum))
        self.tokens += x.numel() // k

    @property
    def matrix(self) -> Tensor:  # [N, K]
        """The mean of y x^T."""
        return self._sum / max(self.tokens, 1)

    def missing(self, w: Tensor, h: Tensor) -> Tensor:  # [N, K], [K, K] -> [N, K]
        """The mean of (y - W x) x^T; 0 before the first token."""
        return self.matrix - w @ h


def corrected(
    w: Tensor,  # [N, K]
    hessian: Hessian,
    aim: Shift | Wanted,
    *,
    strength: float = 0.5,  # share of the correction; all of it fits the calibration text too closely
    damp: float = 0.1,  # share of the mean diagonal that is added to it
) -> Tensor:  # [N, K] float32
    """W + strength * M (H + damping)^-1, where M is what `aim` says is missing from the layer's output.

    At strength 1 without damping, its output is the nearest to the one aimed at. Raises NotFinite.
    """
    h, plain = hessian.matrix, w.to(hessian.device, torch.float32)
    missing = aim.missing(plain, h)
    if bool(plain.isfinite().all()) and not bool(missing.isfinite().all()):
        raise NotFinite("The layer's inputs hold NaN or infinity: calibrate in float32, or check the checkpoint.")
    h.diagonal().add_(damp * mean_diagonal(h))
    lower, failed = torch.linalg.cholesky_ex(h)
    if failed:  # such statistics are refused or not used by the solver either
        return plain
    return plain + strength * torch.cholesky_solve(missing.T, lower).T
