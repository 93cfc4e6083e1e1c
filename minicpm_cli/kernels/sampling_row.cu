// Draws a token for each row of logits, a row by one cluster of blocks: what reads a row, and what a block or cluster
// has in common.
//
// A row's logits are read three times, partly from the L2 cache: its peak; how many scores lie in each of BINS steps
// below the peak; then its mass, what it keeps for certain, and a list of the scores among which the threshold is.
// Masses are integers, so a sum is the same in any order and for any number of blocks.
//
// Set by the compiler's options: THREADS, of a block; LIST, scores that are listed at most.

typedef unsigned u32;
typedef unsigned long long u64;
typedef long long i64;

enum { WARPS = THREADS / 32, EACH = 8 };  // scores of a group
enum { BINS = 4096, DEEP = 1024 };
constexpr float UNIT = 549755813888.f;  // 2^39, of a mass of 1
constexpr float LOG2E = 1.4426950408889634f, LARGEST = 3.4028234663852886e38f;
constexpr u32 PART = 32767;  // a third of a mass: 2^17 of them fit into 32 bits

struct Params {
    const unsigned char *logits;
    const i64 *seed, *index;
    const float *temperature;  // none: all rows are greedy
    const double *top_p;
    const float *min_p;
    const int *top_k;
    const int *seat;  // none: no penalties
    const float *repetition, *frequency, *presence;
    int *counts;
    const u32 *allowed;  // none: all tokens are
    i64 *ids;
    float *peaks;
    i64 stride;  // of a row of logits
    int allowed_stride, vocab, kind;  // of logits: 0 float32, 1 bfloat16, 2 float16
};

struct Told {  // what a block lets the others of its cluster read
    u32 bins[BINS + 4], deep[4 * DEEP];  // numbers of scores; in `deep` then also the three parts of their masses
    u64 best, bottom, sum, above;
    u64 kept[WARPS];
    u64 number, beyond;
    float threshold;
    u32 listed;
    float scores[LIST];
    int tokens[LIST];
};
struct Memory {
    Told told;
    u64 of_warp[WARPS][3];
    u32 starts[9];
    u64 before;
    u32 first, last, number, token;
};

