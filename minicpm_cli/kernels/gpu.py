"""The operations as Triton kernels: the forms of minicpm_cli.kernels.reference on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minicpm_cli.kernels import begin, gate, norm, rope_store
from minicpm_cli.kernels.attention_decode import DecodeAttention
from minicpm_cli.kernels.attention_prefill import prefill
from minicpm_cli.kernels.batch import ForwardBatch, consecutive, is_fresh
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.launch import early
from minicpm_cli.kernels.ops import Ops

# Up to here one launch that rotates, stores and attends wins, by about 1 us a layer (H200, 36 heads of 64).
# Codes are stored by a launch of their own: choosing their scales would hold up the attention (7.6 us against 5).
FUSED_ROWS = 64
FEW_HEADS = 4  # of one key: with more, a single token fills a tile of a prompt's


def kernels(device: torch.device, folder: Path | None) -> Ops:
    """`folder` keeps what is compiled at run time."""
    attention = Attention(device, folder)
    return Ops(
        embed=begin.embed,
        angles=begin.angles,
        rms_norm=norm.rms_norm,
        rope_=rope_store.rope_,
        rope_store=rope_store.rope_store,
        store=rope_store.store,
        silu_mul=gate.silu_mul,
        relu_mul=gate.relu_mul,
        attend=attention.attend,
        rope_attend=attention.rope_attend,
    )


class Attention:
    """One new token a sequence: split along the histories. Longer runs: in tiles of new tokens.

    In a step of both, 222 tokens with histories of 512 to 768 and 7,970 tokens of prompts took 1.3 ms a layer as tiles
    (H200, 36 heads of 64, 8-bit cache).
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self.decode = DecodeAttention(device, early(torch.empty(0, device=device)), folder)

    def attend(
        self,
        q: Tensor,
        cache: LayerCache,
        batch: ForwardBatch,
        scale: float,
        rows: tuple[Tensor, Tensor] | None = None,  # [T, Hkv, Dk], [T, Hkv, Dv]
    ) -> Tensor:
        """`rows` are the step's keys and values, as the cache has them: where runs have no others, they may be read."""
        if batch.max_q == 1:
            sequences = batch.drafts.sequences if batch.drafts else None
            return self.decode(q, cache, batch.page_table, batch.kv_len, scale, batch.page_size, sequences=sequences)
        parts, first = _parts(batch, q.shape[1], cache), 0
        out = q.new_empty(len(q), q.shape[1], cache.v.shape[3])
        for part in parts:
            those = slice(first, first + len(part.ids))
            first = those.stop
            if part.max_q == 1:
                tables = part.page_table, part.kv_len
                self.decode(q[those], cache, *tables, scale, part.page_size, out=out[those])
                continue
            fresh = (rows[0][those], rows[1][those]) if rows and _reads_rows(part, cache) else None
            prefill(q[those], cache, part, scale, out=out[those], fresh=fresh)
        return out

    def rope_attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, cache: LayerCache, batch: ForwardBatch, scale: float
    ) -> Tensor:
        if batch.max_q == 1 and len(qkv) <= FUSED_ROWS and cache.scales is None and _power_of_two(qkv.shape[2]):
            fused, turn, size, sequences = self.decode.rope_store_decode, (cos, sin), batch.page_size, None
            if batch.drafts:  # all rows are stored before one attends, and exactly as that launch does it
                fused(qkv, turn, cache, batch.drafts.page, batch.drafts.filled, scale, size)
                sequences = batch.drafts.sequences
            return fused(qkv, turn, cache, batch.page_table, batch.kv_len, scale, size, sequences=sequences)
        keys = cache.k.shape[2]
        q, k, v = qkv.split((heads, keys, keys), 1)
        fresh = batch.max_q > 1 and any(_reads_rows(part, cache) for part in _parts(batch, heads, cache))
        rope_store.rope_store(qkv, cos, sin, heads, cache, batch.slots, back=fresh)
        return self.attend(q, cache, batch, scale, (k, v) if fresh else None)


def _parts(batch: ForwardBatch, heads: int, cache: LayerCache) -> tuple[ForwardBatch, ...]:
    """What is attended to apart. Many heads that share a key fill a tile by themselves, so that tiles take it all."""
    return batch.parts if batch.parts and heads <= FEW_HEADS * cache.k.shape[2] else (batch,)


def _reads_rows(batch: ForwardBatch, cache: LayerCache) -> bool:
    """Whether attention reads keys and values from the step's own rows: of codes, or of pages here and there.

    For 16 prompts of 512 tokens with an 8-bit cache that is 101 us and not 201 (H200, 36 heads of 64).
    """
    return is_fresh(batch.q_lens, batch.kv_lens) and (cache.scales is not None or not consecutive(batch.runs))


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
