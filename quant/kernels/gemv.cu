// y[T, N] = x[T, K] W[N, K]^T for 1 to 8 rows of x, with the norm before and the gate and sum after it.
//
// The tensor cores multiply, since unpacking is the work: a warp's mma.m16n8k16 takes 8 rows of W, of which the upper
// half of A holds one chunk of columns and the lower half the next chunk. Column 2r of B is row r of x in the first
// chunk, column 2r+1 in the second, so the lane (g, t) = (lane / 4, lane % 4) finds in c0 and c3 what row g of W gives
// with row t of x. The order of the columns inside a chunk is free as long as W and x agree on it: every lane loads 16
// bytes at a time of W, and the same elements of x.
//
// W streams through shared memory (cp.async), DEPTH items ahead: an item is 8 rows by one step (two chunks). Requests
// start before griddepcontrol.wait, while the kernel that computes x still runs. A step belongs to one warp, which
// keeps its part of x in registers over all rows of the block; the warps' sums meet in shared memory at the end.
//
// Set by the compiler's options: BITS (16: plain weights), HALF (x is float16, else bfloat16), SCALE (0 float16,
// 1 bfloat16, 2 float32), KIND (0 middle, 1 zero points, 2 shifts), RUN (words in a row that share a scale: 4 where a
// lane's 16 bytes lie in one group of the whole chunk), NB (blocks of 4 rows of x), DEPTH.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Params {
    const u8 *weight, *scale, *zero;
    const float *shift;
    const u16 *x, *norm, *onto;
    void *out;
    int N, K, groups, group, T, rows, column_warps, row_warps, gate, wide;
    float eps, alpha, threshold;
    u32 mask;  // 0x000f000f, of which the compiler does not know: LOP3 takes one constant, and that is the exponent
};

enum { CHUNK = BITS == 4 ? 128 : 64, STEP = 2 * CHUNK, CHUNK_BYTES = CHUNK * BITS / 8, STEP_BYTES = 2 * CHUNK_BYTES };
enum { UNITS = BITS == 16 ? 2 : 1, PAIRS = CHUNK / 8, ITEM_BYTES = 1024 * UNITS, SUMS = BITS == 16 ? 1 : 4 / RUN };
#ifndef RESIDENT
#define RESIDENT 2
#endif
#ifndef EARLY
#define EARLY 0
#endif
static_assert(DEPTH >= 2, "two items are consumed at once");
constexpr bool NARROW = BITS != 16 && RUN < 4;
// What a code is above its value when it is read as a number: 2^7 + c in bfloat16 (2^7 + 2^11 + c of two halves for
// 8 bits), 2^10 + c in float16.
constexpr float ABOVE = HALF ? 1024.f : BITS == 4 ? 128.f : 2176.f;
constexpr float MIDDLE = BITS == 4 ? 8.f : 128.f;

#ifndef EMULATED
// 16 bytes, of which those after `bytes` are not read but zero.
__device__ __forceinline__ void request(u32 to, const u8 *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void close_requests() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void await_requests() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void admit_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if HALF
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float half_to_float(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 pair;
#if HALF
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}
__device__ __forceinline__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 opaque(u32 v) {
    asm volatile("mov.u32 %0, %0;" : "+r"(v));
    return v;
}
__device__ __forceinline__ float sum_over(float v, int lanes) { return v + __shfl_xor_sync(0xffffffffu, v, lanes); }
#endif

__device__ __forceinline__ float plain(u16 bits) { return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16); }

struct Rows {  // of W that the block computes: `half` gate rows, as many up rows; without a gate all in one
    int first, count, half_tiles, N;
    __device__ __forceinline__ int row(int tile, int g) const {
        return tile < half_tiles ? first + tile * 8 + g : N / 2 + first + (tile - half_tiles) * 8 + g;
    }
    __device__ __forceinline__ bool valid(int tile, int g) const {
        return (tile < half_tiles ? tile : tile - half_tiles) * 8 + g < count;
    }
};

// The lane's part of x in one step, in the order in which its words hold the columns.
template <int BLOCKS>
__device__ __forceinline__ void load_x(u32 (&x)[BLOCKS][PAIRS], const u16 *from, int K, int column, int t, int row, int T) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const u16 *base = from + (long long)min(row + 4 * b, T - 1) * K;
        if constexpr (BITS == 8 && NARROW) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                int k = column + 16 * q + 4 * t;
                uint2 v = k < K ? __ldcg((const uint2 *)(base + k)) : make_uint2(0, 0);
                x[b][2 * q] = v.x, x[b][2 * q + 1] = v.y;
            }
        } else {
#pragma unroll
            for (int q = 0; q < PAIRS / 4; q++) {
                int k = column + (BITS == 16 || NARROW ? 32 * q + 8 * t : 8 * q + CHUNK / 4 * t);
                uint4 v = k < K ? __ldcg((const uint4 *)(base + k)) : make_uint4(0, 0, 0, 0);
                x[b][4 * q] = v.x, x[b][4 * q + 1] = v.y, x[b][4 * q + 2] = v.z, x[b][4 * q + 3] = v.w;
            }
        }
    }
}

