"""One decoder for the whole family; what differs between the models is in their ModelConfig."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from minicpm_cli.errors import WeightsError
from minicpm_cli.kernels import reference
from minicpm_cli.kernels.batch import ForwardBatch
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.ops import Ops
from minicpm_cli.model.attention import GroupedAttention, LatentAttention
from minicpm_cli.model.config import ModelConfig
from minicpm_cli.model.kv import KVCache
from minicpm_cli.model.mlp import GatedMLP, make_mlp
from minicpm_cli.model.rope import Rotary
from minicpm_cli.model.shapes import EMBED, HEAD
from minicpm_cli.model.weights import Weights
from quant.embedding import Embedding
from quant.layers.around import Norm
from quant.linear import Linear
from quant.pack import Packed

SAMPLED_ROWS = 1024  # of a vocabulary: enough to tell a rounded copy from another matrix


class Block:
    """Two pre-normed branches on the residual stream, each scaled by muP's residual factor."""

    def __init__(self, cfg: ModelConfig, weights: Weights, prefix: str, ops: Ops) -> None:
        self.residual_scale = cfg.residual_scale
        self.attention_norm = Norm(weights.vector(f"{prefix}.input_layernorm.weight", cfg.hidden_size), cfg.eps)
        kind = LatentAttention if cfg.mla else GroupedAttention
        self.attention = kind(cfg, weights, f"{prefix}.self_attn", ops)
        self.mlp_norm = Norm(weights.vector(f"{prefix}.post_attention_layernorm.weight", cfg.hidden_size), cfg.eps)
        self.mlp = make_mlp(cfg, weights, f"{prefix}.mlp", ops)

    def __call__(
        self,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        wanted: Tensor | None = None,
    ) -> Tensor:  # [T, H], or [S, H] of the rows `wanted`
        """h may be overwritten."""
        h = self.attend(h, cos, sin, batch, cache, inplace=True, wanted=wanted)
        return self.feed_forward(h, inplace=True) if len(h) else h

    def attend(
        self,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        inplace: bool = False,
        wanted: Tensor | None = None,
    ) -> Tensor:  # [T, H] or [S, H]
        return self.attention(h, self.attention_norm, self.residual_scale, cos, sin, batch, cache, inplace, wanted)

    def feed_forward(self, h: Tensor, inplace: bool = False) -> Tensor:  # [T, H]
        return self.mlp.onto(h, self.mlp_norm, self.residual_scale, inplace)


