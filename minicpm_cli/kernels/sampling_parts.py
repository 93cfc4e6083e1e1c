"""What the kernels of `sampling` share: keys, weights, uniform numbers, the search on a list, the draw in a chunk."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOWHERE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
PIVOTS: tl.constexpr = tl.constexpr(8)


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
def chunk_of(logits, first, vocab, SIZE: tl.constexpr):
    """Ids and float32 scores of SIZE tokens of a row; -inf beyond the vocabulary."""
    ids = first + tl.arange(0, SIZE)
    return ids, tl.load(logits + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)


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
    _, x = chunk_of(logits, block * CHUNK, vocab, CHUNK)
    weights = tl.where(x >= least, tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
    part, goal = place_of(tl.sum(tl.reshape(weights, (CHUNK // 128, 128)), 1), goal, CHUNK // 128)
    first = block * CHUNK + part * 128
    _, x = chunk_of(logits, first, vocab, 128)
    weights = tl.where(x >= least, tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
    place, goal = place_of(weights, goal, 128)
    return first + place


@triton.jit
def tile_of(listed, counts, blocks, start, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH scores of every chunk's list from `start` on, [BLOCKS * WIDTH]; NaN where a list has ended."""
    lane = tl.arange(0, BLOCKS * WIDTH)
    block, column = lane // WIDTH, start + lane % WIDTH
    count = tl.load(counts + block, mask=block < blocks, other=0)
    return tl.load(listed + block * CHUNK + column, mask=column < count, other=float("nan"))


@triton.jit
def threshold(
    listed, counts, blocks, longest, peak, cool, unit, goal, low, high,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The key of the largest score whose mass with all above it reaches `goal`; `low` where none does.

    `low` and `high` are int64 keys: the mass reaches it from `low` on and does not from `high` on.
    `unit` counts every token as 1.
    """
    while high - low > 1:
        step = tl.maximum((high - low) // PIVOTS, 1)
        keys = low + step * (1 + tl.arange(0, PIVOTS)).to(tl.int64)
        pivots = value_of(tl.minimum(keys, high).to(tl.int32))
        mass = tl.zeros([PIVOTS], tl.float64)
        for start in range(0, longest, WIDTH):
            x = tile_of(listed, counts, blocks, start, BLOCKS, CHUNK, WIDTH)
            weights = tl.where(unit, 1.0, tl.exp2((x - peak) * cool)).to(tl.float64)
            mass += tl.sum(tl.where(x[None, :] >= pivots[:, None], weights[None, :], 0.0), 1)
        good = tl.sum((mass >= goal).to(tl.int64), 0)
        high = tl.minimum(high, low + (good + 1) * step)
        low = tl.minimum(low + good * step, high - 1)
    return low


@triton.jit
def listed_masses(
    listed, counts, blocks, longest, least, peak, cool,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The mass [BLOCKS] of the listed scores from `least` on, by chunk."""
    masses = tl.zeros([BLOCKS], tl.float64)
    for start in range(0, longest, WIDTH):
        x = tile_of(listed, counts, blocks, start, BLOCKS, CHUNK, WIDTH)
        weights = tl.where(x >= least, tl.exp2((x - peak) * cool), 0.0).to(tl.float64)
        masses += tl.sum(tl.reshape(weights, (BLOCKS, WIDTH)), 1)
    return masses