__device__ __forceinline__ float squares(const u32 (&x)[PAIRS]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float low = plain((u16)x[i]), high = plain((u16)(x[i] >> 16));
        sum = fmaf(low, low, fmaf(high, high, sum));
    }
    return sum;
}

__device__ __forceinline__ void scale_x(u32 (&x)[PAIRS], const u32 (&weight)[PAIRS], float factor) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++)
        x[i] = pack_pair(plain((u16)x[i]) * factor * plain((u16)weight[i]),
                         plain((u16)(x[i] >> 16)) * factor * plain((u16)(weight[i] >> 16)));
}

// 1 / sqrt(mean square + eps) of the lane's rows of x; `partial` is shared, [column_warps][NB][4].
__device__ __forceinline__ void inverse_rms(float (&factor)[NB], float *partial, const float (&sum)[NB], const Params &p,
                                            float per_column, int warp, int lane) {
#pragma unroll
    for (int b = 0; b < NB; b++) {
        float all = sum_over(sum_over(sum_over(sum[b], 1), 2), 4);
        if (warp < p.column_warps && lane % 8 == 0) partial[(warp * NB + b) * 4 + lane / 8] = all;
    }
    __syncthreads();
#pragma unroll
    for (int b = 0; b < NB; b++) {
        float all = 0;
        for (int w = 0; w < p.column_warps; w++) all += partial[(w * NB + b) * 4 + lane / 8];
        factor[b] = rsqrtf(fmaf(all, per_column, p.eps));
    }
}

// A table with one value of `size` bytes a row and group, of which the block's rows lie in shared memory as they do in
// memory: what is before the first and after the last value in a piece of 16 bytes comes along.
struct Table {
    const u8 *shared;
    int at[2];  // of the first gate row and the first up row
    static __device__ __forceinline__ int half_bytes(int half_tiles, int groups, int size) {
        return (half_tiles * 8 * groups * size + 15) / 16 * 16 + 16;
    }
    __device__ __forceinline__ void request_rows(u8 *to, const u8 *from, int size, const Params &p, const Rows &rows) {
        const int room = half_bytes(rows.half_tiles, p.groups, size);
        shared = to;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h == 1 && !p.gate) break;
            const long long begin = (long long)rows.row(h * rows.half_tiles, 0) * p.groups * size, aligned = begin & ~15LL;
            const long long end = begin + rows.count * p.groups * size, all = (long long)p.N * p.groups * size;
            at[h] = h * room + (int)(begin - aligned) - h * rows.half_tiles * 8 * p.groups * size;
            for (long long i = aligned + threadIdx.x * 16; i < end; i += blockDim.x * 16)
                request(address(to) + h * room + (int)(i - aligned), from + i, (int)min(16LL, all - i));
        }
    }
    __device__ __forceinline__ const u8 *of(const Rows &rows, int tile) const {
        return shared + (tile < rows.half_tiles ? at[0] : at[1]);
    }
};

struct Scales {
    Table scale, zero, shift;
    // Beside the scale what goes to the sum of x, where it is not a constant.
    __device__ __forceinline__ float2 get(const Rows &rows, int tile, int index) const {
        const u8 *from = scale.of(rows, tile);
        const float s = SCALE == 0   ? half_to_float(((const u16 *)from)[index])
                        : SCALE == 1 ? __uint_as_float((u32)((const u16 *)from)[index] << 16)
                                     : ((const float *)from)[index];
        if (KIND == 1) return make_float2(s, -s * (ABOVE + zero.of(rows, tile)[index]));
        if (KIND == 2) return make_float2(s, fmaf(-ABOVE, s, ((const float *)shift.of(rows, tile))[index]));
        return make_float2(s, 0);
    }
};

// Two neighbouring codes of a word as numbers.
template <int AT> __device__ __forceinline__ u32 codes(u32 word, u32 mask, u32 exponent) {
    return ((word >> AT) & mask) | exponent;
}

