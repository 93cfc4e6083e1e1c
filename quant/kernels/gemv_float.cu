// As gemv.cu with its parts, but all products are of 16-bit floating point numbers, packed weights' too.
// y[T, N] = x[T, K] W[N, K]^T for 1 to 8 rows of x, with the norm before and the gate and sum after it.
//
// The tensor cores multiply, since unpacking is the work: a warp's mma.m16n8k16 takes 8 rows of W, of which the upper
// half of A holds one chunk of columns and the lower half the next chunk. Column 2r of B is row r of x in the first
// chunk, column 2r+1 in the second, so the lane (g, t) = (lane / 4, lane % 4) finds in c0 and c3 what row g of W gives
// with row t of x. The order of the columns inside a chunk is free as long as W and x agree on it: every lane loads 16
// bytes at a time of W, and the same elements of x.
//
// W streams through shared memory (cp.async), DEPTH items ahead: an item is two tiles of 8 rows (neighbours, or a gate
// and its up) by one step (two chunks). Requests start before griddepcontrol.wait, while the kernel that computes x
// still runs. A step belongs to one warp, which keeps its part of x in registers over all rows of the block; the warps'
// sums meet in shared memory at the end. Between the wait and the first product stands nothing but the load of x: in
// bfloat16 the norm's 1 / rms, the same for all columns, is applied to the sums.
//
// Set by the compiler's options: BITS (16: plain weights), HALF (x is float16, else bfloat16), SCALE (0 float16,
// 1 bfloat16, 2 float32), KIND (0 middle, 1 zero points, 2 shifts), RUN (words in a row that share a scale: 4 where a
// lane's 16 bytes lie in one group of the whole chunk), NB (blocks of 4 rows of x), DEPTH.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct Params {
    const u8 *weight, *scale, *zero, *shift;
    const u16 *x, *norm, *onto;
    void *out;
    int N, K, groups, T;
    int least_rows, longer_blocks;  // outputs of a block; the first `longer_blocks` have one more
    int column_warps, row_warps, stages, gate, wide;
    u32 group_inverse;  // 2^32 / group, rounded up: exact up to 65,535 columns
    u32 mask;           // 0x000f000f, of which the compiler does not know: LOP3 takes one constant, and that is the exponent
    float eps, alpha, threshold;
};

enum { CHUNK = BITS == 4 ? 128 : 64, STEP = 2 * CHUNK, CHUNK_BYTES = CHUNK * BITS / 8, STEP_BYTES = 2 * CHUNK_BYTES };
enum { UNITS = BITS == 16 ? 2 : 1, PAIRS = CHUNK / 8, TILE_BYTES = 1024 * UNITS, SUMS = BITS == 16 ? 1 : 4 / RUN };
enum { SCALE_SIZE = SCALE == 2 ? 4 : 2, OTHER_SIZE = KIND == 1 ? 1 : 4 };
#ifndef RESIDENT
#define RESIDENT (NB == 1 ? 2 : 1)  // more rows need more registers: T = 8 took 2.1 ms with two, 1.3 with one
#endif
#ifndef EARLY
#define EARLY 0
#endif
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
__device__ __forceinline__ u32 product_pair(u32 a, u32 b) {  // bfloat16 only
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
#endif

__device__ __forceinline__ float plain(u16 bits) { return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16); }

struct Block {
    int first, count, tile_rows, tiles;  // its outputs, and how many of them two tiles of W give; how often two tiles
    __device__ __forceinline__ Block(const Params &p, int block) {
        const int longer = min(block, p.longer_blocks);
        first = block * p.least_rows + longer;
        count = p.least_rows + (block < p.longer_blocks);
        tile_rows = p.gate ? 8 : 16;
        tiles = (count + tile_rows - 1) / tile_rows;
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

// Adds the squares of the lane's columns, as products of x with itself, of which only the diagonal matters: it lies in
// the lanes with t = g / 2.
__device__ __forceinline__ void add_squares(float (&sum)[NB], const u32 (&x)[NB][PAIRS], int g) {
#pragma unroll
    for (int b = 0; b < NB; b++) {
        float c[2][4] = {};
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2) mma(c[i / 2 % 2], x[b][i], 0, x[b][i + 1], 0, x[b][i], x[b][i + 1]);
        sum[b] += g % 2 ? c[0][1] + c[1][1] : c[0][0] + c[1][0];
    }
}

// partial: [column_warps][NB][8], a row of x in two neighbours.
__device__ __forceinline__ void leave_squares(float *partial, const float (&sum)[NB], int warp, int g, int t) {
#pragma unroll
    for (int b = 0; b < NB; b++)
        if (t == g / 2) partial[(warp * NB + b) * 8 + g] = sum[b];
}

__device__ __forceinline__ float inverse_rms(const float *partial, int row, int warps, const Params &p) {
    float all = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
        const float2 v = *(const float2 *)(partial + (w * NB + row / 4) * 8 + row % 4 * 2);
        all += v.x + v.y;
    }
    return rsqrtf(__fdividef(all, (float)p.K) + p.eps);
}

