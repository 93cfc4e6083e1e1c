"""What the kernels of `sampling` share: keys, uniform numbers, chunks of scores, lists of them, sums, the draw."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
EDGES: tl.constexpr = tl.constexpr(16)
PIVOTS: tl.constexpr = tl.constexpr(8)
PART: tl.constexpr = tl.constexpr(128)
FEW: tl.constexpr = tl.constexpr(128)
TILE: tl.constexpr = tl.constexpr(256)
FIXED: tl.constexpr = tl.constexpr(float(2**44))  # int64 holds the sum of 131,072 masses of 1, in any order the same


@triton.jit
def key_of(x):
    """int32 in the order of float32 values: NaN above all, both zeros equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@triton.jit
def row_of(temperature, top_p, min_p, top_k, row):
    """Temperature, top_p, min_p and top_k of a row; temperature 0 where it is greedy."""
    t = tl.load(temperature + row)
    p = tl.load(top_p + row).to(tl.float64)
    floor = tl.load(min_p + row)
    k = tl.load(top_k + row)
    t = tl.where((t == 0.0) | (k == 1) | (p == 0.0), 0.0, tl.minimum(tl.maximum(t, 1e-30), 1e30))
    return t, p, floor, k


@triton.jit
def chunk_of(logits, block, vocab, CHUNK: tl.constexpr):
    """Ids and float32 scores of a chunk, -inf beyond the vocabulary. Loads without masks are under way together."""
    ids = block * CHUNK + tl.arange(0, CHUNK)
    if (block + 1) * CHUNK <= vocab:
        x = tl.load(logits + ids).to(tl.float32)
    else:
        x = tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    return ids, x


