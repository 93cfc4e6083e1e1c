// The threshold is the largest score whose mass with all above it reaches top-p's share (or whose number reaches top-k).
// How many scores lie in each step below the peak, and what a score there weighs at the least and at the most, leaves
// few steps for it; their scores are listed and searched exactly. Where too many lie there, as equal ones may, the row
// is read again with steps of keys, whose masses are summed exactly.

struct Draw {
    const Params &p;
    Row r;
    float peak, cool, temperature, least;  // min-p keeps nothing below `least`
};
// What a stage of a draw looks for: of the scores from `floor` on those that make up a share of their mass, or with
// `unit` a number of them. Neither: all. Nothing below `least` is asked for.
struct Aim {
    bool search, unit;
    double share;
    float floor, least;
    __device__ __forceinline__ u64 goal(u64 whole) const {
        const u64 most = unit ? ~0ull : whole, part = (u64)(unit ? share : ceil(share * (double)whole));
        return part < 1 ? 1 : part < most ? part : most;
    }
};
struct Range {  // `low` <= threshold < `high`; both the same where nothing is to be searched
    float low, high;
    __device__ __forceinline__ int top(float peak) const { return high > peak ? key_of(peak) : key_of(high) - 1; }
    __device__ __forceinline__ bool known() const { return low == high; }
};

__device__ __forceinline__ u64 mass_of(const Draw &d, float x) { return fixed(power((x - d.peak) * d.cool)); }
// As far as a stage looks at them.
__device__ __forceinline__ void from_floor(float floor, float (&x)[EACH]) {
    if (floor == -LARGEST) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = x[i] >= floor ? x[i] : lowest();
}

// ---- the peak ----
__device__ __forceinline__ u32 ordered(float x) { return (u32)key_of(x) ^ 0x80000000u; }
__device__ __forceinline__ float number_of(u32 order) { return value_of((int)(order ^ 0x80000000u)); }

// The peak's key and the complement of the lowest token that has it; the lowest score that is not -inf.
__device__ __forceinline__ u64 peak_of(const Row &r, bool greedy, float &bottom) {
    Memory &m = memory();
    float best = lowest();
    int where = -1, token = 0x7fffffff;
    bottom = infinite();
    each<4>(r, false, [&](int group, const float(&x)[EACH]) {
        float most = x[0];
#pragma unroll
        for (int i = 1; i < EACH; i++) most = larger(most, x[i]);
        if (most > best || most != most) best = most, where = group;
        if (greedy) return;
        float least = x[0];
#pragma unroll
        for (int i = 1; i < EACH; i++) least = fminf(least, x[i]);
        if (least == lowest()) {
            least = infinite();
#pragma unroll
            for (int i = 0; i < EACH; i++) least = fminf(least, x[i] == lowest() ? infinite() : x[i]);
        }
        bottom = fminf(bottom, least);
    });
    if (where >= 0) {
        Raw raw;
        float x[EACH];
        request(r, where, raw);
        scores_of(r, where, raw, x);
#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (key_of(x[i]) == key_of(best)) token = where * EACH - r.before + i;
    }
    u64 v[2] = {(u64)ordered(best) << 32 | (u32)~token, (u64)~ordered(bottom)};
    of_block(v, Most{});
    if (threadIdx.x == 0) m.told.best = v[0], m.told.bottom = v[1];
    meet();
    if (!greedy) bottom = number_of(~(u32)of_cluster(&Told::bottom, Most{}));
    return of_cluster(&Told::best, Most{});
}

// ---- a threshold in a row ----
struct Steps {  // step b: around a distance of b / scale from the peak
    float scale;
    float fall;  // logarithm to base 2 of what a step takes from a mass
    __device__ __forceinline__ u64 most(int b) const { return fixed(power((.51f - b) * fall) * 1.000001f) + 1; }
    __device__ __forceinline__ u64 fewest(int b) const { return fixed(power((-.51f - b) * fall) * .999999f); }
};

