// The instructions of the kernel in rows.cu. Pairs are two numbers of x's type in a word. Before this text goes
// `multiply(acc, a0, a1, a2, a3, x)`, a wgmma of 64 x NT x 16.

#if HALF
#define PAIR "f16x2"
#define OF ""
#else
#define PAIR "bf16x2"
#define OF ".rn"
#endif
__device__ __forceinline__ u32 plus(u32 a, u32 b) {
    u32 d;
    asm("add" OF "." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 minus(u32 a, u32 b) {
    u32 d;
    asm("sub" OF "." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 d;
    asm("mul" OF "." PAIR " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 times_plus(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn." PAIR " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 d;
    asm("cvt.rn." PAIR ".f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float half_to_float(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}
// (word & mask) | magic in one instruction, of which only one operand may be a constant.
__device__ __forceinline__ u32 number(u32 word, u32 mask, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(word), "r"(mask), "r"(magic));
    return d;
}
__device__ __forceinline__ u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void request(u32 to, const u8 *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_requests() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void await_requests() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void fetch_ahead(const u8 *from, int size) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size) : "memory");
}
// Constants of the model, in the order in which they are asked for.
__device__ __forceinline__ u32 fetch4(const u32 *from) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}
__device__ __forceinline__ u32 fetch2(const u16 *from) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(from));
    return v;
}
__device__ __forceinline__ u32 fetch1(const u8 *from) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void admit_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// What arrived in shared memory is there for wgmma, too.
__device__ __forceinline__ void show_arrived() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ uint4 read4(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 read1(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void write1(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
__device__ __forceinline__ float4 read_sums(u32 at, int rank) {  // of the cluster's block `rank`
    float4 v;
    if (PARTS > 1) asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ float read_sum(u32 at, int rank) {
    float v;
    if (PARTS > 1) asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void fence_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER> __device__ __forceinline__ void await_multiply() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
__device__ __forceinline__ void settle(float &sum) { asm volatile("" : "+f"(sum)::"memory"); }  // not read before
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies of boxes by the copy engine and the barriers that count their bytes, for rows_bulk.cu.
__device__ __forceinline__ void begin_barrier(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await_barrier(u32 at, int parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(at),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void load_box(u32 to, const void *map, int column, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
                     "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// A box of eight rows, chunks of columns, and groups of eight rows.
__device__ __forceinline__ void load_chunks(u32 to, const void *map, int chunk, int group, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %2, %3, %4}], [%5];" ::"r"(to), "l"(map), "r"(0), "r"(chunk), "r"(group), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void meet_warp() { __syncwarp(); }
__device__ __forceinline__ void meet_block() { __syncthreads(); }
__device__ __forceinline__ void meet_workers() { asm volatile("bar.sync 1, %0;" ::"n"(128 * WG) : "memory"); }
