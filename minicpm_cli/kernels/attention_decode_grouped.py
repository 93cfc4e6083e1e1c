"""Decode attention in Triton where query heads share key heads, and the launch that puts its splits together."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minicpm_cli.kernels.attention_decode_kernels import (
    LOWEST,
    _keep,
    _locate,
    _merge,
    _rotated,
    _scales_at,
    _split_bounds,
    _turn,
)


@triton.jit
def grouped(  # noqa: PLR0915
    q, k, v, k_scale, v_scale, table, lengths, out, partials, stats, cos, sin,
    scale_log2, q_stride, row_stride, scale_stride, table_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SHARED: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP query heads for each of KEYS key heads, ROWS of them a program, padded: the products run on tensor cores.

    A head's D1 + D2 elements are two powers of two (D2 may be 0), so that 80, 96 and 288 need no padding. SHARED (MLA):
    the value is the first D1 elements of the key, which is read once. HALF > 0, with D2 = 0: q and the newest token
    are neither rotated nor stored yet, as in `multi_head`.
    """
    BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    D: tl.constexpr = D1 + D2
    DV: tl.constexpr = D1 if SHARED else D
    HEADS: tl.constexpr = KEYS * GROUP
    block, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    length = tl.load(lengths + row)
    first, last, count = _split_bounds(length, split, SPLITS, CHUNK, STEP)
    if first >= last:
        return
    key = block // BLOCKS
    member = block % BLOCKS * ROWS + tl.arange(0, ROWS)
    used = (member < GROUP)[:, None]
    heads = key * GROUP + member
    dims = tl.arange(0, D1)
    table += row.to(tl.int64) * table_stride
    if PDL:
        gdc_wait()
    q += row.to(tl.int64) * q_stride
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D1], tl.float32)
    if HALF > 0:
        slot = tl.load(table + (length - 1) // PAGE).to(tl.int64) * PAGE + (length - 1) % PAGE
        begins = tl.where(last == length, 1, 0)  # the newest token's split
        fresh = slot * row_stride + key * D + dims[None, :]
        mask, stored = dims[None, :] < D1 * begins, dims[None, :] < tl.where(block % BLOCKS == 0, D1, 0) * begins
        own, other = _turn(cos + row * HALF, sin + row * HALF, dims[None, :], D, HALF)
        turned = _rotated(q + heads[:, None] * D, dims[None, :], used, own, other, D, HALF)
        k_new = _rotated(q + (HEADS + key) * D, dims[None, :], mask, own, other, D, HALF)
        v_new = tl.load(q + (HEADS + KEYS + key) * D + dims[None, :], mask=mask, other=0.0).to(tl.float32)
        scale_fresh = _scales_at(slot, key, scale_stride, PAGE) + dims[None, :] * 0
        k_new = _keep(k_new, k, k_scale, fresh, scale_fresh, stored, stored & (dims[None, :] == 0), SCALED, 1)
        v_new = _keep(v_new, v, v_scale, fresh, scale_fresh, stored, stored & (dims[None, :] == 0), SCALED, 1)
        query = turned.to(q.dtype.element_ty)
        top = tl.where(begins > 0, tl.sum(turned * k_new, 1) * scale_log2, LOWEST)
        total += begins.to(tl.float32)
        mixed += v_new
        last = tl.minimum(last, length - 1)
    else:
        query = tl.load(q + heads[:, None] * D + dims[None, :], mask=used, other=0.0)
    if D2 > 0:
        rest = D1 + tl.arange(0, D2)
        query2 = tl.load(q + heads[:, None] * D + rest[None, :], mask=used, other=0.0)
        if not SHARED:
            mixed2 = tl.zeros([ROWS, D2], tl.float32)
    for start in range(first, last, STEP):
        tokens = start + tl.arange(0, STEP)
        live = tokens < last
        rows = _locate(table, tokens, last, PAGE)
        at = (rows * row_stride + key * D)[:, None]
        keys = tl.load(k + at + dims[None, :], mask=live[:, None], other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if D2 > 0:
            keys2 = tl.load(k + at + rest[None, :], mask=live[:, None], other=0.0).to(query.dtype)
            scores = tl.dot(query2, tl.trans(keys2), scores, input_precision="ieee")
        scores *= scale_log2
        if SCALED:
            scale_at = _scales_at(rows, key, scale_stride, PAGE)
            scores *= tl.load(k_scale + scale_at, mask=live, other=0.0).to(tl.float32)[None, :]
        scores = tl.where(live[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weight = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 1)
        if SCALED:
            weight *= tl.load(v_scale + scale_at, mask=live, other=0.0).to(tl.float32)[None, :]
        part = weight.to(query.dtype)
        if SHARED:
            values = keys
        else:
            values = tl.load(v + at + dims[None, :], mask=live[:, None], other=0.0).to(query.dtype)
        mixed = tl.dot(part, values, mixed * fade[:, None], input_precision="ieee")
        if D2 > 0 and not SHARED:
            values2 = tl.load(v + at + rest[None, :], mask=live[:, None], other=0.0).to(query.dtype)
            mixed2 = tl.dot(part, values2, mixed2 * fade[:, None], input_precision="ieee")
        top = higher
    place = row.to(tl.int64) * HEADS + heads
    if count > 1:
        mine = place * SPLITS + split
        tl.store(stats + mine * 2, top, mask=member < GROUP)
        tl.store(stats + mine * 2 + 1, total, mask=member < GROUP)
        tl.store(partials + mine[:, None] * DV + dims[None, :], mixed, mask=used)
        if D2 > 0 and not SHARED:
            tl.store(partials + mine[:, None] * DV + rest[None, :], mixed2, mask=used)
    else:
        share = 1.0 / total[:, None]
        tl.store(out + place[:, None] * DV + dims[None, :], (mixed * share).to(out.dtype.element_ty), mask=used)
        if D2 > 0 and not SHARED:
            tl.store(out + place[:, None] * DV + rest[None, :], (mixed2 * share).to(out.dtype.element_ty), mask=used)


@triton.jit
def combine(
    partials, stats, lengths, out,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    STEP: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What `grouped` left in parts: one program a head, for a single last block would read up to a megabyte alone."""
    head, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()  # before any return: what follows waits for this kernel alone
    _, _, count = _split_bounds(tl.load(lengths + row), 0, SPLITS, CHUNK, STEP)
    if count == 1:
        return
    place = row.to(tl.int64) * HEADS + head + tl.arange(0, 1)
    dims = tl.arange(0, DP)
    mixed, total = _merge(partials, stats, place, dims, count, D, DP, 1, SPLITS)
    at = place[:, None] * D + dims[None, :]
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(dims < D)[None, :])
