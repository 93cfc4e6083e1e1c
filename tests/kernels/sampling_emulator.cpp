// Runs the CUDA kernel of minicpm_cli/kernels/sampling_*.cu on the CPU, a cluster at a time: every thread is a coroutine
// that gives way at barriers. Shared memory starts as ones, and a block's own is the only one that it may write; it is
// gone when the block ends.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint4 { unsigned x, y, z, w; };
struct Index { int x; };
static Index threadIdx, blockIdx;
static int min(int a, int b) { return a < b ? a : b; }

struct Memory;
struct Told;
struct Barrier { int arrived = 0, generation = 0; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    bool waited = false, done = false;  // for the launch before this one
};
static std::vector<Thread> threads;
static std::vector<Barrier> warp_barriers, block_barriers;
static Barrier cluster_barrier;
static ucontext_t scheduler;
static std::vector<std::vector<unsigned char>> memories;
static std::vector<unsigned long long> exchanged;
static int current, cluster, start;

static void place() { threadIdx.x = current % THREADS, blockIdx.x = start + current / THREADS; }
static void meet_at(Barrier &b, int count) {
    const int generation = b.generation;
    if (++b.arrived == count) b.arrived = 0, b.generation++;
    while (b.generation == generation) {
        swapcontext(&threads[current].context, &scheduler);
        place();
    }
}
static void meet_warp() { meet_at(warp_barriers[current / 32], 32); }
static void __syncthreads() { meet_at(block_barriers[current / THREADS], THREADS); }
static void meet_cluster() { meet_at(cluster_barrier, cluster * THREADS); }
static int block_rank() { return current / THREADS; }
static int blocks() { return cluster; }
static Memory &memory() { return *(Memory *)memories[block_rank()].data(); }
static const Told &told_by(int rank) { return *(const Told *)memories[rank].data(); }

static unsigned long long from_lane(unsigned long long v, int lane) {
    exchanged[current] = v;
    meet_warp();
    v = exchanged[current / 32 * 32 + lane];
    meet_warp();
    return v;
}
static unsigned long long __shfl_xor_sync(unsigned, unsigned long long v, int o) { return from_lane(v, current % 32 ^ o); }
static unsigned long long __shfl_up_sync(unsigned, unsigned long long v, int o) {
    const int lane = current % 32;
    return from_lane(v, lane < o ? lane : lane - o);
}
static unsigned __reduce_max_sync(unsigned, unsigned v) {
    exchanged[current] = v;
    meet_warp();
    for (int lane = 0; lane < 32; lane++) {
        const unsigned other = exchanged[current / 32 * 32 + lane];
        v = other > v ? other : v;
    }
    meet_warp();
    return v;
}
static unsigned atomicAdd(unsigned *to, unsigned v) { return (*to += v) - v; }
static float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __fadd_rn(float a, float b) { return a + b; }
static unsigned long long __float2ull_rn(float v) { return std::nearbyint((double)v); }
static float __fsub_rn(float a, float b) { return a - b; }
static float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
static float power(float x) { return std::exp2(x); }
static float of_half(unsigned bits) { _Float16 h; unsigned short b = bits; std::memcpy(&h, &b, 2); return (float)h; }
static void await_inputs() { threads[current].waited = true; }
static void admit_next() {}

#include KERNEL

static const Params *parameters;
static std::vector<int> left_of_block;
static bool waited;
static void body() {
    sampling(*parameters);
    waited &= threads[current].waited;
    threads[current].done = true;
    if (--left_of_block[block_rank()] == 0) std::memset(memories[block_rank()].data(), 0xff, sizeof(Memory));
    swapcontext(&threads[current].context, &scheduler);
}

extern "C" int shared_bytes() { return sizeof(Memory); }
// `backwards`: the last threads run first, which shows where one writes what another has yet to read. Returns whether
// all of them have waited for the launch before this one.
extern "C" int emulate(const Params *p, int rows, int blocks_of_row, int backwards) {
    parameters = p, cluster = blocks_of_row, waited = true;
    const int count = cluster * THREADS;
    exchanged.assign(count, 0);
    for (int row = 0; row < rows; row++) {
        start = row * cluster;
        memories.assign(cluster, std::vector<unsigned char>(sizeof(Memory), 0xff)), left_of_block.assign(cluster, THREADS);
        if ((int)threads.size() != count) threads = std::vector<Thread>(count);
        warp_barriers.assign(count / 32, {}), block_barriers.assign(cluster, {}), cluster_barrier = {};
        for (Thread &t : threads) {
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = &scheduler, t.waited = t.done = false;
            makecontext(&t.context, body, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (int turn = 0; turn < count; turn++)
                if (current = backwards ? count - 1 - turn : turn; !threads[current].done) {
                    left = true, place();
                    swapcontext(&scheduler, &threads[current].context);
                }
        }
    }
    return waited;
}
