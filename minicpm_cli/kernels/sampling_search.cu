// The threshold is the largest score whose mass with all above it reaches top-p's share (or whose number reaches top-k).
// How many scores lie in each step below the peak, and what a score there weighs at the least and at the most, leaves
// few steps for it; their scores are listed and searched exactly. Where too many lie there, as equal ones may, the row
// is read again with steps of keys, whose masses are summed exactly.

struct Draw {
    const Params &p;
    Row r;
    float peak, cool, temperature, least;  // min-p keeps nothing below `least`
};
struct Range {  // `low` <= threshold < `high`; both the same where nothing is to be searched
    float low, high;
    __device__ __forceinline__ int top(float peak) const { return high > peak ? key_of(peak) : key_of(high) - 1; }
    __device__ __forceinline__ bool known() const { return low == high; }
};

__device__ __forceinline__ u64 mass_of(const Draw &d, float x) { return fixed(power((x - d.peak) * d.cool)); }

// ---- the peak ----
__device__ __forceinline__ u32 ordered(float x) { return (u32)key_of(x) ^ 0x80000000u; }
__device__ __forceinline__ float number_of(u32 order) { return value_of((int)(order ^ 0x80000000u)); }

// The peak's key and the complement of the lowest token that has it; the lowest score that is not -inf.
__device__ __forceinline__ u64 peak_of(const Row &r, bool greedy, float &bottom) {
    Memory &m = memory();
    float best = lowest();
    int where = -1, token = 0x7fffffff;
    bottom = infinite();
    each(r, false, [&](int group, const float(&x)[EACH]) {
        float most = x[0];
#pragma unroll
        for (int i = 1; i < EACH; i++) most = larger(most, x[i]);
        if (most > best || most != most) best = most, where = group;
        if (!greedy)
#pragma unroll
            for (int i = 0; i < EACH; i++) bottom = fminf(bottom, x[i] > lowest() ? x[i] : infinite());
    });
    if (where >= 0) {
        Raw raw = {};
        float x[EACH];
        request(r, where, raw);
        scores_of(r, where, raw, x);
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (key_of(x[i]) == key_of(best)) token = where * EACH - r.before + i;
    }
    u64 top = of_block((u64)ordered(best) << 32 | (u32)~token, Most{});
    u64 end = greedy ? 0 : of_block((u64)~ordered(bottom), Most{});
    if (threadIdx.x == 0) m.told.best = top, m.told.bottom = end;
    meet();
    for (int rank = 0; rank < blocks(); rank++)
        top = Most{}(top, told_by(rank).best), end = Most{}(end, told_by(rank).bottom);
    bottom = number_of(~(u32)end);
    return top;
}

// ---- a threshold in a row ----
struct Steps {
    float scale;  // steps of a score's distance from the peak
    float fall;   // logarithm to base 2 of what a step takes from a mass
    __device__ __forceinline__ u64 most(float step) const { return fixed(power((.01f - step) * fall) * 1.000001f) + 1; }
    __device__ __forceinline__ u64 fewest(float step) const { return fixed(power((-1.01f - step) * fall) * .999999f); }
};

