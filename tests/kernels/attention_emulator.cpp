// Runs attention_decode_heads.cu (in clusters of one) and attention_decode_stream.cu on the CPU, a block at a time: every
// thread is a coroutine that gives way where it waits. Copies happen only when they are waited for, and shared memory
// starts as NaN. This text stands in for attention_decode_ptx.cu.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n)
#define __launch_bounds__(...)
#define __cluster_dims__(...)

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
alignas(128) u8 shared[1 << 19];

struct Meeting { int arrived = 0, generation = 0; };
struct Copy { u32 to; const void *from; int bytes; int group; };
struct Bulk { u32 to; const void *from; int bytes; };
struct Phase { int expected = 0, pending = 0, bytes = 0, parity = 0; std::deque<Bulk> asked; };
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 16);
    std::deque<Copy> copies;
    int closed = 0;
    bool waited = false, done = false;  // for the launch before this one
};
static std::vector<Thread> threads;
static std::vector<Meeting> warps;
static Meeting meetings[16];
static std::map<u32, Phase> phases;
static ucontext_t scheduler;
static int current, waits;
static bool early;  // what the launch before this one may still write was touched
static void touch() { early |= !threads[current].waited; }
static std::vector<u32> exchange;

static void give_way() {
    if (++waits > 1 << 26) abort();  // nobody goes on
    swapcontext(&threads[current].context, &scheduler);
    threadIdx.x = current;
}
static void join(Meeting &m, int count) {
    const int generation = m.generation;
    if (++m.arrived == count) m.arrived = 0, m.generation++, waits = 0;
    while (m.generation == generation) give_way();
}
static void meet(int barrier, int count) { join(meetings[barrier], count); }
static void __syncthreads() { meet(0, threads.size()); }
static void __syncwarp() { join(warps[current / 32], 32); }
static void __threadfence() {}
static u32 __shfl_sync(u32, u32 v, int lane) {
    exchange[current] = v;
    __syncwarp();
    const u32 other = exchange[current / 32 * 32 + lane % 32];
    __syncwarp();
    return other;
}
static int __shfl_sync(u32 mask, int v, int lane) { return (int)__shfl_sync(mask, (u32)v, lane); }
static u32 bits_of(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }
static float __uint_as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static float __shfl_sync(u32 mask, float v, int lane) { return __uint_as_float(__shfl_sync(mask, bits_of(v), lane)); }
static float __shfl_xor_sync(u32 mask, float v, int o) { return __shfl_sync(mask, v, current % 32 ^ o); }
static u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    u32 picked = 0;
    for (int i = 0; i < 4; i++) picked |= (u32)(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return picked;
}
static int __float2int_rn(float f) { return (int)std::nearbyint(f); }
template <class T> static T __ldg(const T *p) { return *p; }
template <class T> static T __ldcg(const T *p) { touch(); return *p; }
static int atomicAdd(int *p, int n) { touch(); const int before = *p; *p += n; return before; }
static int atomicExch(int *p, int n) { touch(); const int before = *p; *p = n; return before; }