// A word of each of two chunks times x.
__device__ __forceinline__ void multiply(float (&even)[4], float (&odd)[4], u32 a, u32 b, const u32 *x, u32 mask) {
    if constexpr (BITS == 4) {
        constexpr u32 E = HALF ? 0x64006400 : 0x43004300;
        mma(even, codes<0>(a, mask, E), codes<0>(b, mask, E), codes<4>(a, mask, E), codes<4>(b, mask, E), x[0], x[1]);
        mma(odd, codes<8>(a, mask, E), codes<8>(b, mask, E), codes<12>(a, mask, E), codes<12>(b, mask, E), x[2], x[3]);
    } else if constexpr (HALF) {
        constexpr u32 M = 0x00ff00ff, E = 0x64006400;
        mma(even, codes<0>(a, M, E), codes<0>(b, M, E), codes<8>(a, M, E), codes<8>(b, M, E), x[0], x[1]);
    } else {
        constexpr u32 E = 0x43004300, H = 0x45004500;
        mma(even, codes<0>(a, mask, E), codes<0>(b, mask, E), codes<8>(a, mask, E), codes<8>(b, mask, E), x[0], x[1]);
        mma(odd, codes<4>(a, mask, H), codes<4>(b, mask, H), codes<12>(a, mask, H), codes<12>(b, mask, H), x[0], x[1]);
    }
}

template <int I> struct Count { static constexpr int value = I; };

// What a step's columns mean for every row: which scales apply, and the sums of x that go with them.
struct Part {
    float sum[NB][SUMS][2];  // of every run of words, in both chunks; for KIND 0 times what to take off
    int group[SUMS][2];
    __device__ __forceinline__ void set(const u32 (&x)[NB][PAIRS], const Params &p, int step) {
        if (BITS == 16) return;
        constexpr u32 ONES = HALF ? 0x3c003c00 : 0x3f803f80;
        constexpr float FACTOR = KIND == 0 ? -(ABOVE + MIDDLE) : 1.f;
#pragma unroll
        for (int r = 0; r < SUMS; r++) {
#pragma unroll
            for (int b = 0; b < NB; b++) {
                constexpr int CHAINS = PAIRS / SUMS < 8 ? 1 : 4;  // products wait for each other
                float c[CHAINS][4] = {};
#pragma unroll
                for (int i = 0; i < PAIRS / SUMS; i += 2) {
                    const int at = r * (PAIRS / SUMS) + i;
                    mma(c[i / 2 % CHAINS], ONES, ONES, ONES, ONES, x[b][at], x[b][at + 1]);
                }
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float all = c[0][3 * h];
#pragma unroll
                    for (int i = 1; i < CHAINS; i++) all += c[i][3 * h];
                    sum[b][r][h] = FACTOR * all;
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++)
                group[r][h] = min((step * STEP + h * CHUNK + r * (CHUNK / SUMS)) / p.group, p.groups - 1);
        }
    }
};

__device__ __forceinline__ void plain_item(float (&total)[NB], const u8 *from, const u32 (&x)[NB][PAIRS]) {
    float even[NB][4] = {}, odd[NB][4] = {};
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const uint4 first = *(const uint4 *)(from + u * 512), second = *(const uint4 *)(from + (u + 2) * 512);
#pragma unroll
        for (int b = 0; b < NB; b++) {
            mma(even[b], first.x, second.x, first.y, second.y, x[b][4 * u], x[b][4 * u + 1]);
            mma(odd[b], first.z, second.z, first.w, second.w, x[b][4 * u + 2], x[b][4 * u + 3]);
        }
    }
#pragma unroll
    for (int b = 0; b < NB; b++) total[b] = (even[b][0] + odd[b][0]) + (even[b][3] + odd[b][3]);
}

