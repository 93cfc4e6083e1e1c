"""The family's two kinds of attention over the paged cache: grouped-query and latent (MLA, run absorbed)."""

from __future__ import annotations

import torch
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.ops import Ops
from minicpm_cli.model.config import MLAConfig, ModelConfig
from minicpm_cli.model.product import product
from minicpm_cli.model.weights import Weights
from quant.layers.around import Norm
from quant.linear import Linear


class GroupedAttention:
    """Query heads share key/value heads in groups (GQA; multi-head attention is a group of one)."""

    def __init__(self, cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        h, d = cfg.hidden_size, cfg.head_dim
        self.heads, self.head_dim = cfg.heads, d
        self.scale, self.ops = cfg.attention_scale, ops
        self.qkv = weights.linear(
            (f"{prefix}.q_proj.weight", cfg.heads * d, h),
            (f"{prefix}.k_proj.weight", cfg.kv_heads * d, h),
            (f"{prefix}.v_proj.weight", cfg.kv_heads * d, h),
        )
        self.out = weights.linear((f"{prefix}.o_proj.weight", h, cfg.heads * d))

    def __call__(
        self,
        h: Tensor,
        norm: Norm,
        alpha: float,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        inplace: bool = False,
        wanted: Tensor | None = None,
    ) -> Tensor:  # [T, H], or [S, H] of the rows `wanted`
        """h + alpha * attention(norm(h)); with `inplace`, h may be overwritten by it."""
        rows, ops = len(h), self.ops
        qkv = product(self.qkv, h, ops, norm=norm).view(rows, -1, self.head_dim)
        y = ops.rope_attend(qkv, cos, sin, self.heads, cache, batch, self.scale)
        return _onto(h, self.out, y.reshape(rows, -1), ops, alpha, inplace, wanted)


class LatentAttention:
    """MLA with both halves of kv_b absorbed (DeepSeek-V2, section 2.1.2): attention runs over the cached latent itself.

    q_nope · (W_k c) = (W_k^T q_nope) · c, and softmax · (W_v c) = W_v (softmax · c), so that one key head of
    kv_rank + rope_dim elements serves all query heads and its first kv_rank elements are the value.
    """

    def __init__(self, cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        assert cfg.mla is not None
        mla, h = cfg.mla, cfg.hidden_size
        self.mla, self.heads, self.eps = mla, cfg.heads, cfg.eps
        self.scale, self.ops = cfg.attention_scale, ops
        self.down = weights.linear(
            (f"{prefix}.q_a_proj.weight", mla.q_rank, h),
            (f"{prefix}.kv_a_proj_with_mqa.weight", mla.latent, h),
        )
        self.q_norm = Norm(weights.vector(f"{prefix}.q_a_layernorm.weight", mla.q_rank), cfg.eps)
        self.kv_norm = weights.vector(f"{prefix}.kv_a_layernorm.weight", mla.kv_rank)
        self.q_up = weights.linear((f"{prefix}.q_b_proj.weight", cfg.heads * (mla.nope_dim + mla.rope_dim), mla.q_rank))
        self.key_up, self.value_up = _split_kv_b(cfg, mla, weights, f"{prefix}.kv_b_proj.weight")
        self.out = weights.linear((f"{prefix}.o_proj.weight", h, cfg.heads * mla.v_dim))

    def __call__(
        self,
        h: Tensor,
        norm: Norm,
        alpha: float,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        inplace: bool = False,
        wanted: Tensor | None = None,
    ) -> Tensor:  # [T, H], or [S, H] of the rows `wanted`
        """h + alpha * attention(norm(h)); with `inplace`, h may be overwritten by it."""
        low = product(self.down, h, self.ops, norm=norm)
        low_q, low_kv = torch.split(low, [self.mla.q_rank, self.mla.latent], -1)
        q = self._queries(low_q, cos, sin)
        latent = self._latent(low_kv, cos, sin)
        self.ops.store(latent, cache, batch.slots)
        mixed = self.ops.attend(q, cache, batch, self.scale)  # [T, heads, kv_rank]
        y = torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1)
        return _onto(h, self.out, y.reshape(len(h), -1), self.ops, alpha, inplace, wanted)

    def _queries(self, low: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [T, heads, kv_rank + rope_dim]
        q = product(self.q_up, low, self.ops, norm=self.q_norm).view(len(low), self.heads, -1)
        self.ops.rope_(q, cos, sin)
        nope, rope = torch.split(q, [self.mla.nope_dim, self.mla.rope_dim], -1)
        absorbed = torch.bmm(nope.transpose(0, 1), self.key_up).transpose(0, 1)
        return torch.cat((absorbed, rope), -1)

    def _latent(self, low: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [T, 1, kv_rank + rope_dim]
        compressed = self.ops.rms_norm(low[:, : self.mla.kv_rank], self.kv_norm, self.eps)
        latent = torch.cat((compressed, low[:, self.mla.kv_rank :]), -1)[:, None]
        self.ops.rope_(latent, cos, sin)
        return latent


def _onto(
    h: Tensor, out: Linear, y: Tensor, ops: Ops, alpha: float, inplace: bool, wanted: Tensor | None
) -> Tensor:  # [T, H], [T, N] -> [T, H] or [S, H]
    if wanted is not None:
        h, y = h[wanted], y[wanted]
    return product(out, y, ops, onto=h, alpha=alpha, inplace=inplace) if len(h) else h


def _split_kv_b(cfg: ModelConfig, mla: MLAConfig, weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    """kv_b as [heads, nope_dim, kv_rank] for the keys and [heads, kv_rank, v_dim] for the values."""
    stacked = weights.matrix(name, cfg.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
    keys, values = torch.split(stacked.view(cfg.heads, -1, mla.kv_rank), [mla.nope_dim, mla.v_dim], 1)
    return keys.contiguous(), values.transpose(1, 2).contiguous()