// Counts the scores from `floor` on in their steps; their mass, or with `unit` their number.
__device__ __forceinline__ u64 count_steps(const Draw &d, bool unit, float floor, float scale) {
    Memory &m = memory();
    for (int b = threadIdx.x; b < BINS; b += THREADS) m.told.bins[b] = 0;
    __syncthreads();
    u64 sum = 0;
    each(d.r, true, [&](int, const float(&x)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool chosen = x[i] >= floor;
            const float step = (d.peak - x[i]) * scale;
            if (chosen) sum += unit ? 1 : mass_of(d, x[i]);
            if (chosen && step < BINS) atomicAdd(&m.told.bins[(int)step], 1u);
        }
    });
    sum = of_block(sum, Sum{});
    if (threadIdx.x == 0) m.told.sum = sum;
    meet();
    sum = 0;
    for (int rank = 0; rank < blocks(); rank++) sum += told_by(rank).sum;
    return sum;
}
// Leaves in memory the first step that the threshold can be in, the last one (BINS: it may lie below them all), and the
// numbers of scores before the first and up to the last.
__device__ __forceinline__ void locate(const Steps &s, bool unit, u64 goal) {
    enum { MINE = BINS / THREADS };
    Memory &m = memory();
    u32 numbers[MINE];
    u64 v[3] = {};
    if (threadIdx.x == 0) m.first = m.last = BINS, m.before = m.number = 0;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = threadIdx.x * MINE + i;
        numbers[i] = 0;
        for (int rank = 0; rank < blocks(); rank++) numbers[i] += told_by(rank).bins[b];
        v[0] += unit ? numbers[i] : numbers[i] * s.most(b);
        v[1] += unit ? numbers[i] : numbers[i] * s.fewest(b);
        v[2] += numbers[i];
    }
    sums_before(v);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = threadIdx.x * MINE + i;
        const u64 most = v[0] + (unit ? numbers[i] : numbers[i] * s.most(b));
        const u64 fewest = v[1] + (unit ? numbers[i] : numbers[i] * s.fewest(b));
        if (v[0] < goal && most >= goal) m.first = b, m.before = v[2];
        v[2] += numbers[i];
        if (v[1] < goal && fewest >= goal) m.last = b, m.number = (u32)v[2];
        v[0] = most, v[1] = fewest;
    }
    __syncthreads();
}

// Narrows a range to one step of keys of it. `list`: the scores are those that this block has listed, else the row's.
__device__ __forceinline__ void narrow(
    const Draw &d, bool unit, bool list, u32 listed, u64 goal, Range &range, u64 &above, u32 &number
) {
    enum { MINE = DEEP / THREADS };
    Memory &m = memory();
    const int top = range.top(d.peak), bottom = key_of(range.low);
    const u32 width = (u32)top - (u32)bottom;
    int shift = 0;
    while (width >> shift >= DEEP) shift++;
    if (!list) meet();
    clear_deep();
    if (threadIdx.x == 0) m.first = width >> shift, m.before = m.number = 0;
    __syncthreads();
    u64 sum = 0;
    auto add = [&](float x) {
        if (x >= range.high) sum += unit ? 1 : mass_of(d, x);
        if (!(x >= range.low && x < range.high)) return;
        const u32 b = ((u32)top - (u32)key_of(x)) >> shift;
        atomicAdd(m.told.deep + b, 1u);
        if (!unit) add_mass(b, mass_of(d, x));
    };
    if (list)
        for (u32 i = threadIdx.x; i < listed; i += THREADS) add(m.told.scores[i]);
    else
        each(d.r, false, [&](int, const float(&x)[EACH]) {
#pragma unroll
            for (int i = 0; i < EACH; i++) add(x[i]);
        });
    sum = of_block(sum, Sum{});
    const int ranks = list ? 1 : blocks();
    if (!list) {
        if (threadIdx.x == 0) m.told.sum = sum;
        meet();
        above = 0;
        for (int rank = 0; rank < ranks; rank++) above += told_by(rank).sum;
    }
    u64 masses[MINE], v[1] = {};
    u32 numbers[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = threadIdx.x * MINE + i;
        u64 mass = 0;
        numbers[i] = 0;
        for (int rank = 0; rank < ranks; rank++) {
            const Told &t = list ? m.told : told_by(rank);
            numbers[i] += t.deep[b], mass += mass_at(t, b);
        }
        masses[i] = unit ? numbers[i] : mass;
        v[0] += masses[i];
    }
    sums_before(v);
    const u64 rest = goal > above ? goal - above : 1;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        if (v[0] < rest && v[0] + masses[i] >= rest)
            m.first = threadIdx.x * MINE + i, m.before = v[0], m.number = numbers[i];
        v[0] += masses[i];
    }
    __syncthreads();
    const i64 first = m.first, end = (i64)top + 1 - (first << shift), start = end - (1ll << shift);
    if (first) range.high = value_of((int)end);
    if (start > bottom) range.low = value_of((int)start);
    above += m.before, number = m.number;
    __syncthreads();
}

