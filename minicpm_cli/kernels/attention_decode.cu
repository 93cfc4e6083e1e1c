// Decode attention where each query head has a key head of its own: bound by the reading of the cache alone.
//
// A warp takes every SUB * CLUSTER-th of the groups of STEP tokens of one head: WIDE threads a token, 16 bytes each, SIDE
// tokens side by side, DEPTH of them one after the other. Every side keeps a softmax of its own in registers; they meet
// once, at the end: within the warp by shuffles, then in the shared memory of the first block of the cluster, always in
// the same order. The loop has no barrier: a thread copies (cp.async) and reads only its own 16 bytes of the ring.
//
// The newest token, which the kernel before this one wrote, begins the softmax of the first warp; all older ones lie in
// the cache since earlier steps and are requested before griddepcontrol.wait. With TURN > 0 the kernel itself rotates
// (the last 2 * TURN elements of a head, i with i + TURN) and stores the newest token, which q then holds beside the
// queries: heads of queries, keys and values in a row.
//
// Set by the compiler's options: D, HEADS, PAGE, KIND (cache: 0 as q, 1 float8 e4m3, 2 int8, the last two with a float16
// scale for each head), FLOAT16 (q, else bfloat16), TURN, WARPS, BLOCK (heads a block), CLUSTER, DEPTH, STAGES.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

constexpr int up(int n) { return n <= 1 ? 1 : 2 * up((n + 1) / 2); }
enum { BYTES = KIND ? 1 : 2, EACH = 16 / BYTES, WIDE = up((D + EACH - 1) / EACH), SIDE = 32 / WIDE, STEP = SIDE * DEPTH };
enum { SUB = WARPS / BLOCK, PARTS = CLUSTER * SUB, ROW = D + 4, LEAD = D - 2 * TURN, CODED = KIND ? STEP * 2 : 0 };
enum { RING = STAGES * DEPTH * 2 * 32 * 16, WARP_BYTES = RING + STAGES * CODED * 4 };
static_assert(D % EACH == 0 && PARTS <= 32 && WIDE <= 32 && WARPS % BLOCK == 0 && HEADS % BLOCK == 0);
static_assert(TURN % EACH == 0 && LEAD % EACH == 0);
constexpr float LOWEST = -1e30f, LARGEST = KIND == 2 ? 127.f : 448.f;

struct Params {
    const u8 *q;
    u8 *k, *v;
    u16 *k_scale, *v_scale;
    const int *table, *lengths;
    const float *cos, *sin;
    u8 *out;
    int q_stride, row_stride, scale_stride, table_stride;  // elements, from row to row
    float scale_log2;
};

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
__device__ __forceinline__ void pair(u32 word, float &a, float &b) {  // two elements of q's type
    if (FLOAT16) {
        a = f32_of_f16(word & 0xffff), b = f32_of_f16(word >> 16);
    } else {
        a = __uint_as_float(word << 16), b = __uint_as_float(word & 0xffff0000u);
    }
}
__device__ __forceinline__ u32 packed(float a, float b) {
    u32 word;
    if (FLOAT16)
        asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
    else
        asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
    return word;
}
__device__ __forceinline__ void codes(u32 word, float *f) {  // four elements of 8 bits
    if (KIND == 1) {
        u32 low, high;
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
            : "=r"(low), "=r"(high) : "r"(word));
        f[0] = f32_of_f16(low & 0xffff), f[1] = f32_of_f16(low >> 16);
        f[2] = f32_of_f16(high & 0xffff), f[3] = f32_of_f16(high >> 16);
    } else {
        word ^= 0x80808080u;  // code + 128 as the last byte of 2^23 + code + 128
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388736.f;
    }
}
__device__ __forceinline__ void unpack(uint4 raw, float (&f)[EACH]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (KIND)
            codes(words[i], f + (KIND ? 4 * i : 0));
        else
            pair(words[i], f[2 * i], f[2 * i + 1]);
    }
}

