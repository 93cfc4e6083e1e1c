// y[T, N] = x[T, K] W[N, K]^T for 1 to 8 rows of x, with the norm before and the gate and sum after it. The kernel is this
// text, then gemv_plain.cu, or gemv_packed.cu (how x is prepared and multiplied) and gemv_main.cu.
//
// The tensor cores multiply, since unpacking is the work: a warp's product takes 8 rows of W, of which the upper half of
// A holds one chunk of columns and the lower half the next chunk; columns of B hold a row of x in one of the chunks. The
// order of the columns inside a chunk is free as long as W and x agree on it: a lane (g, t) = (lane / 4, lane % 4) loads
// 16 bytes at a time of row g of W, and the same elements of x.
//
// W streams through shared memory (cp.async), DEPTH items ahead: an item is two tiles of 8 rows (neighbours, or a gate
// and its up) by one step (two chunks). Requests start before griddepcontrol.wait, while the kernel that computes x
// still runs. A step belongs to one warp, which keeps its part of x in registers over all rows of the block; the warps'
// sums meet in shared memory at the end. Between the wait and the first product no block waits for its other warps: the
// norm's 1 / rms, the same for all columns, is applied to the sums.
//
// Set by the compiler's options: BITS (16: plain weights), HALF (x is float16, else bfloat16), SCALE (0 float16,
// 1 bfloat16, 2 float32), KIND (0 middle, 1 zero points, 2 shifts), RUN (words in a row that share a scale: 4 where a
// lane's 16 bytes lie in one group of the whole chunk), NB (blocks of rows of x: 4 plain, 2 packed), DEPTH.
//
// The two kernels share no more than stands here: with one body for both, plain weights took other instructions than
// those that were measured.

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
    float eps, alpha, threshold;
};

enum { CHUNK = BITS == 4 ? 128 : 64, STEP = 2 * CHUNK, STEP_BYTES = STEP * BITS / 8, MOST_WARPS = 12 };
constexpr int RESIDENT = NB == 1 ? 2 : 1;  // more rows need more registers: T = 8 took 2.1 ms with two, 1.3 with one

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
__device__ __forceinline__ void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
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
__device__ __forceinline__ u32 product_pair(u32 a, u32 b) {  // bfloat16 only
    u32 pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}
__device__ __forceinline__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float larger(float a, float b) {  // not a number if one of them is not
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float from_lane(float v, int difference) {
    return __shfl_xor_sync(0xffffffffu, v, difference);
}
#endif

__device__ __forceinline__ float plain(u16 bits) { return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16); }

struct Block {
    int first, count, tile_rows, tiles;  // its outputs, and how many of them two tiles of W give; how often two tiles
    __device__ __forceinline__ Block(const Params &p, int block) {
        first = block * p.least_rows + min(block, p.longer_blocks);
        count = p.least_rows + (block < p.longer_blocks);
        tile_rows = p.gate ? 8 : 16;
        tiles = (count + tile_rows - 1) / tile_rows;
    }
};

__device__ __forceinline__ float activated(float gate, float up, const Params &p) {
    if (p.gate == 1) return gate / (1.f + __expf(-gate)) * up;
    return gate >= p.threshold ? gate * up : 0.f * up;
}

template <int I> struct Count { static constexpr int value = I; };
