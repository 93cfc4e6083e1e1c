// Runs the CUDA kernels of quant/kernels/rows.cu and rows_bulk.cu on the CPU, a cluster of blocks at a time: every thread
// is a coroutine that gives way at barriers. Asynchronous copies and products happen only when they are waited for, those
// of the copy engine also at once where `early` is set, and shared memory starts as NaN.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define __expf emulated_expf
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct ushort4 { u16 x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static ushort4 make_ushort4(u16 x, u16 y, u16 z, u16 w) { return {x, y, z, w}; }
static int min(int a, int b) { return a < b ? a : b; }
struct Index { int x; };
static Index threadIdx, blockIdx;

#ifdef EXPERTS
enum { BLOCK = 128 * WG };
#else
enum { BLOCK = 128 * WG + 32 };
#endif
enum { SHARED = 1 << 18, BASE = 16 };  // dynamic shared memory need not begin at a round address
struct Barrier { int arrived = 0, generation = 0; };
struct Copy { u32 to; const u8 *from; int group; };
struct Product { float *acc; u32 a[4]; u64 w, x; int group; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    std::deque<Copy> copies;
    std::deque<Product> products;
    int copies_closed = 0, products_closed = 0;
    bool done = false;
};
u8 raw[1];
static u8 memory[PARTS][SHARED];
static std::vector<Thread> threads;
static Barrier blocks[PARTS], workers[PARTS], groups[PARTS * WG], warps[PARTS * BLOCK / 32], cluster;
static u32 operands[PARTS * WG][128][4];
static ucontext_t scheduler;
static int current, first_block, highest;

static void enter(int thread) { current = thread, threadIdx.x = thread % BLOCK, blockIdx.x = first_block + thread / BLOCK; }
static void give_way() {
    const int me = current;
    swapcontext(&threads[me].context, &scheduler);
    enter(me);
}
static void meet(Barrier &b, int count) {
    const int generation = b.generation;
    if (++b.arrived == count) b.arrived = 0, b.generation++;
    while (b.generation == generation) give_way();
}
static void __syncthreads() { meet(blocks[current / BLOCK], BLOCK); }
static void meet_cluster() { meet(cluster, PARTS * BLOCK); }
static void meet_block() { __syncthreads(); }
static void meet_workers() { meet(workers[current / BLOCK], 128 * WG); }
static void meet_warp() { meet(warps[current / 32], 32); }

static float __uint_as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static u32 __float_as_uint(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }
static float emulated_expf(float v) { return std::exp(v); }
static float half_to_float(u16 bits) { _Float16 h; std::memcpy(&h, &bits, 2); return (float)h; }
static u32 rounded(double exact) {
    if (HALF) { _Float16 h = (_Float16)exact; u16 bits; std::memcpy(&bits, &h, 2); return bits; }
    const float v = (float)exact;
    const u32 bits = __float_as_uint(v);
    return std::isnan(v) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 pack_pair(float low, float high) { return rounded(low) | rounded(high) << 16; }
static double half_of(u32 pair, int high) {
    const u16 bits = pair >> 16 * high;
    return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16);
}
static u32 times_plus(u32 a, u32 b, u32 c) {
    u32 d[2];
    for (int i = 0; i < 2; i++) d[i] = rounded(half_of(a, i) * half_of(b, i) + half_of(c, i));
    return d[0] | d[1] << 16;
}
static const u32 ONES = HALF ? 0x3c003c00 : 0x3f803f80;
static u32 plus(u32 a, u32 b) { return times_plus(a, ONES, b); }
static u32 minus(u32 a, u32 b) { return times_plus(a, ONES, b ^ 0x80008000); }
static u32 times(u32 a, u32 b) { return times_plus(a, b, 0); }
static u32 number(u32 word, u32 mask, u32 magic) { return (word & mask) | magic; }

static u8 *at(u32 address, int size, int block) {
    highest = std::max(highest, (int)address + size - BASE);
    return memory[block] + address;
}
static u8 *at(u32 address, int size) { return at(address, size, current / BLOCK); }
static u32 address(const void *) { return BASE; }
static void request(u32 to, const u8 *from, bool valid) {
    Thread &t = threads[current];
    t.copies.push_back({to, valid ? from : nullptr, t.copies_closed});
}
static void close_requests() { threads[current].copies_closed++; }
template <int LATER> static void await_requests() {
    Thread &t = threads[current];
    for (; !t.copies.empty() && t.copies.front().group < t.copies_closed - LATER; t.copies.pop_front()) {
        const Copy &c = t.copies.front();
        c.from ? std::memcpy(at(c.to, 16), c.from, 16) : std::memset(at(c.to, 16), 0, 16);
    }
}
static void fetch_ahead(const u8 *from, int size) { volatile u8 first = from[0], last = from[size - 1]; }
static u32 fetch4(const u32 *from) { return *from; }
static u32 fetch2(const u16 *from) { return *from; }
static u32 fetch1(const u8 *from) { return *from; }
static void await_inputs() {}
static void admit_next() {}
static void show_arrived() {}
static void fence_multiply() {}
static void settle(float &) {}  // of a product
static uint4 read4(u32 from) { uint4 v; std::memcpy(&v, at(from, 16), 16); return v; }
static u32 read1(u32 from) { u32 v; std::memcpy(&v, at(from, 4), 4); return v; }
static void write1(u32 to, u32 v) { std::memcpy(at(to, 4), &v, 4); }
static float4 read_sums(u32 from, int rank) { float4 v; std::memcpy(&v, at(from, 16, rank), 16); return v; }
static float read_sum(u32 from, int rank) { float v; std::memcpy(&v, at(from, 4, rank), 4); return v; }

// A barrier in shared memory: a phase ends when all have arrived and all bytes that were announced have come.
struct Counter { int arrivals, left, bytes, phase; };
struct Map { const u8 *base; u64 sizes[4], strides[3]; u32 box[4], number, swizzle; };
struct Box { const Map *map; int at[4]; u32 to; };
static std::map<std::pair<int, u32>, Counter> counters;
static std::map<std::pair<int, u32>, std::deque<Box>> boxes;
static int early, misplaced;

static void settle(Counter &c) {
    if (c.left == 0 && c.bytes == 0) c.left = c.arrivals, c.phase++;
}
static void begin_barrier(u32 at, int arrivals) { counters[{current / BLOCK, at}] = {arrivals, arrivals, 0, 0}; }
static void show_barriers() {}
static void arrive(u32 at, int block, int bytes) {
    Counter &c = counters.at({block, at});
    c.bytes += bytes, c.left--;
    misplaced += c.left < 0;
    settle(c);
}
static void arrive(u32 at) { arrive(at, current / BLOCK, 0); }
static void expect_bytes(u32 at, int bytes) { arrive(at, current / BLOCK, bytes); }
// CUDA driver API, cuTensorMapEncodeTiled: zeros beyond the ends; of swizzled addresses bits 4 to 6 (5 for 64 bytes) are
// exchanged with bits 7 to 9 (8).
static void deliver(int block, u32 barrier, const Box &box) {
    const Map &m = *box.map;
    const u32 width = m.box[0] * m.number, mask = m.swizzle == 3 ? 7 : 3;
    misplaced += width != (m.swizzle == 3 ? 128 : 64) || box.to % (8 * width) != 0;
    const u32 bytes = width * m.box[1] * m.box[2] * m.box[3];
    for (u32 b = 0; b < bytes; b++) {
        u32 each[4] = {b % width / m.number, b / width % m.box[1], b / width / m.box[1] % m.box[2], b / width / m.box[1] / m.box[2]};
        bool inside = true;
        u64 from = b % m.number + (box.at[0] + each[0]) * m.number;
        for (int d = 0; d < 4; d++) {
            inside = inside && box.at[d] + each[d] < m.sizes[d];
            if (d) from += (box.at[d] + each[d]) * m.strides[d - 1];
        }
        const u32 linear = box.to + b, to = linear ^ (linear >> 7 & mask) << 4;
        *at(to, 1, block) = inside ? m.base[from] : 0;
    }
    Counter &c = counters.at({block, barrier});
    c.bytes -= bytes;
    settle(c);
}
static void load(u32 barrier, const Box &box) {
    const int block = current / BLOCK;
    early ? deliver(block, barrier, box) : boxes[{block, barrier}].push_back(box);
}
static void load_box(u32 to, const void *map, int column, int row, u32 barrier) {
    load(barrier, {(const Map *)map, {column, row}, to});
}
static void load_chunks(u32 to, const void *map, int chunk, int group, u32 barrier) {
    load(barrier, {(const Map *)map, {0, 0, chunk, group}, to});
}
static void await_barrier(u32 at, int parity) {
    const std::pair<int, u32> key = {current / BLOCK, at};
    for (; (counters.at(key).phase & 1) == parity; give_way())
        for (auto &waiting = boxes[key]; !waiting.empty(); waiting.pop_front()) deliver(key.first, at, waiting.front());
}

static void multiply(float (&acc)[NT / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 x) {
    Thread &t = threads[current];
    t.products.push_back({acc, {a0, a1, a2, a3}, 0, x, t.products_closed});
}
static void multiply_shared(float (&acc)[NT / 2], u64 w, u64 x) {
    Thread &t = threads[current];
    t.products.push_back({acc, {}, w, x, t.products_closed});
}
static void close_multiply() { threads[current].products_closed++; }
// PTX ISA, "Register fragments for wgmma.m64nNk16" and "Shared memory matrix layout", 128-byte swizzling: warp w has rows
// 16w on, as mma.m16n8k16; row t of x is 128 bytes after the one before, and bits 4 to 6 of an address are exchanged
// with bits 7 to 9.
static u16 element(u64 matrix, int row, int k) {
    const u32 step = (matrix >> 32 & 0x3fff) << 4, linear = ((matrix & 0x3fff) << 4) + row / 8 * step + row % 8 * 128 + k * 2;
    u16 bits;
    std::memcpy(&bits, at(linear ^ (linear >> 7 & 7) << 4, 2), 2);
    return bits;
}
static void execute(const Product &product) {
    const int local = current % BLOCK, group = current / BLOCK * WG + local / 128;
    const int lane = current % 32, g = lane / 4, c = lane % 4, warp = local % 128 / 32;
    std::memcpy(operands[group][local % 128], product.a, 16);
    meet(groups[group], 128);
    for (int i = 0; i < NT / 2; i++) {
        const int row = 16 * warp + g + i / 2 % 2 * 8, t = i / 4 * 8 + 2 * c + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            const u32 a = product.w ? element(product.w, row, k) << k % 2 * 16
                                    : operands[group][row / 16 * 32 + row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row % 16 / 8];
            sum += half_of(a, k % 2) * half_of(element(product.x, t, k), 0);
        }
        product.acc[i] += sum;
    }
    meet(groups[group], 128);
}
template <int LATER> static void await_multiply() {
    Thread &t = threads[current];
    for (; !t.products.empty() && t.products.front().group < t.products_closed - LATER; t.products.pop_front())
        execute(t.products.front());
}

#include COMMON
#include KERNEL

static const Params *parameters;
static void body() {
    enter(current);
    rows(*parameters);
    threads[current].done = true;
    swapcontext(&threads[current].context, &scheduler);
}

// Returns how many bytes of shared memory were used; -1 where threads wait for each other for ever, -2 where a barrier
// counted too much or a box lies askew.
extern "C" int emulate(const Params *p, int grid, int at_once) {
    parameters = p, highest = 0, early = at_once, misplaced = 0;
    for (first_block = 0; first_block < grid; first_block += PARTS) {
        std::memset(memory, 0xff, sizeof memory);
        threads = std::vector<Thread>(PARTS * BLOCK);
        counters.clear(), boxes.clear();
        for (Barrier &b : blocks) b = {};
        for (Barrier &b : groups) b = {};
        for (Barrier &b : workers) b = {};
        for (Barrier &b : warps) b = {};
        cluster = {};
        for (Thread &t : threads) {
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
            t.context.uc_link = nullptr;
            makecontext(&t.context, body, 0);
        }
        for (size_t left = threads.size(), rounds = 0; left; rounds++) {
            if (rounds > 100000) return -1;
            for (size_t i = 0; i < threads.size(); i++) {
                if (threads[i].done) continue;
                current = (int)i;
                swapcontext(&scheduler, &threads[i].context);
                left -= threads[i].done;
            }
        }
    }
    return misplaced ? -2 : highest;
}
