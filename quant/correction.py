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
    """How the inputs x of a layer differ from those of full precision, x', over the calibration tokens, in float32."""

    def __init__(self, k: int, device: torch.device, rows: int = 0) -> None:  # rows of the layer; 0: no residual stream
        self.tokens = 0
        self._inputs = torch.zeros(k, k, device=device)
        self._residual = torch.zeros(rows, k, device=device)

    def add(
        self,
        x: Tensor,  # [T, K]
        full: Tensor,  # [T, K]
        residual: Tensor | None = None,  # [T, N]: what the layer's output should make up for
    ) -> None:
        """Counts T tokens in."""
        k = self._inputs.shape[0]
        x = x.reshape(-1, k).to(self._inputs)
        moved = full.reshape(-1, k).to(x) - x  # not two products: their difference would be of rounding errors
        self._inputs.addmm_(moved.T, x)
        if residual is not None:
            self._residual.addmm_(residual.reshape(len(x), -1).to(x).T, x)
        self.tokens += len(x)

    @property
    def rows(self) -> int:
        """Of the residual stream; 0 without one."""
        return self._residual.shape[0]

    @property
    def inputs(self) -> Tensor:  # [K, K]
        """The mean of (x' - x) x^T."""
        return self._inputs / max(self.tokens, 1)

    @property
    def residual(self) -> Tensor | None:  # [N, K]
        """The mean of (h' - h) x^T; None without a residual stream."""
        return self._residual / max(self.tokens, 1) if self.rows else None


def corrected(
    w: Tensor,  # [N, K]
    hessian: Hessian,
    shift: Shift,
    *,
    strength: float = 0.5,  # share of the correction; all of it fits the calibration text too closely
    damp: float = 0.1,  # share of the mean diagonal that is added to it
) -> Tensor:  # [N, K] float32
    """W + strength * (W (C - H) + R) (H + damping)^-1, with C - H and R as `shift` holds them.

    At strength 1 without damping, its output on x is the nearest to W x' + (h' - h). Raises NotFinite.
    """
    h, plain = hessian.matrix, w.to(hessian.device, torch.float32)
    wanted = plain @ shift.inputs
    if shift.residual is not None:
        wanted += shift.residual
    if bool(plain.isfinite().all()) and not bool(wanted.isfinite().all()):
        raise NotFinite("The layer's inputs hold NaN or infinity: calibrate in float32, or check the checkpoint.")
    h.diagonal().add_(damp * mean_diagonal(h))
    lower, failed = torch.linalg.cholesky_ex(h)
    if failed:  # such statistics are refused or not used by the solver either
        return plain
    return plain + strength * torch.cholesky_solve(wanted.T, lower).T
