"""Plain-torch forms of every operation: the oracle of the kernels' tests, and what runs where there is no kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from minicpm_cli.kernels.batch import ForwardBatch, leading_singles
from minicpm_cli.kernels.cache import LayerCache, encode

# So few new tokens of a sequence attend one by one, as in decode steps: the rows that verify expected tokens then give
# what steps of one row give, bit by bit. For demo, 5 rows after 512 tokens take 21 ms instead of 17, 8 rows 26 for 18.
ALIKE = 16


def embed(ids: Tensor, table: Tensor, scale: float) -> Tensor:  # [T] int64, [V, H] -> [T, H]
    rows = functional.embedding(ids, table)
    return rows if scale == 1.0 else rows * scale


def angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R/2] of positions [T] times frequencies [R/2] in float32, times `factor`."""
    turned = (positions[:, None].float() * frequencies)[:, None]
    cos, sin = turned.cos(), turned.sin()
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [T, H]
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4), the mean in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [T, H, D], [T, 1, R/2] float32
    """Rotates the last R elements of every head in place, element i with i + R/2, in float32."""
    half = cos.shape[-1]
    first, second = x[..., -2 * half : -half], x[..., -half:]
    a, b = first.float(), second.float()
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])


def silu_mul(gate_up: Tensor) -> Tensor:  # [T, 2I] -> [T, I]
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


def relu_mul(gate_up: Tensor, threshold: float) -> Tensor:  # [T, 2I] -> [T, I]
    """fatrelu (ProSparse, section 3.3): the gate where it is at least `threshold`, else 0; 0 makes it plain relu."""
    gate, up = gate_up.chunk(2, -1)
    return torch.where(gate >= threshold, gate, 0) * up


def rope_store(
    qkv: Tensor,  # [T, Hq + 2 Hkv, D]
    cos: Tensor,  # [T, 1, R/2] float32
    sin: Tensor,
    heads: int,  # Hq
    cache: LayerCache,
    slots: Tensor,  # [T] int64
) -> None:
    """Rotates queries in place, and puts rotated keys and values into the cache. Keys in qkv are undefined after it."""
    rope_(qkv[:, : heads + cache.k.shape[2]], cos, sin)
    store(qkv[:, heads:], cache, slots)


def store(rows: Tensor, cache: LayerCache, slots: Tensor) -> None:  # [T, C, D], [T] int64
    """The tokens' rows of heads, as the cache keeps them."""
    if cache.scales is None:
        cache.rows.index_copy_(0, slots, rows.to(cache.rows.dtype))
        return
    codes, scales = encode(rows, cache.rows.dtype)
    cache.rows.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    cache.scales[slots // cache.k.shape[1], slots % cache.k.shape[1]] = scales


def attend(
    q: Tensor,  # [T, Hq, Dk]
    cache: LayerCache,
    batch: ForwardBatch,
    scale: float,
) -> Tensor:  # [T, Hq, Dv]
    """Causal attention of each sequence's new tokens over its pages: softmax(q k^T * scale) v."""
    singles = leading_singles(batch.q_lens)
    if singles == len(batch.q_lens):
        return _decode(q, cache, batch, scale, singles)
    parts = [_decode(q[:singles], cache, batch, scale, singles)] if singles else []
    row = singles
    for sequence in range(singles, len(batch.q_lens)):
        rows = q[row : row + batch.q_lens[sequence]]
        parts.append(_prefill(rows, cache, batch, scale, sequence))
        row += len(rows)
    return torch.cat(parts)


def rope_attend(
    qkv: Tensor,  # [T, Hq + 2 Hkv, D]
    cos: Tensor,  # [T, 1, R/2] float32
    sin: Tensor,
    heads: int,  # Hq
    cache: LayerCache,
    batch: ForwardBatch,
    scale: float,
) -> Tensor:  # [T, Hq, D]
    """Rotates, stores and attends. What qkv holds afterwards is not said."""
    rope_store(qkv, cos, sin, heads, cache, batch.slots)
    return attend(qkv[:, :heads], cache, batch, scale)


def _decode(q: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, count: int) -> Tensor:
    """One new token a sequence. The query heads that share a key head are rows of one product."""
    longest = max(batch.kv_lens[:count])
    keys, values = _keys_and_values(cache, batch, 0, count, longest, q.dtype)
    mask = None
    if min(batch.kv_lens[:count]) < longest:
        columns = torch.arange(longest, device=q.device)
        mask = (columns < batch.kv_len[:count, None])[:, None, None]
    return _single(q, keys, values, scale, mask)


def _single(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """[B, Hq, Dk] over [B, Hkv, L, Dk] and [B, Hkv, L, Dv]."""
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[2])  # [B, Hkv, G, Dk]
    out = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
    return out.reshape(len(q), q.shape[1], values.shape[3])


def _keys_and_values(
    cache: LayerCache, batch: ForwardBatch, first: int, count: int, length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # [B, Hkv, L, Dk], [B, Hkv, L, Dv]
    keys, values = (_history(t, batch, first, count, length) for t in (cache.k, cache.v))
    if cache.k_scale is None or cache.v_scale is None:
        return keys, values
    scales = (_history(t.unsqueeze(-1), batch, first, count, length) for t in (cache.k_scale, cache.v_scale))
    k, v = ((codes.float() * scale).to(dtype) for codes, scale in zip((keys, values), scales, strict=True))
    return k, v


def _history(paged: Tensor, batch: ForwardBatch, first: int, count: int, length: int) -> Tensor:  # [B, Hkv, L, D]
    """The cached rows of `count` sequences from `first` on: a view where one sequence's pages are consecutive."""
    if count == 1 and batch.runs and batch.runs[first] >= 0:
        pages = paged[batch.runs[first] :][: -(-length // batch.page_size)]
        return pages.flatten(0, 1)[:length].transpose(0, 1)[None]
    pages = batch.page_table[first : first + count, : -(-length // batch.page_size)]
    plain = paged.view(torch.uint8) if paged.dtype == torch.float8_e4m3fn else paged
    rows = plain.index_select(0, pages.reshape(-1)).view(paged.dtype).view(count, -1, *paged.shape[2:])
    return rows[:, :length].transpose(1, 2)


def _prefill(q: Tensor, cache: LayerCache, batch: ForwardBatch, scale: float, sequence: int) -> Tensor:
    """Several new tokens of one sequence, after the ones that its pages already hold."""
    new, length = len(q), batch.kv_lens[sequence]
    keys, values = _keys_and_values(cache, batch, sequence, 1, length, q.dtype)
    if new <= ALIKE:
        lengths = range(length - new + 1, length + 1)
        return torch.cat(
            [_single(q[i : i + 1], keys[:, :, :n], values[:, :, :n], scale) for i, n in enumerate(lengths)]
        )
    mask = None
    if new < length:
        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