__device__ __forceinline__ void packed_item(float (&total)[NB], const u8 *from, const Scales &scales, const Rows &rows,
                                            int tile, int groups, const Part &part, const u32 (&x)[NB][PAIRS], u32 slot,
                                            int g, int t, u32 mask) {
    u32 words[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if constexpr (NARROW) {
#pragma unroll
            for (int q = 0; q < 4; q++)
                words[h][q] = *(const u32 *)(from + h * 512 + (q * 8 + (g ^ (2 * q))) * 16 + t * 4);
        } else {
            const uint4 v = *(const uint4 *)(from + h * 512 + slot);
            words[h][0] = v.x, words[h][1] = v.y, words[h][2] = v.z, words[h][3] = v.w;
        }
    }
#pragma unroll
    for (int b = 0; b < NB; b++) total[b] = 0;
#pragma unroll
    for (int r = 0; r < SUMS; r++) {
        float2 scale[2];
#pragma unroll
        for (int h = 0; h < 2; h++) scale[h] = scales.get(rows, tile, (tile * 8 + g) * groups + part.group[r][h]);
#pragma unroll
        for (int b = 0; b < NB; b++) {
            float even[4] = {}, odd[4] = {};
            if (KIND == 0) even[0] = part.sum[b][r][0], even[3] = part.sum[b][r][1];
#pragma unroll
            for (int q = r * RUN; q < (r + 1) * RUN; q++)
                multiply(even, odd, words[0][q], words[1][q], x[b] + q * (PAIRS / 4), mask);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (KIND != 0) total[b] = fmaf(scale[h].y, part.sum[b][r][h], total[b]);
                total[b] = fmaf(scale[h].x, even[3 * h] + odd[3 * h], total[b]);
            }
        }
    }
}

