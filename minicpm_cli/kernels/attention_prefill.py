"""Causal attention of many sequences' new tokens over their pages, in one launch and without a host sync.

The query heads that share a key head are rows of one tile (row r of a sequence is token r // G, head r % G), so that a
few new tokens after a long prefix fill a tile, too. Blocks of keys below the diagonal take no mask. Where all pages
are consecutive no page is looked up; nor where all keys are of this very step, which are read where the product left
them.
"""

from __future__ import annotations

from functools import cache as cached
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicpm_cli.kernels.batch import ForwardBatch, consecutive
from minicpm_cli.kernels.cache import LayerCache
from minicpm_cli.kernels.launch import Remembered

LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Query rows and keys of a tile, its warps, and how many blocks of keys are under way."""

    rows: int
    keys: int
    warps: int
    stages: int


class Split(NamedTuple):
    """A key's elements in two parts, as tensor cores want powers of two: 96 is 64 + 32, MLA's 288 is 256 + 32.

    `wide` and `rest` are padded to `wide_pad` and `rest_pad`; the values have the same parts, or only the wide one.
    """

    wide: int
    wide_pad: int
    rest: int
    rest_pad: int


@cached
def split(dk: int, dv: int, quantized: bool) -> Split:
    """Values of 8 bits stay whole: narrow parts of int8 came out wrong, or out of bounds, with Triton 3.6 on Hopper."""
    if dv < dk:  # MLA: the value is the key's wide part
        return Split(dv, _padded(dv), dk - dv, _padded(dk - dv))
    wide = 1 << dk.bit_length() - 1
    if quantized or wide < 16 or wide + _padded(dk - wide) >= _padded(dk):
        return Split(dk, _padded(dk), 0, 0)
    return Split(wide, wide, dk - wide, _padded(dk - wide))


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


@cached
def tile_for(dk: int, itemsize: int, quantized: bool, run: bool) -> Tile:
    """The fastest of those tried on an H200; float32 was not timed.

    us for one sequence of 2048 tokens, 64 of 512, 2048 after 2048, pages in a row (anywhere): 36 heads of 64 60, 331,
    177 (74, 418, 229), over fp8 123, 607, 374 (133, 689, 397); 32 heads on 2 of 128 99, 535, 253 (119, 663, 301), over
    fp8 198, 957, 557; MLA's 40 heads 227, 1424, 563 anywhere.
    """
    if itemsize == 4:
        return Tile(32, 32, 4, 1) if dk > 128 else Tile(64, 32, 4, 2)
    if dk > 128:
        return Tile(64, 32, 4, 2) if quantized else Tile(64, 64, 4, 2)
    if dk > 64:
        return Tile(64, 64, 4, 2) if quantized or run else Tile(64, 64, 4, 3)
    if quantized:
        return Tile(128, 64, 4, 3)
    return Tile(64, 64, 4, 2) if run else Tile(128, 64, 8, 2)


def prefill(
    q: Tensor,  # [T, Hq, Dk]
    cache: LayerCache,
    batch: ForwardBatch,
    scale: float,
    tile: Tile | None = None,
    out: Tensor | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,  # [T, Hkv, Dk], [T, Hkv, Dv]
) -> Tensor:  # [T, Hq, Dv], `out` if it is given
    """softmax(q k^T * scale) v, each token over its sequence up to itself; the new tokens are in the cache already.

    `fresh` are the step's keys and values, of sequences that have no others.
    """
    (tokens, heads, dk), (kv_heads, dv) = q.shape, cache.v.shape[2:]
    group, sequences = heads // kv_heads, len(batch.kv_len)
    quantized, run = cache.scales is not None and fresh is None, fresh is not None or consecutive(batch.runs)
    k, v = fresh or (cache.k.flatten(0, 1), cache.v.flatten(0, 1))
    k_scale, v_scale = (cache.k_scale, cache.v_scale) if quantized else (None, None)
    tile = tile or tile_for(dk, q.element_size(), quantized, run)
    out = q.new_empty(tokens, heads, dv) if out is None else out
    # In one dimension: a long prompt of many query heads has more tiles than the 65,535 that the others hold.
    grid = (kv_heads * (tokens * group // tile.rows + sequences),)
    _prefill[grid](
        q, k, v, k_scale, v_scale, out, batch.q_start, batch.kv_len, batch.page_table,
        sequences, scale * LOG2E, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        k_scale.stride(0) if k_scale is not None else 0, out.stride(0), dv, batch.page_table.stride(0),
        PAGE=batch.page_size, KEY_HEADS=kv_heads, G=group, **split(dk, dv, quantized)._asdict(), SHARED=dv < dk,
        QUANTIZED=quantized,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", ROWS=tile.rows, KEYS=tile.keys,
        RUN=run, FRESH=fresh is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _sequence_of(tile, q_start, sequences, G: tl.constexpr, ROWS: tl.constexpr):
    """Sequence b has the tiles from q_start[b] * G // ROWS + b on, which is room enough for its last, ragged one."""
    count = 0
    for first in range(0, sequences, 64):
        b = first + tl.arange(0, 64)
        start = tl.load(q_start + b, mask=b < sequences, other=0)
        count += tl.sum(((start * G // ROWS + b <= tile) & (b < sequences)).to(tl.int32))
    b = count - 1  # the first tile of the first sequence is 0
    first = tl.load(q_start + b)
    return b, first, tl.load(q_start + b + 1) - first, tile - (first * G // ROWS + b)


@triton.jit
def _part(base, offsets, valid, width: tl.constexpr, pad: tl.constexpr, MASKED: tl.constexpr):
    """[rows, pad] elements; what lies beyond a row's width, or is not valid, is 0."""
    d = tl.arange(0, pad)
    if MASKED or width != pad:
        return tl.load(base + offsets[:, None] + d[None, :], mask=valid[:, None] & (d[None, :] < width), other=0.0)
    return tl.load(base + offsets[:, None] + d[None, :])


@triton.jit
def _blocks(
    acc, acc_rest, peak, total, q_wide, q_rest, positions, begin, end, length,
    k, v, k_scale, v_scale, table, run, scale, slot_stride, scale_stride,
    PAGE: tl.constexpr, wide: tl.constexpr, wide_pad: tl.constexpr, rest: tl.constexpr, rest_pad: tl.constexpr,
    SHARED: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One pass of online softmax (Milakov and Gimelshein 2018) over the keys begin:end."""
    for first in range(begin, end, KEYS):
        columns = first + tl.arange(0, KEYS)
        valid = columns < length  # what lies behind may be NaN, which a weight of 0 would not stop
        if RUN:
            slots = run + columns
        else:
            if MASKED:
                page = tl.load(table + columns // PAGE, mask=valid, other=0)
            else:
                page = tl.load(table + columns // PAGE)
            slots = page.to(tl.int64) * PAGE + columns % PAGE
        offsets = slots * slot_stride
        k_wide = _part(k, offsets, valid, wide, wide_pad, MASKED).to(q_wide.dtype)
        scores = tl.dot(q_wide, k_wide.T, input_precision=PRECISION)
        if rest > 0:
            k_rest = _part(k + wide, offsets, valid, rest, rest_pad, MASKED).to(q_wide.dtype)
            scores = tl.dot(q_rest, k_rest.T, scores, input_precision=PRECISION)
        if QUANTIZED:
            scales = slots // PAGE * scale_stride + slots % PAGE
            scores *= tl.load(k_scale + scales, mask=valid, other=0.0).to(tl.float32)[None, :]
        if MASKED:
            scores = tl.where(columns[None, :] <= positions[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        kept = tl.exp2(peak - higher)
        total = total * kept + tl.sum(weights, 1)
        acc *= kept[:, None]
        if QUANTIZED:
            weights *= tl.load(v_scale + scales, mask=valid, other=0.0).to(tl.float32)[None, :]
        weights = weights.to(q_wide.dtype)
        if SHARED:
            v_wide = k_wide
        else:
            v_wide = _part(v, offsets, valid, wide, wide_pad, MASKED).to(q_wide.dtype)
        acc = tl.dot(weights, v_wide, acc, input_precision=PRECISION)
        if rest > 0 and not SHARED:
            v_rest = _part(v + wide, offsets, valid, rest, rest_pad, MASKED).to(q_wide.dtype)
            acc_rest = tl.dot(weights, v_rest, acc_rest * kept[:, None], input_precision=PRECISION)
        peak = higher
    return acc, acc_rest, peak, total


@Remembered
@triton.jit(
    do_not_specialize=["sequences", "table_stride"],
    do_not_specialize_on_alignment=["q_start", "kv_len", "page_table"],  # parts of one buffer, anywhere in it
)
def _prefill(
    q, k, v, k_scale, v_scale, out, q_start, kv_len, page_table,
    sequences, scale, q_stride, q_head, slot_stride, kv_head_stride, scale_stride, out_stride, dv, table_stride,
    PAGE: tl.constexpr, KEY_HEADS: tl.constexpr, G: tl.constexpr, wide: tl.constexpr, wide_pad: tl.constexpr,
    rest: tl.constexpr, rest_pad: tl.constexpr, SHARED: tl.constexpr, QUANTIZED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % KEY_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KEY_HEADS  # the longest rows first
    b, first_token, new, tile = _sequence_of(tile, q_start, sequences, G, ROWS)
    if tile * ROWS >= new * G:
        return
    length = tl.load(kv_len + b)
    rows = tile * ROWS + tl.arange(0, ROWS)
    real = rows < new * G
    token = rows // G
    positions = length - new + token
    q_offsets = (first_token + token).to(tl.int64) * q_stride + (head * G + rows % G) * q_head
    q_wide = _part(q, q_offsets, real, wide, wide_pad, True)
    q_rest = q_wide
    acc = tl.zeros((ROWS, wide_pad), tl.float32)
    acc_rest = tl.zeros((ROWS, rest_pad if rest > 0 and not SHARED else 16), tl.float32)
    if rest > 0:
        q_rest = _part(q + wide, q_offsets, real, rest, rest_pad, True)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)

    first_position = length - new + tile * ROWS // G
    end = tl.minimum(length - new + (tile * ROWS + ROWS - 1) // G + 1, length)
    full = (first_position + 1) // KEYS * KEYS
    k += head * kv_head_stride
    v += head * kv_head_stride
    if QUANTIZED:
        k_scale += head * PAGE
        v_scale += head * PAGE
    table = page_table + b * table_stride
    run = first_token.to(tl.int64) if FRESH else tl.load(table).to(tl.int64) * PAGE
    acc, acc_rest, peak, total = _blocks(
        acc, acc_rest, peak, total, q_wide, q_rest, positions, 0, full, length,
        k, v, k_scale, v_scale, table, run, scale, slot_stride, scale_stride,
        PAGE, wide, wide_pad, rest, rest_pad, SHARED, QUANTIZED, PRECISION, KEYS, RUN, False,
    )  # fmt: skip
    acc, acc_rest, peak, total = _blocks(
        acc, acc_rest, peak, total, q_wide, q_rest, positions, full, end, length,
        k, v, k_scale, v_scale, table, run, scale, slot_stride, scale_stride,
        PAGE, wide, wide_pad, rest, rest_pad, SHARED, QUANTIZED, PRECISION, KEYS, RUN, True,
    )  # fmt: skip

    out_offsets = (first_token + token).to(tl.int64) * out_stride + (head * G + rows % G) * dv
    d = tl.arange(0, wide_pad)
    inside = real[:, None] & (d[None, :] < wide)
    tl.store(out + out_offsets[:, None] + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    if rest > 0 and not SHARED:
        d = tl.arange(0, rest_pad)
        inside = real[:, None] & (d[None, :] < rest)
        values = (acc_rest / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + wide + out_offsets[:, None] + d[None, :], values, mask=inside)
