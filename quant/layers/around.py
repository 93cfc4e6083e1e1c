"""What stands around a product and may be computed inside it: a norm before, a gate, a residual sum after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of the inputs: x / sqrt(mean(x^2) + eps) * weight, the mean in float32."""

    weight: Tensor  # [K]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:  # [T, K]
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Gate:
    """act(gate) * up over the two halves of the outputs; relu keeps a gate of at least `threshold`, else 0."""

    kind: Literal["silu", "relu"]
    threshold: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:  # [T, 2N] -> [T, N]
        gate, up = gate_up.chunk(2, -1)
        if self.kind == "silu":
            return functional.silu(gate) * up
        return torch.where(gate >= self.threshold, gate, 0) * up


def around(
    product: Callable[[Tensor], Tensor],
    x: Tensor,  # [T, K]
    norm: Norm | None = None,
    gate: Gate | None = None,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
) -> Tensor:  # [T, N]
    """onto + alpha * gate(product(norm(x))), one step after the other: what a fused product is compared with."""
    y = product(norm(x) if norm else x)
    y = gate(y) if gate else y
    if onto is None:
        return y if alpha == 1.0 else y * alpha
    return torch.add(onto, y, alpha=alpha)