#ifndef EMULATED
extern __shared__ __align__(16) unsigned char shared[];
__device__ __forceinline__ Memory &memory() { return *(Memory *)shared; }
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void admit_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ int special(int which) {
    u32 rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return which ? size : rank;
}
__device__ __forceinline__ int block_rank() { return special(0); }
__device__ __forceinline__ int blocks() { return special(1); }
__device__ __forceinline__ const Told &told_by(int rank) {
    if (rank == block_rank()) return memory().told;
    u64 at;
    asm("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(&memory().told), "r"(rank));
    return *(const Told *)at;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ float larger(float a, float b) {  // NaN where one is
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
}
__device__ __forceinline__ float power(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
__device__ __forceinline__ float of_half(u32 bits) {
    float f;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
    return f;
}
#endif

__device__ __forceinline__ float lowest() { return __uint_as_float(0xff800000u); }
__device__ __forceinline__ float infinite() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ u64 fixed(float mass) { return __float2ull_rn(mass * UNIT); }
// A sum of what `fixed` makes of masses, of up to 512: a conversion to 64 bits would take longer than the exponential.
// Adding 192 leaves a mass in units of 2^-16; the rest, with 1.5 * 2^-16 added, in those of 2^-39. The bits of the two
// are summed as they are, and those of what was added taken off in the end.
struct Masses {
    u32 high = 0, low = 0;
    __device__ __forceinline__ static Masses of(float mass) {
        const float up = __fadd_rn(mass, 192.f), rest = __fsub_rn(mass, __fsub_rn(up, 192.f));
        return {__float_as_uint(up), __float_as_uint(__fadd_rn(rest, 2.288818359375e-5f))};
    }
    __device__ __forceinline__ static Masses none() { return {0x43400000u, 0x37c00000u}; }
    __device__ __forceinline__ void operator+=(Masses other) { high += other.high, low += other.low; }
    __device__ __forceinline__ u64 value(u32 terms) const {
        const int up = (int)(high - terms * none().high), rest = (int)(low - terms * none().low);
        return (u64)((i64)up * (1 << 23) + rest);
    }
};
// Integers in the order of the numbers: NaN above all, both zeros equal.
__device__ __forceinline__ int key_of(float x) {
    const int bits = (int)__float_as_uint(x + 0.f);
    return x == x ? bits ^ (bits >> 31 & 0x7fffffff) : 0x7fffffff;
}
__device__ __forceinline__ float value_of(int key) { return __uint_as_float((u32)(key ^ (key >> 31 & 0x7fffffff))); }

// ---- a block and its cluster ----
struct Most {
    __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
struct Sum {
    __device__ __forceinline__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
__device__ __forceinline__ void clear_deep() {
    for (int i = threadIdx.x; i < 4 * DEEP; i += THREADS) memory().told.deep[i] = 0;
}
__device__ __forceinline__ void add_mass(int place, u64 mass) {
    u32 *to = memory().told.deep + place;
    atomicAdd(to + DEEP, (u32)mass & PART);
    atomicAdd(to + 2 * DEEP, (u32)(mass >> 15) & PART);
    atomicAdd(to + 3 * DEEP, (u32)(mass >> 30));
}
__device__ __forceinline__ u64 mass_at(const Told &t, int place) {
    const u32 *from = t.deep + place;
    return from[DEEP] + ((u64)from[2 * DEEP] << 15) + ((u64)from[3 * DEEP] << 30);
}
__device__ __forceinline__ u64 of_warp(u64 v, Most) {
    const u32 high = __reduce_max_sync(~0u, (u32)(v >> 32));
    return (u64)high << 32 | __reduce_max_sync(~0u, (u32)(v >> 32) == high ? (u32)v : 0u);
}
template <class F> __device__ __forceinline__ u64 of_warp(u64 v, F both) {
#pragma unroll
    for (int o = 16; o; o /= 2) v = both(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
// Of N numbers of a thread: what becomes of those of the block, to every thread.
template <int N, class F> __device__ __forceinline__ void of_block(u64 (&v)[N], F both) {
    Memory &m = memory();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++) {
        v[n] = of_warp(v[n], both);
        if (lane == 0) m.of_warp[threadIdx.x / 32][n] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = of_warp(lane < WARPS ? m.of_warp[lane][n] : 0, both);
    __syncthreads();
}
// Of what each block tells: read by a lane for each, since one after the other takes as long for every block.
template <class F> __device__ __forceinline__ u64 of_cluster(u64 Told::*what, F both) {
    const int lane = threadIdx.x % 32;
    return of_warp(lane < blocks() ? told_by(lane).*what : 0, both);
}
// Of N numbers of a thread: the sums of those of the threads before it, and of all.
template <int N> __device__ __forceinline__ void sums_before(u64 (&v)[N], u64 (&total)[N]) {
    Memory &m = memory();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 own[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        own[n] = v[n];
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
            const u64 left = __shfl_up_sync(~0u, v[n], o);
            if (lane >= o) v[n] += left;
        }
        if (lane == 31) m.of_warp[warp][n] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) {
        v[n] -= own[n], total[n] = 0;
        for (int w = 0; w < WARPS; w++) {
            v[n] += w < warp ? m.of_warp[w][n] : 0;
            total[n] += m.of_warp[w][n];
        }
    }
    __syncthreads();
}
__device__ __forceinline__ void meet() {  // of all threads of a cluster
    if (blocks() > 1)
        meet_cluster();
    else
        __syncthreads();
}

// ---- reading ----
struct Row {
    const unsigned char *at;  // of the first group, 16-byte aligned: `before` elements of it are another row's
    int kind, vocab, before, groups, share;  // groups of a warp
    const int *counts;                       // none: no penalties
    const u32 *allowed;
    float repetition, frequency, presence;
};
struct Raw {
    uint4 low, high;
};

__device__ __forceinline__ Row row_of(const Params &p, int row) {
    Row r;
    const int size = p.kind ? 2 : 4, seat = p.seat ? p.seat[row] : -1;
    const unsigned char *start = p.logits + row * p.stride * size;
    r.before = (int)((u64)start % 16) / size;
    r.at = start - r.before * size;
    r.kind = p.kind, r.vocab = p.vocab;
    r.groups = (p.vocab + r.before + EACH - 1) / EACH;
    r.share = (r.groups + blocks() * THREADS - 1) / (blocks() * THREADS) * 32;
    r.counts = seat < 0 ? nullptr : p.counts + (i64)seat * p.vocab;
    r.allowed = p.allowed ? p.allowed + (i64)row * p.allowed_stride : nullptr;
    r.repetition = seat < 0 ? 1.f : p.repetition[row];
    r.frequency = seat < 0 ? 0.f : p.frequency[row];
    r.presence = seat < 0 ? 0.f : p.presence[row];
    return r;
}
__device__ __forceinline__ void request(const Row &r, int group, Raw &raw) {
    const uint4 *at = (const uint4 *)(r.at + ((u32)group << (r.kind ? 4 : 5)));
    raw.low = at[0];
    if (r.kind == 0) raw.high = group * EACH + EACH / 2 < r.before + r.vocab ? at[1] : uint4{};
}
// Each score is what float32 arithmetic makes of the logit; nothing is stored, so the logits stay the model's. Not
// inlined: it would be a third of the code.
__device__ __noinline__ void change(Row r, int first, float *scores) {
    int counts[EACH], masked[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {  // all loads are under way together
        const int token = first + i < 0 ? 0 : min(first + i, r.vocab - 1);
        counts[i] = r.counts ? r.counts[token] : 0;
        masked[i] = r.allowed && !(r.allowed[token >> 5] >> (token & 31) & 1);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int answered = counts[i] >> 1;
        float x = scores[i];
        if (counts[i]) x = x > 0.f ? __fdiv_rn(x, r.repetition) : __fmul_rn(x, r.repetition);
        x = __fsub_rn(x, __fmul_rn((float)answered, r.frequency));
        if (answered) x = __fsub_rn(x, r.presence);
        scores[i] = masked[i] ? lowest() : x;
    }
}
__device__ __forceinline__ void scores_of(const Row &r, int group, const Raw &raw, float (&x)[EACH]) {
    const u32 words[EACH] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
    if (r.kind == 1) {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else if (r.kind == 0) {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = of_half(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
    }
    const int first = group * EACH - r.before;
    if (r.counts || r.allowed) {
        float scores[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) scores[i] = x[i];
        change(r, first, scores);
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = scores[i];
    }
    if (first < 0 || first + EACH > r.vocab)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (first + i < 0 || first + i >= r.vocab) x[i] = lowest();
}
// Shows `visit` the groups of this thread, AHEAD of them requested together: those of its warp lie together. `back`: the
// last ones first, which the pass before has left in the cache.
template <int AHEAD = 2, class F> __device__ __forceinline__ void each(const Row &r, bool back, F visit) {
    const int begin = (block_rank() * WARPS + (int)threadIdx.x / 32) * r.share, lane = threadIdx.x % 32;
    const int end = min(begin + r.share, r.groups), steps = (end - begin + 32 * AHEAD - 1) / (32 * AHEAD);
    for (int step = 0; step < steps; step++) {
        const int at = begin + (back ? steps - 1 - step : step) * 32 * AHEAD + lane;
        Raw raw[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (at + 32 * u < end) request(r, at + 32 * u, raw[u]);
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (at + 32 * u < end) {
                float x[EACH];
                scores_of(r, at + 32 * u, raw[u], x);
                visit(at + 32 * u, x);
            }
    }
}
