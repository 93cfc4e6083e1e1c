"""The four passes of `sampling` over the logits: launches of chunks x rows that decide by themselves what a row needs.

A row's threshold is searched between scores: the first of 16 edges whose mass (or count, for top-k) with all above it
reaches the goal, then the same between that edge and the one before, then exactly, on a list of the scores left.
"""

import triton
import triton.language as tl

from minicpm_cli.kernels.sampling_parts import (
    LOG2E,
    NOWHERE,
    chunk_of,
    drawn,
    finite,
    key_of,
    listed_masses,
    row_of,
    threshold,
    uniform_of,
    value_of,
)

EDGES: tl.constexpr = tl.constexpr(16)


@triton.jit
def peaks(
    logits, stride, vocab, temperature, top_p, min_p, top_k,
    seats, counts, repetition, frequency, presence, allowed, allowed_stride,
    part_key, part_id, part_mass, arrived,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Changes the logits by penalties and mask; of each chunk the largest key, its lowest id, and the mass below it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = logits + row * stride
    t, _, _, _ = row_of(temperature, top_p, min_p, top_k, row)
    ids, x = chunk_of(here, block * CHUNK, vocab, CHUNK)
    inside = ids < vocab
    changed = False
    if seats is not None:
        seat = tl.load(seats + row).to(tl.int64)
        changed = seat >= 0
        if changed:
            count = tl.load(counts + seat * vocab + ids, mask=inside, other=0)
            rate = tl.load(repetition + row)
            x = tl.where(count != 0, tl.where(x > 0.0, tl.div_rn(x, rate), x * rate), x)
            of_answer = count >> 1
            x -= of_answer.to(tl.float32) * tl.load(frequency + row)
            x -= tl.where(of_answer > 0, tl.load(presence + row), 0.0)
    if allowed is not None:
        words = tl.load(allowed + row * allowed_stride + (ids >> 5), mask=inside, other=-1)
        bits = (words >> (ids & 31)) & 1
        x = tl.where(bits == 1, x, -float("inf"))
        changed = changed | (tl.min(bits, 0) == 0)
    if changed:
        tl.store(here + ids, x.to(logits.dtype.element_ty), mask=inside)
    keys = key_of(x)
    key = tl.max(keys, 0)
    at = row * tl.num_programs(0) + block
    tl.store(part_key + at, key)
    tl.store(part_id + at, tl.min(tl.where((keys == key) & inside, ids, NOWHERE), 0))
    if block == 0:
        tl.store(arrived + row, 0)
    peak = value_of(key)
    if (t != 0.0) & finite(peak):
        tl.store(part_mass + at, tl.sum(tl.exp2((x - peak) * (LOG2E / t)).to(tl.float64), 0))


@triton.jit
def edge_sums(
    logits, first, vocab, edges, peak, cool, unit, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # -> [EDGES] float32
    """The mass, or with `unit` the number, of a chunk's scores from each edge on."""
    sums = tl.zeros([EDGES, TILE], tl.float32)
    for start in range(0, CHUNK, TILE):
        _, x = chunk_of(logits, first + start, vocab, TILE)
        weights = tl.where(unit, 1.0, tl.exp2((x - peak) * cool))
        sums += tl.where(x[None, :] >= edges[:, None], weights[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def coarse(
    logits, stride, vocab, seed, index, temperature, top_p, min_p, top_k, seats, counts,
    part_key, part_id, part_mass, out_id, out_peak, goals, edges, sums,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ends rows that are greedy, not finite or without filters; of the others the sums at 16 edges."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    here = logits + row * stride
    t, p, floor, k = row_of(temperature, top_p, min_p, top_k, row)
    lane = tl.arange(0, BLOCKS)
    there = lane < blocks
    keys = tl.load(part_key + row * blocks + lane, mask=there, other=-NOWHERE)
    key = tl.max(keys, 0)
    peak = value_of(key)
    search = (k > 0) | (p < 1.0)
    if block == 0:
        tl.store(out_peak + row, peak)
        if (t == 0.0) | (not finite(peak)):
            ids = tl.load(part_id + row * blocks + lane, mask=there, other=NOWHERE)
            token = tl.min(tl.where(keys == key, ids, NOWHERE), 0)
            finished(token, out_id, seats, counts, vocab, row)
    if (t != 0.0) & finite(peak):
        cool = LOG2E / t
        tops = value_of(keys)
        masses = tl.load(part_mass + row * blocks + lane, mask=there, other=0.0)
        seen = there & (tops > -float("inf"))
        masses = tl.where(seen, masses * tl.exp2((tops - peak) * cool).to(tl.float64), 0.0)
        if search:
            whole = tl.sum(masses, 0)
            # Below this score lies less than 1 - top_p of the mass, whatever the scores are.
            span = -t * tl.log(tl.maximum(((1.0 - p) * whole / vocab).to(tl.float32), 1e-37)) * 1.001
            lowest = tl.min(tl.where(seen, tops, float("inf")), 0)
            of_k = (peak - lowest) * tl.where(k > tl.sum(seen.to(tl.int32), 0), 2.0, 1.0)
            span = tl.minimum(tl.maximum(tl.where(k > 0, of_k, span), 1e-3), 1e37)
            step = tl.arange(0, EDGES)
            scores = peak - span * ((step + 1).to(tl.float32) / EDGES)
            if block == 0:
                tl.store(goals + row, tl.where(k > 0, k.to(tl.float64), p * whole))
                tl.store(edges + row * EDGES + step, scores)
            got = edge_sums(here, block * CHUNK, vocab, scores, peak, cool, k > 0, CHUNK, TILE)
            tl.store(sums + (row * blocks + block) * EDGES + step, got)
        elif (floor == 0.0) & (block == 0):
            uniform = uniform_of(tl.load(seed + row), tl.load(index + row))
            token = drawn(here, vocab, masses, -float("inf"), peak, cool, uniform, BLOCKS, CHUNK)
            finished(token, out_id, seats, counts, vocab, row)


@triton.jit
def finished(token, out_id, seats, counts, vocab, row):
    tl.store(out_id + row, token.to(tl.int64))
    if seats is not None:
        seat = tl.load(seats + row).to(tl.int64)
        if seat >= 0:
            at = counts + seat * vocab + token
            tl.store(at, tl.load(at) + 2)


@triton.jit
def between(sums, edges, blocks, goal, BLOCKS: tl.constexpr):
    """The edge where the sums reach the goal, -inf if none does, and the edge before, +inf if it is the first."""
    lane, step = tl.arange(0, BLOCKS), tl.arange(0, EDGES)
    at = sums + lane[:, None] * EDGES + step[None, :]
    reached = tl.sum(tl.load(at, mask=lane[:, None] < blocks, other=0.0).to(tl.float64), 0)
    scores = tl.load(edges + step)
    place = tl.sum((reached < goal).to(tl.int32), 0)
    low = tl.max(tl.where(step == place, scores, -float("inf")), 0)
    high = tl.max(tl.where(step == place - 1, scores, -float("inf")), 0)
    return low, tl.where(place == 0, float("inf"), high)


@triton.jit
def fine(
    logits, stride, vocab, temperature, top_p, min_p, top_k, out_peak, goals, edges, sums, fine_edges, fine_sums, above,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sums at 16 edges between the two of `coarse` where the goal is reached."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    t, p, _, k = row_of(temperature, top_p, min_p, top_k, row)
    peak = tl.load(out_peak + row)
    if (t != 0.0) & finite(peak) & ((k > 0) | (p < 1.0)):
        goal = tl.load(goals + row)
        low, high = between(sums + row * blocks * EDGES, edges + row * EDGES, blocks, goal, BLOCKS)
        top = tl.minimum(high, peak)
        step = tl.arange(0, EDGES)
        scores = top - (top - low) * ((step + 1).to(tl.float32) / EDGES)
        # Beyond the last edge the distances double.
        beyond = top - tl.maximum(peak - top, 1e-3) * (tl.exp2((step + 1).to(tl.float32)) - 1.0)
        scores = tl.where(low > -float("inf"), scores, beyond)
        scores = tl.where(step == EDGES - 1, low, scores)
        if block == 0:
            tl.store(fine_edges + row * EDGES + step, scores)
            tl.store(above + row, high)
        got = edge_sums(
            logits + row * stride, block * CHUNK, vocab, scores, peak, LOG2E / t, k > 0, CHUNK, TILE
        )  # fmt: skip
        tl.store(fine_sums + (row * blocks + block) * EDGES + step, got)


@triton.jit
def last(
    logits, stride, vocab, seed, index, temperature, top_p, min_p, top_k, seats, counts,
    out_id, out_peak, goals, fine_edges, fine_sums, above, listed, lengths, masses, floor_masses, arrived,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Lists each chunk's scores between the two edges, with top-k all from the lower on; a row's last block draws."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    here, at = logits + row * stride, row * blocks + block
    t, p, floor, k = row_of(temperature, top_p, min_p, top_k, row)
    peak = tl.load(out_peak + row)
    search = (k > 0) | (p < 1.0)
    if (t != 0.0) & finite(peak) & (search | (floor > 0.0)):
        cool = LOG2E / t
        least = tl.where(floor > 0.0, peak + t * tl.log(tl.maximum(floor, 1e-37)), -float("inf"))
        low, high = peak, peak
        if search:
            low, high = between(
                fine_sums + row * blocks * EDGES, fine_edges + row * EDGES, blocks, tl.load(goals + row), BLOCKS
            )
            high = tl.where(k > 0, float("inf"), tl.minimum(high, tl.load(above + row)))
        _, x = chunk_of(here, block * CHUNK, vocab, CHUNK)
        chosen = (x >= low) & (x < high) & (x > -float("inf"))
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(listed + at * CHUNK + place, x, mask=chosen)
        tl.store(lengths + at, tl.sum(chosen.to(tl.int32), 0))
        weights = tl.exp2((x - peak) * cool).to(tl.float64)
        tl.store(masses + at, tl.sum(tl.where(x >= high, weights, 0.0), 0))
        tl.store(floor_masses + at, tl.sum(tl.where(x >= least, weights, 0.0), 0))
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1) == blocks - 1:
            uniform = uniform_of(tl.load(seed + row), tl.load(index + row))
            goal = tl.load(goals + row)
            token = filtered(
                here, vocab, p, k, goal, uniform, low, high, least, peak, cool, listed + row * blocks * CHUNK,
                lengths + row * blocks, masses + row * blocks, floor_masses + row * blocks, blocks, search,
                BLOCKS, CHUNK, WIDTH,
            )  # fmt: skip
            finished(token, out_id, seats, counts, vocab, row)


@triton.jit
def filtered(
    logits, vocab, p, k, goal, uniform, low, high, least, peak, cool,
    listed, lengths, masses, floor_masses, blocks, search,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The exact threshold from the list, and the draw."""
    lane = tl.arange(0, BLOCKS)
    there = lane < blocks
    kept = tl.load(masses + lane, mask=there, other=0.0)
    longest = tl.max(tl.load(lengths + lane, mask=there, other=0), 0)
    found = -float("inf")
    if search:
        bottom = key_of(low).to(tl.int64)
        top = key_of(tl.minimum(high, peak)).to(tl.int64) + (high > peak).to(tl.int64)
        goal -= tl.sum(kept, 0)
        key = threshold(listed, lengths, blocks, longest, peak, cool, k > 0, goal, bottom, top, BLOCKS, CHUNK, WIDTH)
        if (k > 0) & (p < 1.0):
            of_k = value_of(key.to(tl.int32))
            whole = tl.sum(listed_masses(listed, lengths, blocks, longest, of_k, peak, cool, BLOCKS, CHUNK, WIDTH), 0)
            key = threshold(
                listed, lengths, blocks, longest, peak, cool, False, p * whole, key, top, BLOCKS, CHUNK, WIDTH
            )
        found = value_of(key.to(tl.int32))
    if (least > found) & (k == 0):
        kept = tl.load(floor_masses + lane, mask=there, other=0.0)
    else:
        from_list = tl.maximum(found, least)
        kept += listed_masses(listed, lengths, blocks, longest, from_list, peak, cool, BLOCKS, CHUNK, WIDTH)
    return drawn(logits, vocab, kept, tl.maximum(found, least), peak, cool, uniform, BLOCKS, CHUNK)