__device__ __forceinline__ float activated(float gate, float up, const Params &p) {
    if (p.gate == 1) return gate / (1.f + __expf(-gate)) * up;
    return gate >= p.threshold ? gate * up : 0.f * up;
}

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemv(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column_warp = warp % p.column_warps, row_warp = warp / p.column_warps;
    const int steps = (p.K + STEP - 1) / STEP, outputs = p.gate ? p.N / 2 : p.N;
    const int first_row = blockIdx.x * p.rows, count = min(p.rows, outputs - first_row);
    const int half_tiles = (p.rows + 7) / 8, tiles = p.gate ? 2 * half_tiles : half_tiles;
    const Rows rows{first_row, count, half_tiles, p.N};
    const int row_bytes = p.K * BITS / 8, warps = blockDim.x / 32;
    const int my_steps = (steps - column_warp + p.column_warps - 1) / p.column_warps;
    const int my_tiles = (tiles - row_warp + p.row_warps - 1) / p.row_warps, items = my_steps * my_tiles;
    const int most = ((steps + p.column_warps - 1) / p.column_warps) * ((tiles + p.row_warps - 1) / p.row_warps);
    const int stages = min(most, DEPTH);

    u8 *ring = shared + warp * stages * ITEM_BYTES;
    u8 *tables = shared + warps * stages * ITEM_BYTES;
    const int halves = p.gate ? 2 : 1;
    const int scale_bytes = BITS == 16 ? 0 : halves * Table::half_bytes(half_tiles, p.groups, SCALE == 2 ? 4 : 2);
    const int other_bytes = KIND == 0 ? 0 : halves * Table::half_bytes(half_tiles, p.groups, KIND == 1 ? 1 : 4);
    float *sums = (float *)(tables + scale_bytes + other_bytes);  // [column_warps][tiles][NB][32]
    float *partial = sums + p.column_warps * tiles * NB * 32;

    Scales scales;
    if (BITS != 16) scales.scale.request_rows(tables, p.scale, SCALE == 2 ? 4 : 2, p, rows);
    if (KIND == 1) scales.zero.request_rows(tables + scale_bytes, p.zero, 1, p, rows);
    if (KIND == 2) scales.shift.request_rows(tables + scale_bytes, (const u8 *)p.shift, 4, p, rows);
    close_requests();

    // Where a lane's 16 bytes go: to itself, or, where lanes read each other's words, so that neither side has conflicts.
    const u32 slot = NARROW ? (t * 8 + (g ^ (2 * t))) * 16 : lane * 16;
    const u32 ring_address = address(ring);
    const u8 *const ask_from = p.weight + (long long)rows.row(0, g) * row_bytes + t * 16;
    const long long to_up = (long long)(p.N / 2 - half_tiles * 8) * row_bytes;
    int asked = 0, ask_tile = row_warp, ask_at = column_warp * STEP_BYTES, ask_stage = 0;
    auto ask = [&] {
        if (asked < items) {
            const bool live = rows.valid(ask_tile, g);
            const u8 *from = ask_from + (ask_tile * 8 * row_bytes + ask_at) + (ask_tile < half_tiles ? 0 : to_up);
#pragma unroll
            for (int u = 0; u < 2 * UNITS; u++) {
                const bool valid = live && ask_at + t * 16 + u * 64 < row_bytes;
                request(ring_address + ask_stage * ITEM_BYTES + u * 512 + slot, from + u * 64, valid ? 16 : 0);
            }
            if (++asked == items && !EARLY) admit_next();  // its requests follow the block's own at once
            ask_tile += p.row_warps;
            if (ask_tile >= tiles) ask_tile = row_warp, ask_at += p.column_warps * STEP_BYTES;
            if (++ask_stage == stages) ask_stage = 0;
        }
        close_requests();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ask();
#if EARLY
    admit_next();
#endif
    const int x_row = lane / 8, x_chunk = (lane / 4) % 2 * CHUNK;
    u32 x[NB][PAIRS], weight[1][PAIRS];
    if (p.norm) load_x(weight, p.norm, p.K, column_warp * STEP + x_chunk, t, 0, 1);
    const float per_column = 1.f / p.K;
    if (BITS != 16) await_requests<DEPTH>();  // the scales, for the next barrier
    await_inputs();

    float factor[NB];
    // What the thread's output is added to, asked for now: memory is far.
    const int own = threadIdx.x;
    const float base = p.onto && own < count * p.T
        ? plain(__ldcg(p.onto + (long long)(own / count) * outputs + first_row + own % count)) : 0.f;
    if (p.norm) {
        float sum[NB] = {};
#pragma unroll 1
        for (int s = column_warp + (my_steps - 1) * p.column_warps; s >= 0; s -= p.column_warps) {
            load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
#pragma unroll
            for (int b = 0; b < NB; b++) sum[b] += squares(x[b]);
        }
        inverse_rms(factor, partial, sum, p, per_column, warp, lane);
#pragma unroll
        for (int b = 0; b < NB; b++) scale_x(x[b], weight[0], factor[b]);
    } else {
        load_x(x, p.x, p.K, column_warp * STEP + x_chunk, t, x_row, p.T);
        if (BITS != 16) __syncthreads();
    }

    const u32 mask = opaque(p.mask);
    int stage = 0;
    for (int s = column_warp; s < steps; s += p.column_warps) {
        if (s != column_warp) {
            load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
            if (p.norm) {
                load_x(weight, p.norm, p.K, s * STEP + x_chunk, t, 0, 1);
#pragma unroll
                for (int b = 0; b < NB; b++) scale_x(x[b], weight[0], factor[b]);
            }
        }
        Part part;
        part.set(x, p, s);
        // `count` items at once: their chains of products are independent.
        auto consume = [&](auto count, int tile) {
            constexpr int GANG = count.value;
            await_requests<DEPTH - GANG>();
            if (NARROW) __syncwarp();
            float total[GANG][NB];
#pragma unroll
            for (int i = 0; i < GANG; i++) {
                const u8 *from = ring + stage * ITEM_BYTES;
                if constexpr (BITS == 16)
                    plain_item(total[i], from + slot, x);
                else
                    packed_item(total[i], from, scales, rows, tile + i * p.row_warps, p.groups, part, x, slot, g, t, mask);
                if (++stage == stages) stage = 0;
            }
#pragma unroll
            for (int i = 0; i < GANG; i++)
#pragma unroll
                for (int b = 0; b < NB; b++) {
                    float *to = sums + ((column_warp * tiles + tile + i * p.row_warps) * NB + b) * 32 + lane;
                    *to = s == column_warp ? total[i][b] : *to + total[i][b];
                }
            if (NARROW) __syncwarp();
#pragma unroll
            for (int i = 0; i < GANG; i++) ask();
        };
        int tile = row_warp;
        if constexpr (NB == 1 && !NARROW) {
#pragma unroll 1
            for (; tile + p.row_warps < tiles; tile += 2 * p.row_warps) consume(Count<2>{}, tile);
            if (tile < tiles) consume(Count<1>{}, tile);
        } else {
#pragma unroll 1
            for (; tile < tiles; tile += p.row_warps) consume(Count<1>{}, tile);
        }
    }

    __syncthreads();
    const int used = min(p.column_warps, steps);
    for (int i = threadIdx.x; i < count * p.T; i += blockDim.x) {
        const int r = i % count, row = i / count, at = row / 4 * 32 + r % 8 * 4 + row % 4;
        float y = 0, up = 0;
        for (int w = 0; w < used; w++) y += sums[(w * tiles + r / 8) * NB * 32 + at];
        if (p.gate) {
            for (int w = 0; w < used; w++) up += sums[(w * tiles + half_tiles + r / 8) * NB * 32 + at];
            y = activated(y, up, p);
        }
        const long long to = (long long)row * outputs + first_row + r;
        y = p.onto ? fmaf(p.alpha, y, i == own ? base : plain(__ldcg(p.onto + to))) : p.alpha * y;
        if (p.wide)
            ((float *)p.out)[to] = y;
        else
            ((u16 *)p.out)[to] = (u16)pack_pair(y, 0.f);
    }
}