// ---- instructions ----
__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void *from, bool wanted) {  // zeros where it is not wanted
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void *from, bool wanted) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int left>
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory"); }
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ uint4 fresh(const void *p) {  // past L1, which may hold the line as it was before the wait
    uint4 r;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p) : "memory");
    return r;
}
__device__ __forceinline__ float fresh_scale(const u16 *p) {
    u16 h;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(h) : "l"(p) : "memory");
    return f32_of_f16(h);
}
__device__ __forceinline__ float across(float x) {  // the sum over a token's threads
#pragma unroll
    for (int o = WIDE / 2; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

struct Place {  // what a thread works on
    int row, head, part, side, lane;  // part: which 16 bytes of a head
    bool inside;
};

__device__ __forceinline__ size_t slot_of(const Params &p, const Place &me, int token) {
    const int *table = p.table + (size_t)me.row * p.table_stride;
    return (size_t)__ldg(table + token / PAGE) * PAGE + token % PAGE;
}

// ---- the newest token ----
__device__ __forceinline__ void load_wide(const u8 *q, float (&f)[EACH]) {  // EACH elements of q's type
#pragma unroll
    for (int i = 0; i < EACH / 8; i++) {
        const uint4 r = fresh(q + 16 * i);
        pair(r.x, f[8 * i], f[8 * i + 1]), pair(r.y, f[8 * i + 2], f[8 * i + 3]);
        pair(r.z, f[8 * i + 4], f[8 * i + 5]), pair(r.w, f[8 * i + 6], f[8 * i + 7]);
    }
}
struct Angle {  // of a thread's elements; other stands for the partner's factor
    float own[EACH], other[EACH];
};
__device__ __forceinline__ void load_angle(const Params &p, const Place &me, Angle &angle) {
    const int first = me.part * EACH - LEAD;
#pragma unroll
    for (int i = 0; i < EACH; i++) angle.own[i] = 1.f, angle.other[i] = 0.f;
    if (TURN == 0 || first < 0 || !me.inside) return;
    const bool low = first < TURN;
    const size_t at = (size_t)me.row * TURN + (low ? first : first - TURN);
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const float4 c = __ldcg((const float4 *)(p.cos + at + i)), s = __ldcg((const float4 *)(p.sin + at + i));
        angle.own[i] = c.x, angle.own[i + 1] = c.y, angle.own[i + 2] = c.z, angle.own[i + 3] = c.w;
        angle.other[i] = low ? -s.x : s.x, angle.other[i + 1] = low ? -s.y : s.y;
        angle.other[i + 2] = low ? -s.z : s.z, angle.other[i + 3] = low ? -s.w : s.w;
    }
}
struct Head {  // a thread's elements and their partners
    float own[EACH], other[EACH];
};
__device__ __forceinline__ void load_head(const Params &p, const Place &me, int head, bool turned, Head &h) {
    const u8 *at = p.q + 2 * ((size_t)me.row * p.q_stride + head * D);
    const int first = me.part * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) h.own[i] = h.other[i] = 0.f;
    if (!me.inside) return;
    load_wide(at + 2 * first, h.own);
    if (TURN && turned && first >= LEAD) load_wide(at + 2 * (first < LEAD + TURN ? first + TURN : first - TURN), h.other);
}
__device__ __forceinline__ void turn(Head &h, const Angle &angle) {  // rounded, as if it had been stored
    if (!TURN) return;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        const float a = h.own[i] * angle.own[i] + h.other[i] * angle.other[i];
        const float b = h.own[i + 1] * angle.own[i + 1] + h.other[i + 1] * angle.other[i + 1];
        pair(packed(a, b), h.own[i], h.own[i + 1]);
    }
}
__device__ __forceinline__ float rounded_scale(float exact) {
    const float scale = f32_of_f16(f16_of(exact));
    return scale == 0.f ? 1.f : scale;
}
__device__ __forceinline__ u32 fp8_pair(float a, float b) {
    u16 two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(two) : "f"(a), "f"(b));
    return two;
}
__device__ __forceinline__ u32 four_codes(const float *f, float scale) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = fminf(fmaxf(f[i] / scale, -LARGEST), LARGEST);
    if (KIND == 1) return fp8_pair(x[0], x[1]) | fp8_pair(x[2], x[3]) << 16;
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= ((u32)__float2int_rn(x[i]) & 0xff) << 8 * i;
    return word;
}
__device__ __forceinline__ float fp8_error(const float (&f)[EACH], float scale) {
    float sum = 0.f;
    const float by = 1.f / scale;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const float x[4] = {f[i % EACH] * by, f[(i + 1) % EACH] * by, f[(i + 2) % EACH] * by, f[(i + 3) % EACH] * by};
        float y[4];
        codes(fp8_pair(x[0], x[1]) | fp8_pair(x[2], x[3]) << 16, y);
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (y[j] - x[j]) * (y[j] - x[j]);
    }
    return across(sum) * scale * scale;
}
__device__ __forceinline__ float best_scale(const float (&f)[EACH]) {  // as minicpm_cli.kernels.cache.encode chooses it
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) peak = fmaxf(peak, fabsf(f[i]));
#pragma unroll
    for (int o = WIDE / 2; o; o /= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
    float scale = rounded_scale(peak / LARGEST);
    if (KIND == 2) return scale;
    float least = fp8_error(f, scale);
    for (int code = 416; code >= 256; code -= 32) {
        const float other = rounded_scale(peak / code), error = fp8_error(f, other);
        if (error < least) scale = other, least = error;
    }
    return scale;
}
__device__ __forceinline__ void keep(float (&f)[EACH], u8 *to, u16 *scale_to, const Place &me) {  // f: as it is kept
    const bool mine = me.side == 0 && me.inside;
    uint4 raw;
    if (KIND) {
        const float scale = best_scale(f);
        raw = {four_codes(f, scale), four_codes(f + 4, scale), four_codes(f + 8 % EACH, scale), four_codes(f + 12 % EACH, scale)};
        unpack(raw, f);
#pragma unroll
        for (int i = 0; i < EACH; i++) f[i] *= scale;
        if (mine && me.part == 0) *scale_to = f16_of(scale);
    } else {
        raw = {packed(f[0], f[1]), packed(f[2], f[3]), packed(f[4], f[5]), packed(f[6], f[7])};
    }
    if (mine) *(uint4 *)to = raw;
}
__device__ __forceinline__ void kept(float (&f)[EACH], const u8 *from, const u16 *scale, const Place &me) {
    unpack(me.inside ? fresh(from) : uint4{0, 0, 0, 0}, f);
    if (!KIND) return;
    const float by = fresh_scale(scale);
#pragma unroll
    for (int i = 0; i < EACH; i++) f[i] *= by;
}
// The newest token's key and value: out of q, or, already stored, out of the cache.
__device__ __forceinline__ void load_newest(const Params &p, const Place &me, size_t slot, Head &k, Head &v) {
    const size_t at = (slot * p.row_stride + me.head * D + me.part * EACH) * BYTES;
    const size_t scale = KIND ? slot * p.scale_stride + me.head : 0;
    if (TURN) {
        load_head(p, me, HEADS + me.head, true, k);
        load_head(p, me, 2 * HEADS + me.head, false, v);
    } else {
        kept(k.own, p.k + at, p.k_scale + scale, me);
        kept(v.own, p.v + at, p.v_scale + scale, me);
    }
}
__device__ __forceinline__ void keep_newest(const Params &p, const Place &me, size_t slot, const Angle &angle, Head &k, Head &v) {
    if (!TURN) return;
    const size_t at = (slot * p.row_stride + me.head * D + me.part * EACH) * BYTES;
    const size_t scale = KIND ? slot * p.scale_stride + me.head : 0;
    turn(k, angle);
    keep(k.own, p.k + at, p.k_scale + scale, me);
    keep(v.own, p.v + at, p.v_scale + scale, me);
}