__device__ __forceinline__ void weigh(u32 (&x)[PAIRS], const u32 (&weight)[PAIRS], float factor) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        if constexpr (HALF)  // x * weight alone may leave float16's range
            x[i] = pack_pair(plain((u16)x[i]) * factor * plain((u16)weight[i]),
                             plain((u16)(x[i] >> 16)) * factor * plain((u16)(weight[i] >> 16)));
        else
            x[i] = product_pair(x[i], weight[i]);
    }
}

// Values of `size` bytes, one a row and group, of which the block's rows lie in shared memory as they do in memory: what
// is before the first and after the last in a piece of 16 bytes comes along.
struct Table {
    const u8 *first;
    int second;  // bytes from a row to the one of the other tile
    static __device__ __forceinline__ int half_bytes(const Params &p, const Block &block, int size) {
        return (block.tiles * block.tile_rows * p.groups * size + 15) / 16 * 16 + 16;
    }
    __device__ __forceinline__ void request_rows(u8 *to, const u8 *from, int size, const Params &p, const Block &block) {
        const int room = half_bytes(p, block, size);
        second = 8 * p.groups * size;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h == 1 && !p.gate) break;
            const long long begin = (long long)(block.first + h * (p.N / 2)) * p.groups * size, aligned = begin & ~15LL;
            const long long end = begin + block.count * p.groups * size, all = (long long)p.N * p.groups * size;
            const u8 *start = to + h * room + (int)(begin - aligned);
            if (h == 0) first = start;
            if (h == 1) second = (int)(start - first);
            for (long long i = aligned + threadIdx.x * 16; i < end; i += blockDim.x * 16)
                request(address(to) + h * room + (int)(i - aligned), from + i, (int)min(16LL, all - i));
        }
    }
};

struct Scales {
    Table scale, other;  // zero points or shifts
    // Beside the scale what goes to the sum of x, where it is not a constant.
    __device__ __forceinline__ float2 get(int tile, int index) const {
        const u8 *from = scale.first + tile * scale.second;
        const float s = SCALE == 0   ? half_to_float(((const u16 *)from)[index])
                        : SCALE == 1 ? __uint_as_float((u32)((const u16 *)from)[index] << 16)
                                     : ((const float *)from)[index];
        const u8 *beside = other.first + tile * other.second;
        if (KIND == 1) return make_float2(s, -s * (ABOVE + beside[index]));
        if (KIND == 2) return make_float2(s, fmaf(-ABOVE, s, ((const float *)beside)[index]));
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
                group[r][h] = min((int)__umulhi(step * STEP + h * CHUNK + r * (CHUNK / SUMS), p.group_inverse), p.groups - 1);
        }
    }
};