static float f32_of_f16(u32 bits) { _Float16 h; const u16 low = bits; std::memcpy(&h, &low, 2); return (float)h; }
static u16 f16_of(float f) { const _Float16 h = (_Float16)f; u16 bits; std::memcpy(&bits, &h, 2); return bits; }
static u32 f16_pair(float a, float b) { return f16_of(a) | (u32)f16_of(b) << 16; }
static u32 bf16_of(float f) {
    const u32 bits = bits_of(f);
    return std::isnan(f) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static u32 bf16_pair(float a, float b) { return bf16_of(a) | bf16_of(b) << 16; }
static float of_fp8(u32 code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
    return (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -size : size;
}
static u32 fp8_of(float f) {  // the nearest, of two as near the even one; none is larger than 448
    const float size = std::fmin(std::fabs(f), 448.f);
    u32 best = 0;
    for (u32 code = 1; code < 0x7f; code++) {
        const float error = std::fabs(of_fp8(code) - size), least = std::fabs(of_fp8(best) - size);
        if (error < least || (error == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(f) ? 0x80 : 0);
}
static u32 fp8_pair(float a, float b) { return fp8_of(a) | fp8_of(b) << 8; }
static void f16_of_fp8(u32 word, u32 &low, u32 &high) {
    low = f16_pair(of_fp8(word & 0xff), of_fp8(word >> 8 & 0xff));
    high = f16_pair(of_fp8(word >> 16 & 0xff), of_fp8(word >> 24));
}
static u32 f16_times_plus(u32 a, u32 b, u32 c) {
    return f16_pair(f32_of_f16(a) * f32_of_f16(b) + f32_of_f16(c),
                    f32_of_f16(a >> 16) * f32_of_f16(b >> 16) + f32_of_f16(c >> 16));
}
static u32 f16_times(u32 a, u32 b) { return f16_times_plus(a, b, 0); }
static u32 f16_minus(u32 a, u32 b) { return f16_times_plus(b, 0xbc00bc00u, a); }
static float power(float x) { return std::exp2(x); }

static u32 shared_address(const void *p) { return (const u8 *)p - shared; }
static void copy(u32 to, const void *from, bool wanted, int bytes) {
    threads[current].copies.push_back({to, from, wanted ? bytes : -bytes, threads[current].closed});
}
static void copy16(u32 to, const void *from, bool wanted) { copy(to, from, wanted, 16); }
static void copy4(u32 to, const void *from, bool wanted) { copy(to, from, wanted, 4); }
static void commit() { threads[current].closed++; }
template <int left> static void arrived() {
    Thread &t = threads[current];
    for (; !t.copies.empty() && t.copies.front().group < t.closed - left; t.copies.pop_front()) {
        const Copy &c = t.copies.front();
        if (c.bytes < 0) std::memset(shared + c.to, 0, -c.bytes);
        if (c.bytes > 0) std::memcpy(shared + c.to, c.from, c.bytes);
    }
}
static uint4 fresh(const void *p) { touch(); return *(const uint4 *)p; }
static float fresh_scale(const u16 *p) { touch(); return f32_of_f16(*p); }
static void admit_next() {}
static void await_inputs() { threads[current].waited = true; }
static u32 in_block(const void *p, int) { return shared_address(p); }
static void send(u32 at, float a, float b, float c, float d, u32) { const float x[4] = {a, b, c, d}; std::memcpy(shared + at, x, 16); }
static void expect(const void *, int) {}
static void await(const void *) {}

static void begin_barrier(u32 at, int arrivals) { phases[at].expected = phases[at].pending = arrivals; }
static void show_barriers() {}
static void settle(Phase &p) {
    if (p.pending == 0 && p.bytes == 0) p.pending = p.expected, p.parity ^= 1, waits = 0;
}
static void arrive(u32 at) { phases[at].pending--, settle(phases[at]); }
static void expect_bytes(u32 at, int bytes) { phases[at].bytes += bytes, arrive(at); }
static void copy_bulk(u32 to, const void *from, int bytes, u32 barrier) {
    if (to % 16 || (uintptr_t)from % 16 || bytes % 16 || bytes <= 0) abort();
    std::memset(shared + to, 0xff, bytes);
    phases[barrier].asked.push_back({to, from, bytes});
}
static void await_phase(u32 at, int parity) {
    Phase &p = phases[at];
    while (p.parity == parity) {
        for (; !p.asked.empty(); p.asked.pop_front()) {
            const Bulk &b = p.asked.front();
            std::memcpy(shared + b.to, b.from, b.bytes), p.bytes -= b.bytes;
        }
        settle(p);
        if (p.parity == parity) give_way();
    }
}

#include KERNEL

static const Params *parameters;
static void body() {
    attention_decode(*parameters);
    threads[current].done = true;
    swapcontext(&threads[current].context, &scheduler);
}
static void run_block(int block, int count, bool uneven) {
    blockIdx.x = block, waits = 0;
    std::memset(shared, 0xff, sizeof shared);
    threads = std::vector<Thread>(count), exchange.assign(count, 0), warps.assign(count / 32, {}), phases.clear();
    for (Meeting &m : meetings) m = {};
    for (Thread &t : threads) {
        getcontext(&t.context);
        t.context.uc_stack.ss_sp = t.stack.data(), t.context.uc_stack.ss_size = t.stack.size();
        t.context.uc_link = &scheduler;
        makecontext(&t.context, body, 0);
    }
    u32 round = 0;
    for (bool left = true; left; round++) {
        left = false;
        for (current = 0; current < count; current++) {
            if (threads[current].done) continue;
            left = true;
            if (uneven && (round / 256 + 1u + current / 32) * 2654435761u >> 30 == 0) continue;
            threadIdx.x = current, swapcontext(&scheduler, &threads[current].context);
        }
    }
}

// `uneven`: each warp falls behind the others at times, which shows where one writes what another has yet to read.
extern "C" void emulate(const Params *p, int grid, int count, int uneven) {
    parameters = p, gridDim.x = grid, early = false;
    for (int block = 0; block < grid; block++) run_block(block, count, uneven);
}
// Whether a block wrote past the shared memory that it was launched with.
extern "C" int overrun(int shared_bytes) {
    for (unsigned at = shared_bytes; at < sizeof shared; at++)
        if (shared[at] != 0xff) return 1;
    return 0;
}
// Whether a thread read what the launch before this one writes, or told other blocks, without waiting for it.
extern "C" int too_early() { return early; }