// ---- the older tokens ----
__device__ __forceinline__ void request(const Params &p, const Place &me, u8 *stage, u32 *coded, int unit, int older) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int token = unit * STEP + d * SIDE + me.side;
        const bool wanted = me.inside && token < older;
        const size_t slot = wanted ? slot_of(p, me, token) : 0;
        const size_t at = (slot * p.row_stride + me.head * D + (me.inside ? me.part : 0) * EACH) * BYTES;
        copy16(shared_address(stage + (2 * d * 32 + me.lane) * 16), p.k + at, wanted);
        copy16(shared_address(stage + ((2 * d + 1) * 32 + me.lane) * 16), p.v + at, wanted);
    }
#pragma unroll
    for (int i = me.lane; i < CODED; i += 32) {  // the aligned word around a scale: of a token's key, of its value
        const int token = unit * STEP + i / 2;
        const size_t slot = token < older ? slot_of(p, me, token) : 0;
        const u16 *at = (i & 1 ? p.v_scale : p.k_scale) + slot * p.scale_stride + me.head;
        copy4(shared_address(coded + i), (const void *)((size_t)at & ~(size_t)3), token < older);
    }
}
__device__ __forceinline__ float scale_in(u32 word, const u16 *base, int head) {
    return f32_of_f16(((size_t)(base + head) & 2 ? word >> 16 : word) & 0xffff);
}
struct Softmax {
    float top, total, mixed[EACH];
};
__device__ __forceinline__ void begin(
    const Place &me, Softmax &s, const float (&q)[EACH], const float (&k)[EACH], const float (&v)[EACH]
) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) score += k[i] * q[i];
    score = across(score);
    if (me.side != 0) return;
    s.top = score, s.total = 1.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] = v[i];
}
__device__ __forceinline__ void take(
    const Params &p, const Place &me, Softmax &s, const float (&q)[EACH], const u8 *stage, const u32 *coded, int unit, int older
) {
    float score[DEPTH], by[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        float k[EACH], sum = 0.f;
        unpack(*(const uint4 *)(stage + (2 * d * 32 + me.lane) * 16), k);
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += k[i] * q[i];
        score[d] = across(sum);
    }
    float top = s.top;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int at = d * SIDE + me.side;
        if (KIND) {  // rows of scales are whole words, so that a head's half is the same in all of them
            score[d] *= scale_in(coded[2 * at], p.k_scale, me.head);
            by[d] = scale_in(coded[2 * at + 1], p.v_scale, me.head);
        }
        score[d] = unit * STEP + at < older ? score[d] : LOWEST * 2.f;
        top = fmaxf(top, score[d]);
    }
    const float fade = power(s.top - top);
    s.top = top, s.total *= fade;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] *= fade;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        float weight = power(score[d] - top), v[EACH];
        s.total += weight;
        if (KIND) weight *= by[d];
        unpack(*(const uint4 *)(stage + ((2 * d + 1) * 32 + me.lane) * 16), v);
