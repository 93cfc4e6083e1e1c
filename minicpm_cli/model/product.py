"""A linear layer with what stands around it: computed inside the product where it can be, else step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicpm_cli.kernels.ops import Ops
from quant.layers.around import Gate, Norm
from quant.linear import Linear


def product(
    layer: Linear,
    x: Tensor,  # [T, K]
    ops: Ops,
    *,
    norm: Norm | None = None,
    gate: Gate | None = None,
    onto: Tensor | None = None,  # [T, N]
    alpha: float = 1.0,
    inplace: bool = False,
) -> Tensor:  # [T, N]
    """onto + alpha * gate(layer(norm(x))); with `inplace`, `onto` may be overwritten by it.

    A layer may have `fused(x, norm, gate, onto, alpha)` for up to `fused_rows` rows, and `added(x, onto, alpha,
    inplace)` for any number of them.
    """
    fusing: Any = layer
    if len(x) <= getattr(layer, "fused_rows", 0):
        return fusing.fused(x, norm, gate, onto, alpha)  # type: ignore[no-any-return]
    if norm is not None:
        x = ops.rms_norm(x, norm.weight, norm.eps)
    if onto is not None and gate is None and hasattr(layer, "added"):
        return fusing.added(x, onto, alpha, inplace)  # type: ignore[no-any-return]
    y = layer(x)
    if gate is not None:
        y = gated(y, gate, ops)
    return y if onto is None else torch.add(onto, y, alpha=alpha)


def gated(gate_up: Tensor, gate: Gate, ops: Ops) -> Tensor:  # [T, 2I] -> [T, I]
    return ops.silu_mul(gate_up) if gate.kind == "silu" else ops.relu_mul(gate_up, gate.threshold)