__device__ __forceinline__ void plain_tile(float (&total)[NB], const u8 *from, const u32 (&x)[NB][PAIRS]) {
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

__device__ __forceinline__ void packed_tile(float (&total)[NB], const u8 *from, const Scales &scales, int tile,
                                            int scale_row, const Part &part, const u32 (&x)[NB][PAIRS], u32 slot, int g,
                                            int t, u32 mask) {
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
        for (int h = 0; h < 2; h++) scale[h] = scales.get(tile, scale_row + part.group[r][h]);
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

// The outputs: sums over the warps, what was on the way to them, and what they are added to. `base` is what this thread's
// first output is added to.
__device__ __forceinline__ void write_outputs(const Params &p, const Block &block, const float *sums,
                                              const float *partial, int warps, float base) {
    const int outputs = p.gate ? p.N / 2 : p.N, stride = block.tiles * 2 * NB * 32;
    for (int i = threadIdx.x; i < block.count * p.T; i += blockDim.x) {
        const int r = i % block.count, row = i / block.count;
        const int tile = p.gate ? r / 8 * 2 : r / 8;
        const float *from = sums + (tile * NB + row / 4) * 32 + r % 8 * 4 + row % 4;
        float y = 0, up = 0;
#pragma unroll 4
        for (int w = 0; w < warps; w++) y += from[w * stride];
        const float factor = p.norm && !HALF ? inverse_rms(partial, row, warps, p) : 1.f;
        y *= factor;
        if (p.gate) {
#pragma unroll 4
            for (int w = 0; w < warps; w++) up += from[w * stride + NB * 32];
            y = activated(y, up * factor, p);
        }
        const long long to = (long long)row * outputs + block.first + r;
        if (p.onto && i != threadIdx.x) base = plain(__ldcg(p.onto + to));
        y = fmaf(p.alpha, y, base);
        if (p.wide)
            ((float *)p.out)[to] = y;
        else
            ((u16 *)p.out)[to] = (u16)pack_pair(y, 0.f);
    }
}

template <int I> struct Count { static constexpr int value = I; };

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemv(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / p.column_warps, column_warp = warp - row_warp * p.column_warps;
    const Block block(p, blockIdx.x);
    const int row_bytes = p.K * BITS / 8, steps = (p.K + STEP - 1) / STEP, used_warps = min(p.column_warps, steps);
    const int my_steps = (steps - column_warp + p.column_warps - 1) / p.column_warps;
    const int my_tiles = (block.tiles - row_warp + p.row_warps - 1) / p.row_warps;

    const u32 ring_bytes = p.stages * 2 * TILE_BYTES;
    u8 *const tables = shared + blockDim.x / 32 * ring_bytes;
    const int halves = p.gate ? 2 : 1;
    const int scale_bytes = BITS == 16 ? 0 : halves * Table::half_bytes(p, block, SCALE_SIZE);
    const int other_bytes = KIND == 0 ? 0 : halves * Table::half_bytes(p, block, OTHER_SIZE);
    float *const sums = (float *)(tables + scale_bytes + other_bytes);  // [column_warps][tiles][2][NB][32]
    float *const partial = sums + p.column_warps * block.tiles * 2 * NB * 32;

    Scales scales;
    if (BITS != 16) scales.scale.request_rows(tables, p.scale, SCALE_SIZE, p, block);
    if (KIND == 1) scales.other.request_rows(tables + scale_bytes, p.zero, OTHER_SIZE, p, block);
    if (KIND == 2) scales.other.request_rows(tables + scale_bytes, p.shift, OTHER_SIZE, p, block);
    close_requests();

    // Where a lane's 16 bytes go: to itself, or, where lanes read each other's words, so that neither side has conflicts.
    const u32 slot = NARROW ? (t * 8 + (g ^ (2 * t))) * 16 : lane * 16;
    const u32 ring = address(shared) + warp * ring_bytes + slot;
    const int second_rows = p.gate ? 0 : 8, tile_stride = block.tile_rows * p.row_warps;
    const long long second = (long long)(p.gate ? p.N / 2 : 8) * row_bytes;
    const u8 *ask_column = p.weight + (long long)(block.first + row_warp * block.tile_rows + g) * row_bytes +
                           column_warp * STEP_BYTES + t * 16;
    const u8 *ask_from = ask_column;
    int ask_inside = row_bytes - column_warp * STEP_BYTES - t * 16, ask_row = row_warp * block.tile_rows + g;
    int to_ask = my_steps * my_tiles, ask_tiles = my_tiles;
    u32 ask_to = ring;
    auto ask = [&] {
        if (to_ask > 0) {
            const bool first_live = ask_row < block.count, second_live = ask_row + second_rows < block.count;
#pragma unroll
            for (int u = 0; u < 2 * UNITS; u++) {
                request(ask_to + u * 512, ask_from + u * 64, first_live && u * 64 < ask_inside ? 16 : 0);
                request(ask_to + TILE_BYTES + u * 512, ask_from + second + u * 64,
                        second_live && u * 64 < ask_inside ? 16 : 0);
            }
            ask_to += 2 * TILE_BYTES;
            if (ask_to == ring + ring_bytes) ask_to = ring;
            ask_row += tile_stride, ask_from += tile_stride * row_bytes;
            if (--ask_tiles == 0) {
                ask_tiles = my_tiles, ask_row = row_warp * block.tile_rows + g;
                ask_column += p.column_warps * STEP_BYTES, ask_inside -= p.column_warps * STEP_BYTES;
                ask_from = ask_column;
            }
            if (--to_ask == 0 && !EARLY) admit_next();  // its requests follow the block's own at once
        }
        close_requests();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ask();
    if (EARLY) admit_next();

    const int x_row = lane / 8, x_chunk = (lane / 4) % 2 * CHUNK;
    u32 x[NB][PAIRS], weight[1][PAIRS];
    float squares[NB] = {}, factor[NB] = {};
    if (p.norm) load_x(weight, p.norm, p.K, column_warp * STEP + x_chunk, t, 0, 1);
    if (BITS != 16) {
        await_requests<DEPTH>();  // the scales
        __syncthreads();
    }
    await_inputs();

    load_x(x, p.x, p.K, column_warp * STEP + x_chunk, t, x_row, p.T);
    // What the thread's output is added to, asked for now: memory is far.
    float base = 0;
    if (p.onto && threadIdx.x < block.count * p.T) {
        const int row = threadIdx.x / block.count, outputs = p.gate ? p.N / 2 : p.N;
        base = plain(__ldcg(p.onto + (long long)row * outputs + block.first + threadIdx.x - row * block.count));
    }
    if (HALF && p.norm) {
#pragma unroll 1
        for (int s = column_warp + (my_steps - 1) * p.column_warps; s >= 0; s -= p.column_warps) {
            if (my_steps > 1) load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
            add_squares(squares, x, g);
        }
        if (row_warp == 0) leave_squares(partial, squares, warp, g, t);
        __syncthreads();
#pragma unroll
        for (int b = 0; b < NB; b++) factor[b] = inverse_rms(partial, x_row + 4 * b, p.column_warps, p);
    }

    const u32 mask = opaque(p.mask);
    const int ring_start = warp * ring_bytes;
    int at = ring_start;
#pragma unroll 1
    for (int s = column_warp; s < steps; s += p.column_warps) {
        if (s != column_warp) {
            load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
            if (p.norm) load_x(weight, p.norm, p.K, s * STEP + x_chunk, t, 0, 1);
        }
        if (p.norm) {
            if (!HALF) add_squares(squares, x, g);
#pragma unroll
            for (int b = 0; b < NB; b++) weigh(x[b], weight[0], factor[b]);
        }
        Part part;
        part.set(x, p, s);
        float *to = sums + (column_warp * block.tiles + row_warp) * 2 * NB * 32 + lane;
        int row = row_warp * block.tile_rows;
        // Both tiles of an item at once, whose chains of products are independent, or the first alone.
        auto consume = [&](auto tiles) {
            await_requests<DEPTH - 1>();
            if (NARROW) __syncwarp();
            float total[tiles.value][NB];
#pragma unroll
            for (int i = 0; i < tiles.value; i++) {
                if constexpr (BITS == 16)
                    plain_tile(total[i], shared + at + i * TILE_BYTES + slot, x);
                else
                    packed_tile(total[i], shared + at + i * TILE_BYTES, scales, i, (row + g) * p.groups, part, x, slot, g, t, mask);
            }
#pragma unroll
            for (int i = 0; i < tiles.value; i++)
#pragma unroll
                for (int b = 0; b < NB; b++) {
                    float &sum = to[(i * NB + b) * 32];
                    sum = s == column_warp ? total[i][b] : sum + total[i][b];
                }
            if (NARROW) __syncwarp();
            ask();
            at += 2 * TILE_BYTES;
            if (at == ring_start + (int)ring_bytes) at = ring_start;
        };
#pragma unroll 1
        for (int i = 0; i < my_tiles; i++) {
            if (row + second_rows < block.count)
                consume(Count<2>{});
            else
                consume(Count<1>{});
            row += tile_stride, to += 2 * NB * 32 * p.row_warps;
        }
    }
    if (p.norm && !HALF && row_warp == 0) leave_squares(partial, squares, warp, g, t);
    __syncthreads();
    write_outputs(p, block, sums, partial, used_warps, base);
}
