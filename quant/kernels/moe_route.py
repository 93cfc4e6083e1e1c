"""Triton: which experts each token goes to, the tokens in the experts' order, and the sum of what comes back.

Everything stays on the device and nothing depends on the order in which blocks run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _strongest(left, e, EP: tl.constexpr):
    """[B, EP] to the largest of each row and its place, the first of equals."""
    best = tl.max(left, 1)
    return best, tl.min(tl.where(left == best[:, None], e[None, :], EP), 1)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits, chosen, shares, order, places, starts, T,
    E: tl.constexpr, EP: tl.constexpr, ACTIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block. chosen, shares [T, ACTIVE]: experts and their weights, which sum to 1 (Mixtral, section 2.1).

    order [T * ACTIVE]: the pairs (token * ACTIVE + place) sorted by expert, stably; places: its inverse; starts
    [E + 1]: where each expert's pairs begin in `order`.
    """
    e = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for first in range(0, T, BLOCK):
        t = first + tl.arange(0, BLOCK)
        here = t < T
        scores = tl.load(logits + t[:, None] * E + e[None, :], mask=here[:, None] & (e < E)[None, :], other=0.0)
        scores = tl.where((e < E)[None, :], scores.to(tl.float32), float("-inf"))
        p = tl.exp(scores - tl.max(scores, 1)[:, None])
        p = tl.where((e < E)[None, :], p, -1.0)
        left = p
        for _ in tl.static_range(ACTIVE):
            best, pick = _strongest(left, e, EP)
            left = tl.where(e[None, :] == pick[:, None], -2.0, left)
        taken = left == -2.0
        total = tl.sum(tl.where(taken, p, 0.0), 1)
        counts += tl.sum((taken & here[:, None]).to(tl.int32), 0)
        left = p
        for a in tl.static_range(ACTIVE):
            best, pick = _strongest(left, e, EP)
            left = tl.where(e[None, :] == pick[:, None], -2.0, left)
            tl.store(chosen + t * ACTIVE + a, pick, mask=here)
            tl.store(shares + t * ACTIVE + a, best / total, mask=here)
    ends = tl.cumsum(counts, 0)
    tl.store(starts + e, ends - counts, mask=e < E)
    tl.store(starts + E + tl.zeros((1,), tl.int32), tl.zeros((1,), tl.int32) + T * ACTIVE)
    tl.debug_barrier()
    base = ends - counts
    for first in range(0, T * ACTIVE, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        here = pair < T * ACTIVE
        mine = (tl.load(chosen + pair, mask=here, other=EP)[:, None] == e[None, :]).to(tl.int32)
        place = tl.sum((tl.cumsum(mine, 0) - mine + base[None, :]) * mine, 1)
        tl.store(order + place, pair, mask=here)
        tl.store(places + pair, place, mask=here)
        base += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y, shares, places, out, T, H, ACTIVE: tl.constexpr, PARTS: tl.constexpr, BH: tl.constexpr, DEPENDENT: tl.constexpr
):
    """out [T, H]: every token's experts by their shares, out of y [PARTS, T * ACTIVE, H] in the experts' order."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for a in tl.static_range(ACTIVE):
        place = tl.load(places + t * ACTIVE + a).to(tl.int64)
        expert = tl.zeros((BH,), tl.float32)
        for part in tl.static_range(PARTS):
            row = place + part * T * ACTIVE
            expert += tl.load(y + row * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += expert * tl.load(shares + t * ACTIVE + a)
    tl.store(out + t.to(tl.int64) * H + h, total.to(out.dtype.element_ty), mask=h < H)
