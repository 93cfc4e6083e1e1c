"""The feed-forward halves of a block: gated, dense or a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from minicpm_cli.kernels.ops import Ops
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.product import product
from minicpm_cli.model.weights import Weights
from quant.layers.around import Gate, Norm
from quant.layers.experts import Experts, join_experts


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, cfg: ModelConfig, weights: Weights, names: tuple[str, str, str], ops: Ops) -> None:
        gate, up, down = names
        h, i = cfg.hidden_size, cfg.intermediate
        self.gate_up = weights.linear((gate, i, h), (up, i, h))
        self.down = weights.linear((down, h, i))
        self.gate, self.ops = _gate(cfg), ops

    def __call__(self, x: Tensor) -> Tensor:  # [T, H]
        return product(self.down, product(self.gate_up, x, self.ops, gate=self.gate), self.ops)

    def onto(self, h: Tensor, norm: Norm, alpha: float, inplace: bool = False) -> Tensor:  # [T, H]
        """h + alpha * mlp(norm(h)); with `inplace`, h may be overwritten by it."""
        x = product(self.gate_up, h, self.ops, norm=norm, gate=self.gate)
        return product(self.down, x, self.ops, onto=h, alpha=alpha, inplace=inplace)


class MixtureOfExperts:
    """The top experts of a softmax router, their weights renormalised to 1 (Mixtral, section 2.1)."""

    def __init__(self, cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        assert cfg.moe is not None
        self.active, self.ops = cfg.moe.active, ops
        self.router = weights.linear((f"{prefix}.gate.weight", cfg.moe.experts, cfg.hidden_size))
        self.experts = tuple(
            GatedMLP(cfg, weights, _expert_names(f"{prefix}.experts.{e}"), ops) for e in range(cfg.moe.experts)
        )
        self.joined = self._join(_gate(cfg)) if weights.device.type == "cuda" else None
        weights.capturable &= self.joined is not None  # else the host hears which experts were chosen

    def _join(self, gate: Gate) -> Experts | None:
        """One product for all experts where there is a kernel; each expert then is a part of it."""
        found = join_experts([e.gate_up for e in self.experts], [e.down for e in self.experts], self.active, gate)
        if found is None:
            return None
        joined, gate_ups, downs = found
        for expert, gate_up, down in zip(self.experts, gate_ups, downs, strict=True):
            expert.gate_up, expert.down = gate_up, down
        return joined

    def __call__(self, x: Tensor) -> Tensor:  # [T, H]
        if self.joined is not None:
            return self.joined(x, self.router(x))
        chosen, shares = self.route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            out.index_add_(0, rows, self.experts[expert](x[rows]) * shares[rows, places, None])
        return out

    def onto(self, h: Tensor, norm: Norm, alpha: float, inplace: bool = False) -> Tensor:  # [T, H]
        """h + alpha * mixture(norm(h))."""
        return torch.add(h, self(self.ops.rms_norm(h, norm.weight, norm.eps)), alpha=alpha)

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


def _gate(cfg: ModelConfig) -> Gate:
    return Gate("silu") if cfg.activation == "silu" else Gate("relu", cfg.activation_threshold)
