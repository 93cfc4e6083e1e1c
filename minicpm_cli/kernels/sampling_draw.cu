// What the first block of a cluster does with what all have gathered, and the kernel.

__device__ __forceinline__ u32 collect() {  // the lists of all blocks; the length
    Memory &m = memory();
    const int lane = threadIdx.x;
    if (lane < 32) {
        u32 end = lane < blocks() ? (u32)told_by(lane).number : 0;
        for (int o = 1; o < 8; o *= 2) {
            const u32 left = (u32)__shfl_up_sync(~0u, (u64)end, o);
            if (lane >= o) end += left;
        }
        if (lane < 8) m.starts[lane + 1] = end;
    }
    __syncthreads();
    const u32 own = m.starts[1], length = m.starts[8];
    for (u32 i = own + threadIdx.x; i < length; i += THREADS) {
        int rank = 1;
        while (i >= m.starts[rank + 1]) rank++;
        const Told &t = told_by(rank);
        m.told.scores[i] = t.scores[i - m.starts[rank]], m.told.tokens[i] = t.tokens[i - m.starts[rank]];
    }
    __syncthreads();
    return length;
}
// The threshold among the listed scores; with `share` below 1 top-p chooses from what top-k keeps.
__device__ __forceinline__ float threshold(const Draw &d, Aim aim, double share, u32 listed, Range range) {
    Memory &m = memory();
    u64 above = of_cluster(&Told::above, Sum{}), goal = aim.goal(of_cluster(&Told::sum, Sum{}));
    for (;;) {
        u32 number;
        while (range.top(d.peak) != key_of(range.low)) narrow(d, aim, true, listed, goal, range, above, number);
        if (!aim.unit || !(share < 1.)) return range.low;
        u64 mass[1] = {};
        for (u32 i = threadIdx.x; i < listed; i += THREADS)
            if (m.told.scores[i] >= range.low) mass[0] += mass_of(d, m.told.scores[i]);
        of_block(mass, Sum{});
        aim.unit = false, aim.share = share;
        goal = aim.goal(mass[0]), above = 0;
        range.high = infinite();
    }
}
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}
__device__ __forceinline__ double uniform_of(u64 seed, u64 index) {  // engine/draws.py
    const u64 step = 0x9E3779B97F4A7C15ull;
    return (double)(mixed(mixed(seed + step) + (index + 1) * step) >> 11) * (1. / 9007199254740992.);
}
// The first token by id where the mass of those that are kept exceeds uniform * total: its warp, its thread, itself.
__device__ __forceinline__ int drawn(const Draw &d, float least, u32 listed, double uniform) {
    Memory &m = memory();
    const int t = threadIdx.x, warps = blocks() * WARPS;
    clear_deep();
    __syncthreads();
    for (u32 i = t; i < listed; i += THREADS)
        if (m.told.scores[i] >= least)
            add_mass((m.told.tokens[i] + d.r.before) / EACH / d.r.share, mass_of(d, m.told.scores[i]));
    __syncthreads();
    u64 own = t < warps ? told_by(t / WARPS).kept[t % WARPS] + mass_at(m.told, t) : 0;
    u64 v[1] = {own}, total[1];
    sums_before(v, total);
    const u64 aim = (u64)(uniform * (double)total[0]), goal = aim < total[0] ? aim : total[0] - 1;
    if (v[0] <= goal && goal < v[0] + own) m.first = t, m.before = goal - v[0];
    __syncthreads();
    const int begin = m.first * d.r.share, end = min(begin + d.r.share, d.r.groups);
    const int mine = (end - begin + THREADS - 1) / THREADS, from = begin + t * mine, to = min(from + mine, end);
    u64 rest = m.before;
    own = 0;
    auto visit = [&](auto see) {
        for (int group = from; group < to; group++) {
            Raw raw;
            float x[EACH];
            request(d.r, group, raw);
            scores_of(d.r, group, raw, x);
#pragma unroll
            for (int i = 0; i < EACH; i++) see(group * EACH - d.r.before + i, x[i] >= least ? mass_of(d, x[i]) : 0);
        }
    };
    visit([&](int, u64 mass) { own += mass; });
    v[0] = own;
    sums_before(v, total);
    if (v[0] <= rest && rest < v[0] + own) {
        rest -= v[0];
        bool found = false;
        visit([&](int token, u64 mass) {
            if (!found && rest < mass) m.token = token, found = true;
            rest -= found ? 0 : mass;
        });
    }
    __syncthreads();
    return m.token;
}
__device__ __forceinline__ void finish(const Draw &d, int row, int token) {
    if (threadIdx.x) return;
    d.p.ids[row] = token, d.p.peaks[row] = d.peak;
    if (d.r.counts) const_cast<int *>(d.r.counts)[token] += 2;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) sampling(const __grid_constant__ Params p) {
    Memory &m = memory();
    const int row = blockIdx.x / blocks();
    const bool first = block_rank() == 0;
    admit_next();
    await_inputs();
    const bool greedy = !p.temperature;
    Draw d = {p, row_of(p, row), 0.f, 0.f, greedy ? 0.f : p.temperature[row], -LARGEST};
    const double top_p = greedy ? 0. : p.top_p[row];
    const float min_p = greedy ? 0.f : p.min_p[row];
    int k = greedy ? 1 : p.top_k[row];
    float bottom;
    const u64 best = peak_of(d.r, greedy, bottom);
    const int likeliest = (int)~(u32)best;
    d.peak = number_of((u32)(best >> 32));
    if (d.temperature == 0.f || k == 1 || top_p == 0. || !finite(d.peak)) {
        if (first) finish(d, row, likeliest < p.vocab ? likeliest : 0);
        if (blocks() > 1) meet_cluster();  // the others' memory is read until here
        return;
    }
    k = k > 0 && k < p.vocab ? k : 0;
    d.temperature = fminf(fmaxf(d.temperature, 1e-30f), 1e30f);
    d.cool = LOG2E / d.temperature;
    if (min_p > 0.f) d.least = fmaxf(d.least, d.peak + d.temperature * logf(fmaxf(min_p, 1e-37f)));
    Aim aim = {k || top_p < 1., k > 0, k ? (double)k : top_p, -LARGEST, k && top_p < 1. ? -LARGEST : d.least};
    for (;;) {
        const Range range = search(d, aim, bottom);
        const bool all = aim.unit && range.high > d.peak;  // that top-k keeps are listed
        const bool more = aim.unit && top_p < 1. && !all;
        if (first) {
            const u32 listed = range.known() ? 0 : collect();
            float found = range.low;
            if (!range.known()) found = threshold(d, aim, all ? top_p : 1., listed, range);
            if (!more) {
                found = fmaxf(found, d.least);
                finish(d, row, drawn(d, found, listed, uniform_of((u64)p.seed[row], (u64)p.index[row])));
            } else if (threadIdx.x == 0)
                m.told.threshold = found;
        }
        if (blocks() > 1 || more) meet();
        if (!more) return;
        aim = {true, false, top_p, told_by(0).threshold, d.least};
    }
}
