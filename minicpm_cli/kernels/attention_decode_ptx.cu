// The instructions of the decode kernels, apart from the tensor cores'. FLOAT16 and CLUSTER as in the text after this.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// ---- numbers ----
__device__ __forceinline__ float f32_of_f16(u32 bits) {
    float f;
    asm("{.reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "h"((u16)bits));
    return f;
}
__device__ __forceinline__ u16 f16_of(float f) {
    u16 h;
    asm("{.reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(h) : "f"(f));
    return h;
}
__device__ __forceinline__ u32 f16_pair(float a, float b) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
    return word;
}
__device__ __forceinline__ u32 bf16_pair(float a, float b) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
    return word;
}
__device__ __forceinline__ void f16_of_fp8(u32 word, u32 &low, u32 &high) {  // four codes
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(low), "=r"(high)
        : "r"(word));
}
__device__ __forceinline__ u32 f16_minus(u32 a, u32 b) {  // of pairs, as the next two
    u32 d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 f16_times(u32 a, u32 b) {
    u32 d;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ u32 f16_times_plus(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 fp8_pair(float a, float b) {
    u16 two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(two) : "f"(a), "f"(b));
    return two;
}
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- copies ----
__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from, bool wanted) {  // zeros where it is not wanted
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}
__device__ __forceinline__ uint4 fresh(const void *p) {  // past L1, which may hold the line as it was before the wait
    uint4 r;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(p)
                 : "memory");
    return r;
}
__device__ __forceinline__ float fresh_scale(const u16 *p) {
    u16 h;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(h) : "l"(p) : "memory");
    return f32_of_f16(h);
}

// ---- between launches and between the blocks of a cluster ----
__device__ __forceinline__ void admit_next() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void await_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ u32 in_block(const void *p, int rank) {  // the same place in another block of the cluster
    u32 at = shared_address(p);
    if (CLUSTER > 1) asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(at), "r"(rank));
    return at;
}
// A store that a barrier in the same block's memory counts. Ordinary stores before a cluster's barrier would need a
// fence of the whole GPU.
__device__ __forceinline__ void send(u32 at, float a, float b, float c, float d, u32 barrier) {
    if (CLUSTER > 1)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                     :
                     : "r"(at), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
                     : "memory");
    else
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void expect(const void *barrier, int bytes) {  // before the cluster's first barrier
    const u32 at = shared_address(barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1;}" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(const void *barrier) {
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(shared_address(barrier))
                     : "memory");
}

// ---- the copy engine and its barriers, which count bytes and warps ----
__device__ __forceinline__ void begin_barrier(u32 at, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void await_phase(u32 at, int parity) {
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
}
// What a step reads of the cache it reads once: it shall not drive anything else out of L2.
__device__ __forceinline__ void copy_bulk(u32 to, const void *from, int bytes, u32 barrier) {
    asm volatile("{.reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], once;}"
                 :
                 : "r"(to), "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
