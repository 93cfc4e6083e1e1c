"""The feed-forward halves of a block: gated, dense or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from minicpm_cli.kernels.ops import Ops
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.weights import Weights


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, cfg: ModelConfig, weights: Weights, names: tuple[str, str, str], ops: Ops) -> None:
        gate, up, down = names
        h, i = cfg.hidden_size, cfg.intermediate
        self.gate_up = weights.linear((gate, i, h), (up, i, h))
        self.down = weights.linear((down, h, i))
        self.activate = _activation(cfg, ops)

    def __call__(self, x: Tensor) -> Tensor:  # [T, H]
        return self.down(self.activate(self.gate_up(x)))


class MixtureOfExperts:
    """The top experts of a softmax router, their weights renormalised to 1 (Mixtral, section 2.1)."""

    def __init__(self, cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        assert cfg.moe is not None
        self.active = cfg.moe.active
        self.router = weights.linear((f"{prefix}.gate.weight", cfg.moe.experts, cfg.hidden_size))
        self.experts = tuple(
            GatedMLP(cfg, weights, _expert_names(f"{prefix}.experts.{e}"), ops) for e in range(cfg.moe.experts)
        )

    def __call__(self, x: Tensor) -> Tensor:  # [T, H]
        chosen, shares = self.route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            out.index_add_(0, rows, self.experts[expert](x[rows]) * shares[rows, places, None])
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [T, active] each
        """Expert numbers and their weights."""
        shares, chosen = functional.softmax(self.router(x).float(), -1).topk(self.active)
        return chosen, (shares / shares.sum(-1, keepdim=True)).to(x.dtype)


def make_mlp(cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> GatedMLP | MixtureOfExperts:
    if cfg.moe:
        return MixtureOfExperts(cfg, weights, prefix, ops)
    gate, up, down = (f"{prefix}.{n}_proj.weight" for n in ("gate", "up", "down"))
    return GatedMLP(cfg, weights, (gate, up, down), ops)


def _expert_names(prefix: str) -> tuple[str, str, str]:
    """gate, up and down under the names that the checkpoints use: w1, w3 and w2."""
    return f"{prefix}.w1.weight", f"{prefix}.w3.weight", f"{prefix}.w2.weight"


def _activation(cfg: ModelConfig, ops: Ops) -> Callable[[Tensor], Tensor]:
    if cfg.activation == "silu":
        return ops.silu_mul
    return lambda gate_up: ops.relu_mul(gate_up, cfg.activation_threshold)
