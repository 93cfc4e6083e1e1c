"""The four passes of `sampling`: launches of chunks x rows that decide by themselves what a row needs.

A row's threshold is searched among the scores that can be it, listed by chunk: the first of 16 edges whose mass (or
count, for top-k) with all above it reaches the goal; where many are listed the same between that edge and the one
before; then exactly, by the last block of the row, which draws.
"""

import triton
import triton.language as tl

from minicpm_cli.kernels.sampling_parts import (
    EDGES,
    LOG2E,
    NOWHERE,
    aimed,
    between,
    chunk_of,
    drawn,
    edge_sums,
    finite,
    key_of,
    listed_chunk,
    listed_masses,
    mass_from,
    row_of,
    summed,
    threshold,
    uniform_of,
    value_of,
)


@triton.jit
def peaks(
    logits, stride, vocab, temperature, top_p, min_p, top_k,
    seats, counts, repetition, frequency, presence, allowed, allowed_stride,
    part_key, part_id, part_low, part_mass, arrived, found,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Changes logits by penalties and mask. Of each chunk: the largest key, its lowest id, the lowest score, mass."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = logits + row * stride
    ids, x = chunk_of(here, block, vocab, CHUNK)
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
    if temperature is not None:
        if block == 0:
            tl.store(arrived + row, 0)
            tl.store(found + row, 0)
        t, _, _, _ = row_of(temperature, top_p, min_p, top_k, row)
        peak = value_of(key)
        if (t != 0.0) & finite(peak):
            tl.store(part_low + at, tl.min(tl.where(x > -float("inf"), x, float("inf")), 0))
            tl.store(part_mass + at, tl.sum(tl.exp2((x - peak) * (LOG2E / t)).to(tl.float64), 0))


@triton.jit
def coarse(
    logits, stride, vocab, seed, index, temperature, top_p, min_p, top_k, seats, counts,
    part_key, part_id, part_low, part_mass, out_id, out_peak, goals, edges, sums, listed, lengths,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ends rows that are greedy, not finite or without filters; of the others the lists and the sums at 16 edges."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    here = logits + row * stride
    lane = tl.arange(0, BLOCKS)
    there = lane < blocks
    keys = tl.load(part_key + row * blocks + lane, mask=there, other=-NOWHERE)
    key = tl.max(keys, 0)
    peak = value_of(key)
    ends = not finite(peak)
    if temperature is None:
        ends = True
    else:
        t, p, floor, k = row_of(temperature, top_p, min_p, top_k, row)
        ends = ends | (t == 0.0)
    if block == 0:
        tl.store(out_peak + row, peak)
        if ends:
            ids = tl.load(part_id + row * blocks + lane, mask=there, other=NOWHERE)
            finished(tl.min(tl.where(keys == key, ids, NOWHERE), 0), out_id, seats, counts, vocab, row)
    if temperature is not None:  # noqa: SIM102 - what is known before must stand alone
        if not ends:
            cool = LOG2E / t
            tops = value_of(keys)
            masses = tl.load(part_mass + row * blocks + lane, mask=there, other=0.0)
            seen = there & (tops > -float("inf"))
            masses = tl.where(seen, masses * tl.exp2((tops - peak) * cool).to(tl.float64), 0.0)
            search = (k > 0) | (p < 1.0)
            if search | (floor > 0.0):
                whole = tl.sum(masses, 0)
                # Below this score lies less than 1 - top_p of the mass, whatever the scores are.
                below = tl.maximum(((1.0 - p) * whole).to(tl.float32) / vocab, 1e-37)
                lowest = tl.min(tl.where(seen, tops, float("inf")), 0)
                bottoms = tl.load(part_low + row * blocks + lane, mask=there, other=float("inf"))
                bottom = tl.min(tl.where(seen, bottoms, float("inf")), 0)
                of_k = (peak - lowest) * tl.where(k > tl.sum(seen.to(tl.int32), 0), 2.0, 1.0)
                span = tl.where(k > 0, of_k, -t * tl.log(below) * 1.001)
                span = tl.minimum(tl.minimum(span, (peak - bottom) * 1.001), 1e37)
                span = tl.maximum(span, 1e-3)
                step = tl.arange(0, EDGES)
                scores = peak - span * ((step + 1).to(tl.float32) / EDGES)
                least = tl.where(search, tl.min(scores, 0), peak + t * tl.log(tl.maximum(floor, 1e-37)))
                if block == 0:
                    tl.store(goals + row, tl.where(k > 0, k.to(tl.float64), p * whole))
                    tl.store(edges + row * EDGES + step, scores)
                at = row * blocks + block
                count = listed_chunk(here, block, vocab, least, listed + at * CHUNK, CHUNK, LANES)
                tl.store(lengths + at, count)
                if search:
                    got = edge_sums(listed + at * CHUNK, count, scores, peak, cool, k > 0, 2 * LANES)
                    tl.store(sums + at * EDGES + step, got)
            elif block == 0:
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
def fine(
    logits, stride, vocab, seed, index, temperature, top_p, min_p, top_k, seats, counts,
    out_id, out_peak, goals, edges, sums, listed, lengths, near, found, arrived,
    near_lengths, over_masses, floor_masses, fine_edges, fine_sums, above, fine_lengths,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
    LANES: tl.constexpr, MANY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ends rows with lists of up to MANY scores. Of the others the sums at 16 edges between the two of `coarse`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    t, p, floor, k = row_of(temperature, top_p, min_p, top_k, row)
    peak = tl.load(out_peak + row)
    search = (k > 0) | (p < 1.0)
    if (t != 0.0) & finite(peak) & (search | (floor > 0.0)):
        at = row * blocks + block
        lane = tl.arange(0, BLOCKS)
        count = tl.load(lengths + at)
        total = tl.sum(tl.load(lengths + row * blocks + lane, mask=lane < blocks, other=0), 0)
        step = tl.arange(0, EDGES)
        goal = tl.load(goals + row)
        reached = tl.zeros([EDGES], tl.float64)
        low, high = peak, peak
        if search:
            reached = summed(sums + row * blocks * EDGES, blocks, BLOCKS)
            low, high = between(reached, tl.load(edges + row * EDGES + step), goal)
        if (total > MANY) & search | (low == -float("inf")):
            here = listed + at * CHUNK
            if low == -float("inf"):  # fewer than top_k were listed
                count = listed_chunk(logits + row * stride, block, vocab, low, here, CHUNK, LANES)
            top = tl.minimum(high, peak)
            if low == -float("inf"):  # beyond the last edge the distances double
                scores = top - tl.maximum(peak - top, 1e-3) * (tl.exp2((step + 1).to(tl.float32)) - 1.0)
                scores = tl.where(step == EDGES - 1, low, scores)
            else:
                scores = aimed(reached, goal, low, top)
            if block == 0:
                tl.store(fine_edges + row * EDGES + step, scores)
                tl.store(above + row, high)
            tl.store(fine_lengths + at, count)
            got = edge_sums(here, count, scores, peak, LOG2E / t, k > 0, 2 * LANES)
            tl.store(fine_sums + at * EDGES + step, got)
        else:
            if block == 0:
                tl.store(above + row, float("nan"))  # ended here
            closed(
                logits, stride, vocab, seed, index, seats, counts, out_id, goals, listed, lengths, near, found, arrived,
                near_lengths, over_masses, floor_masses, t, p, floor, k, peak, low, high, BLOCKS, CHUNK, WIDTH,
            )  # fmt: skip


@triton.jit
def last(
    logits, stride, vocab, seed, index, temperature, top_p, min_p, top_k, seats, counts,
    out_id, out_peak, goals, listed, lengths, near, found, arrived,
    near_lengths, over_masses, floor_masses, edges, sums, above,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Ends the rows that `fine` has not."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, blocks = tl.program_id(1).to(tl.int64), tl.num_programs(0)
    t, p, floor, k = row_of(temperature, top_p, min_p, top_k, row)
    peak = tl.load(out_peak + row)
    if (t != 0.0) & finite(peak) & ((k > 0) | (p < 1.0)):
        top = tl.load(above + row)
        if top == top:
            reached = summed(sums + row * blocks * EDGES, blocks, BLOCKS)
            low, high = between(reached, tl.load(edges + row * EDGES + tl.arange(0, EDGES)), tl.load(goals + row))
            closed(
                logits, stride, vocab, seed, index, seats, counts, out_id, goals, listed, lengths, near, found, arrived,
                near_lengths, over_masses, floor_masses, t, p, floor, k, peak, low, tl.minimum(high, top),
                BLOCKS, CHUNK, WIDTH,
            )  # fmt: skip


@triton.jit
def closed(
    logits, stride, vocab, seed, index, seats, counts, out_id, goals, listed, lengths, near, found, arrived,
    near_lengths, over_masses, floor_masses, t, p, floor, k, peak, low, high,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gathers a row's scores from `low` to `high`, with top-k all from `low` on; its last block draws."""
    block, row, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    at = row * blocks + block
    search = (k > 0) | (p < 1.0)
    high = tl.where(k > 0, float("inf"), high)
    cool = LOG2E / t
    least = tl.where(floor > 0.0, peak + t * tl.log(tl.maximum(floor, 1e-37)), -float("inf"))
    near += row * blocks * CHUNK
    here = listed + at * CHUNK
    count = tl.load(lengths + at)
    chosen_before = 0
    over, kept = tl.zeros([CHUNK // 4], tl.float64), tl.zeros([CHUNK // 4], tl.float64)
    for start in range(0, count, CHUNK // 4):
        lane = start + tl.arange(0, CHUNK // 4)
        x = tl.load(here + lane, mask=lane < count, other=-float("inf"))
        weights = tl.exp2((x - peak) * cool).to(tl.float64)
        over += tl.where(x >= high, weights, 0.0)
        kept += tl.where(x >= least, weights, 0.0)
        chosen = (x >= low) & (x < high) & (lane < count)
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        number = tl.max(place, 0) + 1
        if number > 0:
            tl.store(near + tl.atomic_add(found + row, number) + place, x, mask=chosen)
            tl.store(here + chosen_before + place, x, mask=chosen)
        chosen_before += number
    tl.store(over_masses + at, tl.sum(over, 0))
    tl.store(floor_masses + at, tl.sum(kept, 0))
    tl.store(near_lengths + at, chosen_before)
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1) == blocks - 1:
        lane = tl.arange(0, BLOCKS)
        masses = tl.load(over_masses + row * blocks + lane, mask=lane < blocks, other=0.0)
        found_least = -float("inf")
        if search:
            number = tl.load(found + row)
            key = key_of(low).to(tl.int64)
            top = key_of(tl.minimum(high, peak)).to(tl.int64) + (high > peak).to(tl.int64)
            goal = tl.load(goals + row) - tl.sum(masses, 0)
            for step in range(tl.where(k > 0, 0, 1), tl.where(p < 1.0, 2, 1)):  # top-k, then top-p of what it kept
                if (step == 1) & (k > 0):
                    goal = p * mass_from(near, number, value_of(key.to(tl.int32)), peak, cool)
                key = threshold(near, number, peak, cool, step == 0, goal, key, top)
            found_least = value_of(key.to(tl.int32))
        if least > found_least:
            masses = tl.load(floor_masses + row * blocks + lane, mask=lane < blocks, other=0.0)
        else:
            masses += listed_masses(
                listed + row * blocks * CHUNK, near_lengths + row * blocks, blocks, tl.maximum(least, found_least),
                peak, cool, BLOCKS, CHUNK, WIDTH,
            )  # fmt: skip
        least = tl.maximum(least, found_least)
        uniform = uniform_of(tl.load(seed + row), tl.load(index + row))
        token = drawn(logits + row * stride, vocab, masses, least, peak, cool, uniform, BLOCKS, CHUNK)
        finished(token, out_id, seats, counts, vocab, row)