// Counts the scores from `floor` on in their steps; bin BINS counts those below and what is -inf.
__device__ __forceinline__ void count_steps(const Draw &d, float floor, float scale) {
    u32 *bins = memory().told.bins;
    for (int b = threadIdx.x; b < BINS + 4; b += THREADS) bins[b] = 0;
    __syncthreads();
    each(d.r, true, [&](int, float(&x)[EACH]) {
        from_floor(floor, x);
#pragma unroll
        for (int i = 0; i < EACH; i++) {  // 2^23 + step, rounded to an integer
            const u32 step = __float_as_uint(__fmaf_rn(d.peak - x[i], scale, 8388608.f)) - 0x4b000000u;
            atomicAdd(bins + (step < BINS ? step : BINS), 1u);
        }
    });
    meet();
}
// Sums the bins of all blocks, a power of 2: each block a part of them, in its own memory.
__device__ __forceinline__ void merge() {
    Memory &m = memory();
    const int share = BINS / 4 / blocks();
    uint4 *own = (uint4 *)m.told.bins;
    for (int i = block_rank() * share + threadIdx.x; blocks() > 1 && i < (block_rank() + 1) * share; i += THREADS) {
        uint4 sum = {};
        for (int rank = 0; rank < blocks(); rank++) {
            const uint4 more = ((const uint4 *)told_by(rank).bins)[i];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        own[i] = sum;
    }
    if (threadIdx.x == 0) m.told.beyond = m.told.bins[BINS];
    meet();
}
// Leaves in memory the first step that the threshold can be in, the last one (BINS: it may lie below them all), and the
// numbers of scores before the first and up to the last.
__device__ __forceinline__ void locate(const Aim &aim, const Steps &s) {
    enum { MINE = BINS / THREADS };
    Memory &m = memory();
    u32 numbers[MINE] = {};
    if (threadIdx.x == 0) m.first = m.last = BINS, m.before = m.number = 0;
    merge();
    const int at = threadIdx.x * MINE, owner = at / (BINS / blocks());
    const uint4 *from = (const uint4 *)(told_by(owner).bins + at);
#pragma unroll
    for (int i = 0; i < MINE / 4; i++) {
        const uint4 four = from[i];
        numbers[4 * i] = four.x, numbers[4 * i + 1] = four.y;
        numbers[4 * i + 2] = four.z, numbers[4 * i + 3] = four.w;
    }
    const u64 beyond = of_cluster(&Told::beyond, Sum{});
    const auto most = [&](int i) { return numbers[i] * (aim.unit ? 1 : s.most(threadIdx.x * MINE + i)); };
    const auto fewest = [&](int i) { return numbers[i] * (aim.unit ? 1 : s.fewest(threadIdx.x * MINE + i)); };
    u64 v[3] = {}, all[3];
#pragma unroll
    for (int i = 0; i < MINE; i++) v[0] += most(i), v[1] += fewest(i), v[2] += numbers[i];
    sums_before(v, all);
    const u64 least_goal = aim.goal(all[1]), largest_goal = aim.goal(all[0] + beyond * s.most(BINS));
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const u64 at_most = v[0] + most(i), at_least = v[1] + fewest(i);
        if (v[0] < least_goal && at_most >= least_goal) m.first = threadIdx.x * MINE + i, m.before = v[2];
        v[2] += numbers[i];
        if (v[1] < largest_goal && at_least >= largest_goal) m.last = threadIdx.x * MINE + i, m.number = (u32)v[2];
        v[0] = at_most, v[1] = at_least;
    }
    __syncthreads();
}
// The steps that the threshold can be in, and the number of scores there: 0 where it is not known.
__device__ __forceinline__ Range coarse(const Draw &d, const Aim &aim, float bottom, u32 &number) {
    Memory &m = memory();
    float span = (d.peak - fmaxf(bottom, aim.floor)) * 1.0001f;
    // Below this distance lies less than a 256th of 1 - top_p of the mass, whatever the scores are.
    if (!aim.unit) span = fminf(span, d.temperature * (logf(d.r.vocab / (float)(1. - aim.share)) + 5.55f));
    span = fminf(fmaxf(span, 1e-30f), 1e38f);
    const Steps s = {(BINS - 1) / span, d.cool * (span / (BINS - 1))};
    count_steps(d, aim.floor, s.scale);
    locate(aim, s);
    const float slack = fabsf(d.peak) * 2.4e-7f;
    Range range = {aim.floor, infinite()};
    if (m.first) range.high = d.peak - (m.first - .51f) / s.scale + slack;
    if (m.last < BINS) range.low = fmaxf(aim.floor, d.peak - (m.last + .51f) / s.scale - slack);
    if (aim.unit && m.last < BINS && m.number <= LIST) range.high = infinite();  // top-p may choose from the list then
    number = m.last < BINS ? m.number - (u32)(range.high > d.peak ? 0 : m.before) : 0;
    return range;
}