@triton.jit
def mixed(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, index):
    """engine/draws.py on the device."""
    step = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    stream = mixed(seed.to(tl.uint64) + step)
    bits = mixed(stream + (index.to(tl.uint64) + 1) * step)
    return (bits >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def listed_chunk(logits, block, vocab, least, listed, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """Lists the scores of a chunk from `least` on, thread by thread, and returns their number."""
    _, x = chunk_of(logits, block, vocab, CHUNK)
    chosen = (x >= least) & (x > -float("inf"))
    ones = tl.reshape(chosen.to(tl.int32), (CHUNK // LANES, LANES))  # a column is one thread's
    of_lane = tl.sum(ones, 0)
    before = tl.cumsum(of_lane, 0)
    place = tl.cumsum(ones, 0) + (before - of_lane)[None, :] - 1
    tl.store(listed + tl.reshape(place, (CHUNK,)), x, mask=chosen)
    tl.debug_barrier()
    return tl.max(before, 0)


@triton.jit
def edge_sums(listed, count, edges, peak, cool, unit, WIDTH: tl.constexpr):  # -> [EDGES] float32
    """The mass, or with `unit` the number, of a chunk's listed scores from each edge on."""
    sums = tl.zeros([EDGES, WIDTH], tl.float32)
    for start in range(0, count, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        x = tl.load(listed + lane, mask=lane < count, other=-float("inf"))
        weights = tl.where(unit, 1.0, tl.exp2((x - peak) * cool))
        weights = tl.where(lane < count, weights, 0.0)
        sums += (x[None, :] >= edges[:, None]).to(tl.float32) * weights[None, :]
    return tl.sum(sums, 1)


@triton.jit
def summed(sums, blocks, BLOCKS: tl.constexpr):  # -> [EDGES] float64
    """The sums of all chunks of a row."""
    lane, step = tl.arange(0, BLOCKS), tl.arange(0, EDGES)
    at = sums + lane[:, None] * EDGES + step[None, :]
    return tl.sum(tl.load(at, mask=lane[:, None] < blocks, other=0.0).to(tl.float64), 0)


@triton.jit
def between(reached, scores, goal):  # [EDGES], [EDGES]
    """The edge where the sums reach the goal, -inf if none does, and the edge before, +inf if it is the first."""
    step = tl.arange(0, EDGES)
    place = tl.sum((reached < goal).to(tl.int32), 0)
    low = tl.max(tl.where(step == place, scores, -float("inf")), 0)
    high = tl.max(tl.where(step == place - 1, scores, -float("inf")), 0)
    return low, tl.where(place == 0, float("inf"), high)


@triton.jit
def aimed(reached, goal, low, top):
    """Sixteen edges from `top` down to `low`, closest where the goal should be by the masses of three steps."""
    step = tl.arange(0, EDGES)
    place = tl.sum((reached < goal).to(tl.int32), 0)
    end = tl.sum(tl.where(step == place, reached, 0.0), 0)
    start = tl.sum(tl.where(step == place - 1, reached, 0.0), 0)
    mass = tl.maximum(end - start, 1e-30)
    share = tl.minimum(tl.maximum((goal - start) / mass, 0.0), 1.0).to(tl.float32)
    before = start - tl.sum(tl.where(step == place - 2, reached, 0.0), 0)
    after = tl.sum(tl.where(step == place + 1, reached, 0.0), 0) - end
    inner = (place > 0) & (place < EDGES - 1)
    slope = tl.where(inner, tl.minimum(tl.maximum((after - before) / (2.0 * mass), -1.0), 1.0), 0.0).to(tl.float32)
    share += slope * 0.5 * share * (1.0 - share) / (1.0 + slope * (share - 0.5))
    away = step - EDGES // 2 + 1
    distance = tl.where(away == 0, 0.0, tl.exp2(tl.abs(away).to(tl.float32) - EDGES // 2 - 1.0))
    share = tl.minimum(tl.maximum(share + tl.where(away < 0, -distance, distance), 0.0), 1.0)
    return tl.where(step == EDGES - 1, low, tl.maximum(top - (top - low) * share, low))


@triton.jit
def fixed(x, there, peak, cool, unit):
    """Masses as integers: their sums are the same in any order."""
    weights = tl.where(unit, 1.0, tl.exp2((x - peak) * cool)).to(tl.float64)
    return tl.where(there, (weights * FIXED).to(tl.int64), 0)


@triton.jit
def mass_from(near, count, least, peak, cool):
    """The mass of the scores in a list from `least` on."""
    mass = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        lane = start + tl.arange(0, TILE)
        x = tl.load(near + lane, mask=lane < count, other=-float("inf"))
        mass += fixed(x, (lane < count) & (x >= least), peak, cool, False)
    return tl.sum(mass, 0).to(tl.float64) / FIXED


@triton.jit
def threshold(near, count, peak, cool, unit, goal, low, high):
    """The int64 key of the largest score in a list whose mass with all above it reaches `goal`; `low` where none does.

    `high` is a key from which on the goal is not reached. `unit` counts every token as 1.
    """
    if count <= FEW:
        lane = tl.arange(0, FEW)
        x = tl.load(near + lane, mask=lane < count, other=-float("inf"))
        masses = fixed(x, lane < count, peak, cool, unit)
        for start in range(0, count, FEW // 8):
            some = start + tl.arange(0, FEW // 8)
            one = tl.load(near + some, mask=some < count, other=-float("inf"))
            reached = tl.sum(tl.where(x[None, :] >= one[:, None], masses[None, :], 0), 1).to(tl.float64) / FIXED
            keys = tl.where((reached >= goal) & (some < count), key_of(one).to(tl.int64), low)
            low = tl.maximum(low, tl.max(keys, 0))
    else:
        while high - low > 1:
            step = tl.maximum((high - low) // PIVOTS, 1)
            keys = low + step * (1 + tl.arange(0, PIVOTS)).to(tl.int64)
            pivots = value_of(tl.minimum(keys, high).to(tl.int32))
            mass = tl.zeros([PIVOTS, TILE], tl.int64)
            for start in range(0, count, TILE):
                lane = start + tl.arange(0, TILE)
                x = tl.load(near + lane, mask=lane < count, other=-float("inf"))
                masses = fixed(x, lane < count, peak, cool, unit)
                mass += tl.where(x[None, :] >= pivots[:, None], masses[None, :], 0)
            good = tl.sum((tl.sum(mass, 1).to(tl.float64) / FIXED >= goal).to(tl.int64), 0)
            high = tl.minimum(high, low + (good + 1) * step)
            low = tl.minimum(low + good * step, high - 1)
    return low


@triton.jit
def listed_masses(
    listed, lengths, blocks, least, peak, cool, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):
    """The mass [BLOCKS] of each chunk's listed scores from `least` on."""
    block, column = tl.arange(0, BLOCKS)[:, None], tl.arange(0, WIDTH)[None, :]
    count = tl.load(lengths + block, mask=block < blocks, other=0)
    longest = tl.max(tl.max(count, 1), 0)
    masses = tl.zeros([BLOCKS, WIDTH], tl.float64)
    for start in range(0, longest, WIDTH):
        there = start + column < count
        x = tl.load(listed + block * CHUNK + start + column, mask=there, other=-float("inf"))
        masses += tl.where(there & (x >= least), tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
    return tl.sum(masses, 1)


@triton.jit
def place_of(masses, goal, SIZE: tl.constexpr):
    """The first place with mass where the cumulative mass exceeds the goal, and what is left of the goal there."""
    lane = tl.arange(0, SIZE)
    reached = tl.cumsum(masses, 0)
    place = tl.min(tl.where((reached > goal) & (masses > 0.0), lane, SIZE), 0)
    last = tl.max(tl.where(masses > 0.0, lane, 0), 0)  # where two sums of the same masses round apart
    place = tl.where(place < SIZE, place, last)
    return place, goal - tl.max(tl.where(lane < place, reached, 0.0), 0)


@triton.jit
def drawn(
    logits,  # a row
    vocab,
    masses,  # [BLOCKS] float64, kept mass of each chunk
    least,  # the lowest score that is kept
    peak,
    cool,
    uniform,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first token by id where the cumulative mass exceeds uniform * total: its chunk, 128 ids of it, itself."""
    block, goal = place_of(masses, uniform * tl.sum(masses, 0), BLOCKS)
    _, x = chunk_of(logits, block, vocab, CHUNK)
    weights = tl.where(x >= least, tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
    part, goal = place_of(tl.sum(tl.reshape(weights, (CHUNK // PART, PART)), 1), goal, CHUNK // PART)
    _, x = chunk_of(logits, block * (CHUNK // PART) + part, vocab, PART)
    weights = tl.where(x >= least, tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
    place, goal = place_of(weights, goal, PART)
    return block * CHUNK + part * PART + place