class Decoder:
    """The model on its device. `forward` is a pure function of its arguments but for the cache it writes."""

    def __init__(
        self,
        cfg: ModelConfig,
        weights: Weights,
        ops: Ops,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.cfg, self.device, self.dtype, self.ops = cfg, weights.device, weights.dtype, ops
        self.kernels = weights.kernels
        self.embed, self.head = _embed_and_head(cfg, weights)
        blocks = []
        for layer in range(cfg.layers):
            blocks.append(Block(cfg, weights, f"model.layers.{layer}", ops))
            if on_progress:
                on_progress(layer + 1, cfg.layers)
        self.blocks = tuple(blocks)
        self.norm = Norm(weights.vector("model.norm.weight", cfg.hidden_size), cfg.eps)
        self.rotary = Rotary(cfg.rope, cfg.context, weights.device, ops.angles)
        self.weight_bytes = weights.nbytes
        # The reference attention walks the lengths that only the host knows.
        self.capturable = weights.capturable and ops.attend is not reference.attend

    @property
    def alike_rows(self) -> int | None:
        """Steps of up to so many rows compute the same for each, to the bit, whatever is beside it.

        On a GPU the kernel for few rows does, and decode attention; experts and MLA's inner products do not. None: on a
        CPU that is up to torch, whose products of few rows agree for some shapes.
        """
        if self.device.type == "cpu":
            return None
        if self.ops.attend is reference.attend or not all(isinstance(b.mlp, GatedMLP) for b in self.blocks):
            return 1
        return max(1, min(getattr(layer, "fused_rows", 0) for layer in self._layers()))

    def _layers(self) -> Iterator[Any]:
        """Every product of a step, None for one that is no layer."""
        yield self.head
        for block in self.blocks:
            for branch, names in ((block.attention, ("qkv", "out")), (block.mlp, ("gate_up", "down"))):
                yield from (getattr(branch, name, None) for name in names)

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:  # [S, V]
        """`scores` of the rows `batch.last`; the keys and values of all rows are written to `kv`."""
        decoding = len(batch.last) == len(batch.ids)
        return self.scores(self.hidden(batch, kv, None if decoding else batch.last))

    def hidden(self, batch: ForwardBatch, kv: KVCache, wanted: Tensor | None = None) -> Tensor:  # [T, H] or [S, H]
        """The residual stream after the last block, of the rows `wanted`. Of others that block only stores the keys."""
        h = self._embedded(batch.ids)
        cos, sin = self.rotary(batch.positions)
        for block, cache in zip(self.blocks, kv.layers, strict=True):
            h = block(h, cos, sin, batch, cache, wanted if block is self.blocks[-1] else None)
        return h

    def _embedded(self, ids: Tensor) -> Tensor:  # [T] -> [T, H]
        table, scale = self.embed.table, self.cfg.embed_scale
        if isinstance(table, Tensor):
            return self.ops.embed(ids, table, scale)
        rows = self.embed(ids)
        return rows if scale == 1.0 else rows * scale

    def logits(self, h: Tensor) -> Tensor:  # [S, H] -> [S, V] float32
        return self.scores(h).float()

    def scores(self, h: Tensor) -> Tensor:  # [S, H] -> [S, V]
        """The logits as the head's product leaves them: in float32, or rounded to the model's type."""
        if not len(h):
            return torch.empty(0, self.cfg.vocab, device=h.device)
        if len(h) <= getattr(self.head, "fused_rows", 0):
            fusing: Any = self.head
            return fusing.fused(h, self.norm, alpha=1 / self.cfg.logit_divisor, float32_out=True)  # type: ignore[no-any-return]
        h = self.ops.rms_norm(h, self.norm.weight, self.norm.eps)
        if self.cfg.logit_divisor != 1.0:
            h = h / self.cfg.logit_divisor
        return self.head(h)


def _embed_and_head(cfg: ModelConfig, weights: Weights) -> tuple[Embedding, Linear]:
    """Ties the head to the embedding where config and files agree on it."""
    shape, source = (cfg.vocab, cfg.hidden_size), weights.source
    embed = weights.embedding(source.take(EMBED, shape))
    if HEAD not in source:
        if not cfg.tie:
            why = "tie_word_embeddings false" if cfg.tie_explicit else f"{cfg.architecture} without tie_word_embeddings"
            raise WeightsError(
                f"{HEAD} is missing and by config.json it is not tied to the embedding ({why}): "
                "the files are incomplete, fetch them again"
            )
        return embed, weights.head(embed.table, shared=True)
    own = source.take(HEAD, shape)
    if cfg.tie and _same(embed, own):
        return embed, weights.head(embed.table, shared=True)
    if cfg.tie and cfg.tie_explicit and not _rounded_copy(embed, own, weights.device):
        raise WeightsError(
            f"config.json says that {HEAD} is tied to {EMBED} (tie_word_embeddings true), but the files hold both and "
            "they differ: correct config.json or remove the wrong tensor"
        )
    return embed, weights.head(own, shared=False)


def _same(embed: Embedding, head: Tensor | Packed) -> bool:
    if isinstance(embed.table, Tensor) and not isinstance(head, Tensor):
        return False
    mine, theirs = (t if isinstance(t, Tensor) else t.dequantize() for t in (embed.table, head))
    return torch.equal(mine, theirs.to(mine.device, mine.dtype))


def _rounded_copy(embed: Embedding, head: Tensor | Packed, device: torch.device) -> bool:
    """Whether a packed head holds the embedding's values: quantizers that untie the two may not say so."""
    if isinstance(head, Tensor):
        return False
    rows = torch.arange(0, head.shape[0], max(1, head.shape[0] // SAMPLED_ROWS))
    mine, theirs = embed(rows.to(device)).float().cpu(), head.dequantize()[rows].float().cpu()
    return bool((mine - theirs).norm() <= 0.25 * mine.norm())  # 4 bits are 0.1 away, another matrix more than 1