#pragma unroll
        for (int i = 0; i < EACH; i++) s.mixed[i] += weight * v[i];
    }
}

// ---- putting together ----
__device__ __forceinline__ void gather_sides(Softmax &s) {
    float top = s.top;
#pragma unroll
    for (int o = WIDE; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float fade = power(s.top - top);
    s.top = top, s.total *= fade;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] *= fade;
#pragma unroll
    for (int o = WIDE; o < 32; o *= 2) {
        s.total += __shfl_xor_sync(~0u, s.total, o);
#pragma unroll
        for (int i = 0; i < EACH; i++) s.mixed[i] += __shfl_xor_sync(~0u, s.mixed[i], o);
    }
}
__device__ __forceinline__ u32 in_first_block(const void *p) {
    u32 at = shared_address(p);
    if (CLUSTER > 1) asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(at) : "r"(at));
    return at;
}
// A store that the barrier in the same block's memory counts; no fence is needed, as one of the whole GPU would be for
// ordinary stores before a cluster's barrier.
__device__ __forceinline__ void send(u32 at, float a, float b, float c, float d, u32 barrier) {
    if (CLUSTER > 1)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                     "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
    else
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void put(const Place &me, const Softmax &s, float *to, const void *barrier) {
    if (me.side != 0) return;
    const u32 at = in_first_block(to), by = in_first_block(barrier);
#pragma unroll
    for (int i = 0; i < EACH; i += 4)
        if (me.inside)
            send(at + (me.part * EACH + i) * 4, s.mixed[i], s.mixed[i + 1], s.mixed[i + 2], s.mixed[i + 3], by);
    if (me.part == 0) send(at + D * 4, s.top, s.total, 0.f, 0.f, by);
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
                     : "=r"(done) : "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void finish(const Params &p, const Place &me, const float *parts, int count) {
    const bool live = me.lane < count;
    const float *mine = parts + (live ? me.lane : 0) * ROW + D;
    float top = live ? mine[0] : LOWEST;
#pragma unroll
    for (int o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float weight = live ? power(mine[0] - top) : 0.f, total = live ? weight * mine[1] : 0.f;
#pragma unroll
    for (int o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    weight /= total;
#pragma unroll
    for (int first = 0; first < D; first += 64) {
        const int at = first + 2 * me.lane;
        float a = 0.f, b = 0.f;
        for (int i = 0; i < count; i++) {
            const float w = __shfl_sync(~0u, weight, i);
            const float2 x = *(const float2 *)(parts + i * ROW + (at < D ? at : 0));
            a += w * x.x, b += w * x.y;
        }
        if (at < D) *(u32 *)(p.out + 2 * (((size_t)me.row * HEADS + me.head) * D + at)) = packed(a, b);
    }
}
__device__ __forceinline__ void write(const Params &p, const Place &me, const Softmax &s) {
    if (me.side != 0 || !me.inside) return;
    const float by = 1.f / s.total;
    u8 *to = p.out + 2 * (((size_t)me.row * HEADS + me.head) * D + me.part * EACH);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) *(u32 *)(to + 2 * i) = packed(s.mixed[i] * by, s.mixed[i + 1] * by);
}

// With many rows registers make room for blocks; with few each block's own latency counts.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CLUSTER > 1 ? 1 : 640 / (32 * WARPS))
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        attention_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const int own = warp % BLOCK, sub = warp / BLOCK;
    Place me;
    me.row = block / (HEADS / BLOCK), me.head = block % (HEADS / BLOCK) * BLOCK + own;
    me.lane = threadIdx.x % 32, me.part = me.lane % WIDE, me.side = me.lane / WIDE, me.inside = me.part * EACH < D;

    const int older = __ldg(p.lengths + me.row) - 1, units = (older + STEP - 1) / STEP;
    const int each = max((units + CLUSTER - 1) / CLUSTER, 1), last = min((rank + 1) * each, units);
    const int count = max((units + each - 1) / each, 1) * SUB;  // parts of a head
    if (CLUSTER > 1) {
        if (rank == 0 && threadIdx.x == 0) expect(shared, count * BLOCK * ROW * 4);
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        if (rank > 0 && rank * each >= units) return;
    }
    u8 *ring = shared + 16 + warp * WARP_BYTES;
    u32 *coded = (u32 *)(ring + RING);
    float *parts = (float *)(shared + 16 + WARPS * WARP_BYTES) + own * PARTS * ROW;
    int asked = rank * each + sub;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++, asked += SUB) {
        if (asked < last) request(p, me, ring + i * (RING / STAGES), coded + i * CODED, asked, older);
        commit();
    }
    Softmax s = {LOWEST, 0.f, {}};
    const bool first = rank == 0 && sub == 0;
    const size_t slot = first ? slot_of(p, me, older) : 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    Head q, k, v;
    Angle angle;
    load_head(p, me, me.head, true, q);
    load_angle(p, me, angle);
    if (first) load_newest(p, me, slot, k, v);
    turn(q, angle);
#pragma unroll
    for (int i = 0; i < EACH; i++) q.own[i] *= p.scale_log2;
    if (first) {
        keep_newest(p, me, slot, angle, k, v);
        begin(me, s, q.own, k.own, v.own);
    }
    int stage = 0;
    for (int unit = rank * each + sub; unit < last; unit += SUB, asked += SUB) {
        arrived<STAGES - 2>();
        __syncwarp();
        take(p, me, s, q.own, ring + stage * (RING / STAGES), coded + stage * CODED, unit, older);
        __syncwarp();
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (asked < last) request(p, me, ring + free * (RING / STAGES), coded + free * CODED, asked, older);
        commit();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    gather_sides(s);
    if (PARTS == 1) return write(p, me, s);
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait;" ::: "memory");  // the first block's barrier is there
    put(me, s, parts + (rank * SUB + sub) * ROW, shared);
    if (CLUSTER == 1) __syncthreads();
    if (rank > 0 || sub > 0) return;
    if (CLUSTER > 1) await(shared);
    finish(p, me, parts, count);
}