// Narrows a range to one step of keys of it. With `listed` the scores are those that this block has listed, else the
// row's: then what is above the range and the goal are found, too.
__device__ __forceinline__ void narrow(
    const Draw &d, const Aim &aim, bool list, u32 listed, u64 &goal, Range &range, u64 &above, u32 &number
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
    u64 sum = 0, higher = 0;
    const auto add = [&](float x) {
        const u64 mass = aim.unit ? x > lowest() : mass_of(d, x);
        sum += mass;
        if (x >= range.high) higher += mass;
        if (!(x >= range.low && x < range.high)) return;
        const u32 b = ((u32)top - (u32)key_of(x)) >> shift;
        atomicAdd(m.told.deep + b, 1u);
        if (!aim.unit) add_mass(b, mass);
    };
    if (list)
        for (u32 i = threadIdx.x; i < listed; i += THREADS) add(m.told.scores[i]);
    else
        each(d.r, false, [&](int, float(&x)[EACH]) {
            from_floor(aim.floor, x);
#pragma unroll
            for (int i = 0; i < EACH; i++) add(x[i]);
        });
    if (list) {
        __syncthreads();
    } else {
        u64 v[2] = {sum, higher};
        of_block(v, Sum{});
        if (threadIdx.x == 0) m.told.sum = v[0], m.told.above = v[1];
        meet();
        above = of_cluster(&Told::above, Sum{}), goal = aim.goal(of_cluster(&Told::sum, Sum{}));
    }
    u64 masses[MINE], v[1] = {}, all[1];
    u32 numbers[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int b = threadIdx.x * MINE + i;
        masses[i] = numbers[i] = 0;
        for (int rank = 0; rank < (list ? 1 : blocks()); rank++) {
            const Told &t = list ? m.told : told_by(rank);
            numbers[i] += t.deep[b], masses[i] += mass_at(t, b);
        }
        if (aim.unit) masses[i] = numbers[i];
        v[0] += masses[i];
    }
    sums_before(v, all);
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

// The mass from `floor` on; of it what is kept for certain, by warps of the cluster; lists of the scores in the range.
// Returns their number.
__device__ __forceinline__ u32 gather(const Draw &d, const Aim &aim, const Range &range) {
    Memory &m = memory();
    if (threadIdx.x == 0) m.told.listed = 0;
    __syncthreads();
    Masses sum, kept;
    u32 number = 0, terms = 0;
    each(d.r, false, [&](int group, float(&x)[EACH]) {
        from_floor(aim.floor, x);
        bool chosen = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const Masses mass = Masses::of(power((x[i] - d.peak) * d.cool));
            const bool above = x[i] >= range.high;
            sum += mass, kept += above ? mass : Masses::none();
            if (!above && x[i] >= range.low) chosen = true;
        }
        terms += EACH;
        if (aim.unit)
#pragma unroll
            for (int i = 0; i < EACH; i++) number += x[i] >= range.high;
        if (!chosen) return;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (x[i] >= range.low && x[i] < range.high) {
                const u32 place = atomicAdd(&m.told.listed, 1u);
                if (place < LIST) m.told.scores[place] = x[i], m.told.tokens[place] = group * EACH - d.r.before + i;
            }
    });
    u64 v[3] = {sum.value(terms), kept.value(terms), number};
    const u64 of_warp_kept = of_warp(v[1], Sum{});
    if (threadIdx.x % 32 == 0) m.told.kept[threadIdx.x / 32] = of_warp_kept;
    of_block(v, Sum{});
    if (threadIdx.x == 0) m.told.sum = v[0], m.told.above = aim.unit ? v[2] : v[1], m.told.number = m.told.listed;
    meet();
    return (u32)of_cluster(&Told::number, Sum{});
}
// The range of the threshold, whose scores are listed.
__device__ __forceinline__ Range search(const Draw &d, const Aim &aim, float bottom) {
    Range range = {aim.least, aim.least};
    u32 number = 0;
    if (aim.search) range = coarse(d, aim, bottom, number);
    for (;;) {
        if (aim.least >= range.high)
            range.low = range.high = aim.least;
        else if (range.top(d.peak) == key_of(range.low))  // one key
            range.high = range.low = fmaxf(range.low, aim.least);
        if (number <= LIST || range.known()) {
            const u32 listed = gather(d, aim, range);
            if (listed <= LIST || range.known()) return range;
        }
        u64 above = 0, goal;
        narrow(d, aim, false, 0, goal, range, above, number);
    }
}
