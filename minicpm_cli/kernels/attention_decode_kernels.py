"""Decode attention in Triton: each program takes one split of one sequence's history for a few key heads.

Every program of a launch computes which splits are active from the length on the device, so that a captured graph
serves all lengths. Softmax and sums are float32, in base 2: scale_log2 is the attention scale times log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minicpm_cli.kernels.rope_store import FP8_STEPS, TO_INT

LOWEST = tl.constexpr(-1e30)  # a running maximum before any token: finite, so that differences are never NaN


@triton.jit
def _split_bounds(length, split, SPLITS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """This split's tokens and the number of splits: whole steps, at least CHUNK tokens each where SPLITS allows."""
    wanted = tl.minimum(tl.cdiv(length, CHUNK), SPLITS)
    tokens = tl.cdiv(tl.cdiv(length, wanted), STEP) * STEP
    first = split * tokens
    return first, tl.minimum(first + tokens, length), tl.cdiv(length, tokens)


@triton.jit
def _locate(table, tokens, last, PAGE: tl.constexpr):
    """The cache rows of `tokens`; any valid row for those from `last` on."""
    pages = tl.load(table + tokens // PAGE, mask=tokens < last, other=0)
    return pages.to(tl.int64) * PAGE + tokens % PAGE


@triton.jit
def _scales_at(rows, heads, page_stride, PAGE: tl.constexpr):
    """Where the scales of the cache's `rows` are: a page's lie side by side, head by head."""
    return rows // PAGE * page_stride + heads * PAGE + rows % PAGE


@triton.jit
def _turn(cos, sin, dims, D: tl.constexpr, HALF: tl.constexpr):
    """Rotation of a head's last 2 * HALF elements, i with i + HALF: each element's factor and its partner's."""
    LEAD: tl.constexpr = D - 2 * HALF
    turned = (dims >= LEAD) & (dims < D)
    at = (dims + (HALF - LEAD % HALF)) % HALF
    own = tl.load(cos + at, mask=turned, other=1.0)
    other = tl.load(sin + at, mask=turned, other=0.0)
    return own, tl.where(dims < LEAD + HALF, -other, other)


@triton.jit
def _rotated(x, dims, mask, own, other, D: tl.constexpr, HALF: tl.constexpr):
    """A head after the rotation, rounded as if it had been stored: x points at its first element."""
    LEAD: tl.constexpr = D - 2 * HALF
    if LEAD == 0:
        partner = (dims + HALF) % D
    else:
        partner = tl.where(dims < LEAD, dims, tl.where(dims < LEAD + HALF, dims + HALF, dims - HALF))
    a = tl.load(x + dims, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + partner, mask=mask, other=0.0).to(tl.float32)
    return (a * own + b * other).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _scale_of(value, LARGEST: tl.constexpr, WHOLE: tl.constexpr, AXIS: tl.constexpr):
    """The scale of each head, as minicpm_cli.kernels.cache.encode chooses it."""
    peak = tl.max(tl.abs(value), AXIS, keep_dims=True)
    scale = _rounded_scale(peak / LARGEST)
    if not WHOLE:
        least = _fp8_error(value, scale, AXIS)
        for step in tl.static_range(1, FP8_STEPS):
            other = _rounded_scale(peak / (LARGEST - 32.0 * step))
            error = _fp8_error(value, other, AXIS)
            scale = tl.where(error < least, other, scale)
            least = tl.minimum(error, least)
    return scale


@triton.jit
def _rounded_scale(exact):
    scale = exact.to(tl.float16).to(tl.float32)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _fp8_error(value, scale, AXIS: tl.constexpr):
    scaled = value * (1.0 / scale)
    error = scaled.to(tl.float8e4nv).to(tl.float32) - scaled
    return tl.sum(error * error, AXIS, keep_dims=True) * scale * scale


@triton.jit
def _keep(value, cache, scales, at, scale_at, mask, scale_mask, SCALED: tl.constexpr, AXIS: tl.constexpr):
    """Stores the new token's heads, and gives them back as the cache holds them."""
    kind: tl.constexpr = cache.dtype.element_ty
    if SCALED:
        LARGEST: tl.constexpr = 127.0 if kind == tl.int8 else 448.0
        scale = _scale_of(value, LARGEST, kind == tl.int8, AXIS)
        tl.store(scales + scale_at, scale.to(tl.float16), mask=scale_mask)
        value = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
        if kind == tl.int8:
            value = (value + TO_INT) - TO_INT
        codes = value.to(kind)
        tl.store(cache + at, codes, mask=mask)
        kept = codes.to(tl.float32) * scale
    else:
        codes = value.to(kind)
        tl.store(cache + at, codes, mask=mask)
        kept = codes.to(tl.float32)
    return kept


@triton.jit
def _kept(cache, scales, at, scale_at, mask, scale_mask, SCALED: tl.constexpr):
    """The new token's heads out of the cache, past L1, which may hold their lines as they were before the wait."""
    value = tl.load(cache + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if SCALED:
        value *= tl.load(scales + scale_at, mask=scale_mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return value


@triton.jit
def multi_head(  # noqa: PLR0915
    q, k, v, k_scale, v_scale, table, lengths, out, partials, stats, arrivals, cos, sin,
    scale_log2, q_stride, row_stride, scale_stride, table_stride,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A query head for each key head. BLOCK heads and LANES * DEPTH tokens a step, the next step's loads in flight.

    The tile is [BLOCK, LANES, DEPTH, D]: D, then the heads, then the lanes are spread over the threads, 16 bytes of D
    each (Triton takes the axes in this order), and DEPTH lies in each thread's registers. Every lane runs a softmax of
    its own over its tokens; the lanes meet once, after the last step, so that the loop has no barrier.

    The newest token, which the kernel before this one wrote, begins the softmax of its split: with PDL all older tokens
    of the first step are requested before the wait for that kernel. They lie in the cache since earlier steps.
    HALF > 0: q holds query, key and value heads that are neither rotated nor stored yet; the newest token is there.
    """
    group, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STEP: tl.constexpr = DEPTH * LANES
    if PDL:
        gdc_launch_dependents()
    length = tl.load(lengths + row)
    first, last, count = _split_bounds(length, split, SPLITS, CHUNK, STEP)
    if first >= last:
        return
    heads = group * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DP)
    lanes = tl.arange(0, LANES)[:, None] + tl.arange(0, DEPTH)[None, :] * LANES
    inner = (heads[:, None] * D + dims[None, :])[:, None, None, :]
    inside = (dims < D)[None, None, None, :]
    table += row.to(tl.int64) * table_stride
    older = tl.minimum(last, length - 1)

    tokens = first + lanes
    rows = _locate(table, tokens, older, PAGE)
    at = (rows * row_stride)[None, :, :, None] + inner
    live = (tokens < older)[None]
    k_tile = tl.load(k + at, mask=live[:, :, :, None] & inside, other=0.0)
    v_tile = tl.load(v + at, mask=live[:, :, :, None] & inside, other=0.0)
    if SCALED:
        scale_at = _scales_at(rows[None], heads[:, None, None], scale_stride, PAGE)
        k_code = tl.load(k_scale + scale_at, mask=live, other=0.0)
        v_code = tl.load(v_scale + scale_at, mask=live, other=0.0)
    rows = _locate(table, tokens + STEP, older, PAGE)
    slot = tl.load(table + (length - 1) // PAGE).to(tl.int64) * PAGE + (length - 1) % PAGE
    if PDL:
        gdc_wait()
    lane = tl.arange(0, LANES)[None, :, None, None]
    spread = inner + lane * 0  # a copy for every lane, in the tile's layout
    begins = lane < tl.where(last == length, 1, 0)  # the first lane of the newest token's split
    fresh = slot * row_stride + spread
    scale_fresh = _scales_at(slot, heads[:, None, None, None] + lane * 0, scale_stride, PAGE)
    q += row.to(tl.int64) * q_stride
    if HALF > 0:
        column = dims[None, None, None, :] + lane * 0 + heads[:, None, None, None] * 0
        head = heads[:, None, None, None] * D + lane * 0
        own, other = _turn(cos + row * HALF, sin + row * HALF, column, D, HALF)
        query = _rotated(q + head, column, inside, own, other, D, HALF)
        k_new = _rotated(q + HEADS * D + head, column, inside & begins, own, other, D, HALF)
        v_new = tl.load(q + 2 * HEADS * D + spread, mask=inside & begins, other=0.0).to(tl.float32)
        k_new = _keep(k_new, k, k_scale, fresh, scale_fresh, inside & begins, begins, SCALED, 3)
        v_new = _keep(v_new, v, v_scale, fresh, scale_fresh, inside & begins, begins, SCALED, 3)
    else:
        query = tl.load(q + spread, mask=inside, other=0.0).to(tl.float32)
        k_new = _kept(k, k_scale, fresh, scale_fresh, inside & begins, begins, SCALED)
        v_new = _kept(v, v_scale, fresh, scale_fresh, inside & begins, begins, SCALED)
    query *= scale_log2
    begun = (tl.arange(0, LANES) < tl.where(last == length, 1, 0))[None, :]
    top = tl.where(begun, tl.sum(tl.sum(k_new * query, 3), 2), LOWEST)
    total = tl.where(begun, 1.0, tl.zeros([BLOCK, LANES], tl.float32))
    mixed = tl.sum(v_new, 2)
    for start in range(first, older, STEP):
        tokens = start + lanes
        k_now, v_now = k_tile, v_tile
        at = (rows * row_stride)[None, :, :, None] + inner
        live = (tokens + STEP < older)[None]
        k_tile = tl.load(k + at, mask=live[:, :, :, None] & inside, other=0.0)
        v_tile = tl.load(v + at, mask=live[:, :, :, None] & inside, other=0.0)
        scores = tl.sum(k_now.to(tl.float32) * query, 3)
        if SCALED:
            scores *= k_code.to(tl.float32)
            v_factor = v_code.to(tl.float32)
            scale_at = _scales_at(rows[None], heads[:, None, None], scale_stride, PAGE)
            k_code = tl.load(k_scale + scale_at, mask=live, other=0.0)
            v_code = tl.load(v_scale + scale_at, mask=live, other=0.0)
        rows = _locate(table, tokens + 2 * STEP, older, PAGE)
        scores = tl.where((tokens < older)[None], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 2))
        weight = tl.exp2(scores - higher[:, :, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weight, 2)
        if SCALED:
            weight *= v_factor
        mixed = mixed * fade[:, :, None] + tl.sum(weight[:, :, :, None] * v_now.to(tl.float32), 2)
        top = higher
    peak = tl.max(top, 1)
    part = tl.exp2(top - peak[:, None])
    total = tl.sum(total * part, 1)
    mixed = tl.sum(mixed * part[:, :, None], 1)

    place = row.to(tl.int64) * HEADS + heads
    kept = (dims < D)[None, :]
    if count > 1:
        mine = place * SPLITS + split
        tl.store(partials + mine[:, None] * D + dims[None, :], mixed, mask=kept)
        tl.store(stats + mine * 2, peak)
        tl.store(stats + mine * 2 + 1, total)
        tl.debug_barrier()  # every thread's part is written before the one that counts says so
        arrival = arrivals + row * (HEADS // BLOCK) + group
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") < count - 1:
            return
        tl.store(arrival, 0)
        mixed, total = _merge(partials, stats, place, dims, count, D, DP, BLOCK, SPLITS)
    result = mixed / total[:, None]
    tl.store(out + place[:, None] * D + dims[None, :], result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _merge(
    partials, stats, place, dims, count,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The splits' sums for heads `place`, in the order of the splits whoever came last: [BLOCK, DP], [BLOCK]."""
    TILE: tl.constexpr = 16 if SPLITS > 8 else 8  # a round of loads and barriers takes 2 us
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK, DP], tl.float32)
    for start in range(0, count, TILE):
        splits = start + tl.arange(0, TILE)
        at = place[None, :] * SPLITS + splits[:, None]
        live = (splits < count)[:, None]
        peaks = tl.load(stats + at * 2, mask=live, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(stats + at * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        wanted = live[:, :, None] & (dims < D)[None, None, :]
        sums = tl.load(
            partials + at[:, :, None] * D + dims[None, None, :], mask=wanted, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(top, tl.max(peaks, 0))
        part = tl.exp2(peaks - higher[None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(totals * part, 0)
        mixed = mixed * fade[:, None] + tl.sum(sums * part[:, :, None], 0)
        top = higher
    return mixed, total
