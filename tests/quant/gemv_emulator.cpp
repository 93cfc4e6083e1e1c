// Runs the CUDA kernel of quant/kernels/gemv*.cu on the CPU, a block at a time: every thread is a coroutine that
// gives way at barriers. Asynchronous copies happen only when they are waited for, and shared memory starts as NaN.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#define EMULATED
#define __expf emulated_expf
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T> static T min(T a, T b) { return a < b ? a : b; }
template <class T> static T max(T a, T b) { return a > b ? a : b; }
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim;
alignas(128) unsigned char shared[1 << 20];

struct Barrier { int arrived = 0, generation = 0; };
struct Copy { unsigned to; const unsigned char *from; int bytes; int group; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    std::deque<Copy> copies;
    int closed = 0;
    bool done = false;
};
static std::vector<Thread> threads;
static std::vector<Barrier> warp_barriers;
static Barrier block_barrier;
static ucontext_t scheduler;
static int current;
static unsigned (*exchange)[32][6];  // [warps][lanes]

static void give_way() {
    swapcontext(&threads[current].context, &scheduler);
    threadIdx.x = current;
}
static void meet(Barrier &b, int count) {
    const int generation = b.generation;
    if (++b.arrived == count) b.arrived = 0, b.generation++;
    while (b.generation == generation) give_way();
}
static void meet_warp() { meet(warp_barriers[current / 32], 32); }
static void __syncthreads() { meet(block_barrier, blockDim.x); }
static void __syncwarp() { meet_warp(); }

static float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static unsigned as_bits(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
static unsigned __float_as_uint(float f) { return as_bits(f); }
static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) picked |= (unsigned)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}
static float emulated_expf(float v) { return std::exp(v); }
static float __fdividef(float a, float b) { return a / b; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
static float rsqrtf(float v) { return 1.f / std::sqrt(v); }
static float half_to_float(unsigned short bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
static unsigned rounded(float v) {
    if (HALF) { _Float16 h = (_Float16)v; unsigned short bits; std::memcpy(&bits, &h, 2); return bits; }
    unsigned bits = as_bits(v);
    return std::isnan(v) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned pack_pair(float low, float high) { return rounded(low) | rounded(high) << 16; }
static float number(unsigned pair, int high) {
    const unsigned short bits = pair >> 16 * high;
    return HALF ? half_to_float(bits) : __uint_as_float((unsigned)bits << 16);
}
static unsigned product_pair(unsigned a, unsigned b) {
    return pack_pair(number(a, 0) * number(b, 0), number(a, 1) * number(b, 1));
}
static unsigned address(const void *p) { return (const unsigned char *)p - shared; }
static void request(unsigned to, const unsigned char *from, int bytes) {
    Thread &t = threads[current];
    t.copies.push_back({to, from, bytes, t.closed});
}
static void close_requests() { threads[current].closed++; }
template <int LATER> static void await_requests() {
    Thread &t = threads[current];
    for (; !t.copies.empty() && t.copies.front().group < t.closed - LATER; t.copies.pop_front()) {
        const Copy &c = t.copies.front();
        std::memset(shared + c.to, 0, 16), std::memcpy(shared + c.to, c.from, c.bytes);
    }
}
static void await_inputs() {}
static void admit_next() {}
template <class T> static T __ldcg(const T *p) { return *p; }
static float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
static float from_lane(float v, int difference) {
    auto &lanes = exchange[current / 32];
    lanes[current % 32][0] = as_bits(v);
    meet_warp();
    const float other = __uint_as_float(lanes[(current % 32) ^ difference][0]);
    meet_warp();
    return other;
}
// PTX ISA, "Matrix fragments for mma.m16n8k16": lane (g, t) holds of A rows g and g + 8, columns 2t, 2t + 1 and 8 more;
// of B the same columns as rows, in column g; of C rows g and g + 8, columns 2t and 2t + 1.
static void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    auto &lanes = exchange[current / 32];
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    const int lane = current % 32, g = lane / 4, t = lane % 4;
    std::memcpy(lanes[lane], mine, sizeof mine);
    meet_warp();
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            const unsigned a = lanes[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
            const unsigned b = lanes[column * 4 + k % 8 / 2][4 + k / 8];
            sum += number(a, k % 2) * number(b, k % 2);
        }
        c[i] += sum;
    }
    meet_warp();
}
// mma.m16n8k32 of bytes: as above with four columns a register instead of two.
static void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    auto &lanes = exchange[current / 32];
    const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
    const int lane = current % 32, g = lane / 4, t = lane % 4;
    std::memcpy(lanes[lane], mine, sizeof mine);
    meet_warp();
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        for (int k = 0; k < 32; k++) {
            const unsigned a = lanes[row % 8 * 4 + k % 16 / 4][k / 16 * 2 + row / 8];
            const unsigned b = lanes[column * 4 + k % 16 / 4][4 + k / 16];
            c[i] += (int)(unsigned char)(a >> k % 4 * 8) * (int)(signed char)(b >> k % 4 * 8);
        }
    }
    meet_warp();
}

#include KERNEL

static const Params *parameters;
static void body() {
    gemv(*parameters);
    threads[current].done = true;
    swapcontext(&threads[current].context, &scheduler);
}

extern "C" void emulate(const Params *p, int grid, int count, int shared_bytes) {
    parameters = p;
    std::vector<unsigned> buffer(count * 6);
    exchange = (unsigned (*)[32][6])buffer.data();
    for (int block = 0; block < grid; block++) {
        blockIdx.x = block, blockDim.x = count;
        std::memset(shared, 0xff, sizeof shared);
        threads = std::vector<Thread>(count);
        warp_barriers.assign(count / 32, {}), block_barrier = {};
        for (Thread &t : threads) {
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = &scheduler;
            makecontext(&t.context, body, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (current = 0; current < count; current++)
                if (!threads[current].done) {
                    left = true, threadIdx.x = current;
                    swapcontext(&scheduler, &threads[current].context);
                }
        }
    }
}
// Whether a block wrote past the shared memory that it was launched with.
extern "C" int overrun(int shared_bytes) {
    for (unsigned at = shared_bytes; at < sizeof shared; at++)
        if (shared[at] != 0xff) return 1;
    return 0;
}