// What is kept for certain, by warps of the cluster, and lists of the scores in the range. Returns their number.
__device__ __forceinline__ u32 gather(const Draw &d, const Range &range) {
    Memory &m = memory();
    if (threadIdx.x == 0) m.told.listed = m.told.number = 0;
    __syncthreads();
    u64 kept = 0;
    u32 number = 0;
    each(d.r, false, [&](int group, const float(&x)[EACH]) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (x[i] >= range.high) kept += mass_of(d, x[i]), number++;
            if (x[i] >= range.low && x[i] < range.high) {
                const u32 place = atomicAdd(&m.told.listed, 1u);
                if (place < LIST) m.told.scores[place] = x[i], m.told.tokens[place] = group * EACH - d.r.before + i;
            }
        }
    });
    kept = of_warp(kept, Sum{});
    number = (u32)of_warp(number, Sum{});
    if (threadIdx.x % 32 == 0) m.told.kept[threadIdx.x / 32] = kept, atomicAdd(&m.told.number, number);
    meet();
    u32 listed = 0;
    for (int rank = 0; rank < blocks(); rank++) listed += told_by(rank).listed;
    return listed;
}

// What a stage of a draw looks for: the scores from `floor` on that make up a share of their mass, or with `unit` a
// number of them. Neither: all of them. Nothing below `least` is asked for.
struct Aim {
    bool search, unit;
    double share;
    float floor, least;
};

// The steps that the threshold can be in; `number` of scores there, 0 where it is not known. The goal in `goal`.
__device__ __forceinline__ Range coarse(const Draw &d, const Aim &aim, float bottom, u64 &goal, u32 &number) {
    Memory &m = memory();
    float span = (d.peak - fmaxf(bottom, aim.floor)) * 1.0001f;
    // Below this distance lies less than 1 - top_p of the mass, whatever the scores are.
    if (!aim.unit) span = fminf(span, d.temperature * logf(d.r.vocab / (float)(1. - aim.share)) * 1.001f);
    span = fminf(fmaxf(span, 1e-30f), 1e38f);
    const Steps s = {BINS / span, d.cool * (span / BINS)};
    const u64 whole = count_steps(d, aim.unit, aim.floor, s.scale);
    goal = aim.unit ? (u64)aim.share : (u64)ceil(aim.share * (double)whole);
    goal = goal < 1 ? 1 : goal < whole ? goal : whole;
    locate(s, aim.unit, goal);
    const float slack = fabsf(d.peak) * 2.4e-7f;
    Range range = {aim.floor, infinite()};
    if (m.first) range.high = d.peak - (m.first - .01f) / s.scale + slack;
    if (m.last < BINS) range.low = fmaxf(aim.floor, d.peak - (m.last + 1.01f) / s.scale - slack);
    if (aim.unit && m.last < BINS && m.number <= LIST) range.high = infinite();  // top-p may choose from the list then
    number = m.last < BINS ? m.number - (u32)(range.high > d.peak ? 0 : m.before) : 0;
    return range;
}
// The range of the threshold, whose scores are listed.
__device__ __forceinline__ Range search(const Draw &d, const Aim &aim, float bottom, u64 &goal) {
    Range range = {aim.least, aim.least};
    u32 number = 0;
    if (aim.search) range = coarse(d, aim, bottom, goal, number);
    for (;;) {
        if (aim.least >= range.high)
            range.low = range.high = aim.least;
        else if (range.top(d.peak) == key_of(range.low))  // one key
            range.high = range.low = fmaxf(range.low, aim.least);
        if (number <= LIST || range.known()) {
            const u32 listed = gather(d, range);
            if (listed <= LIST || range.known()) return range;
        }
        u64 above = 0;
        narrow(d, aim.unit, false, 0, goal, range, above, number);
    }
}
