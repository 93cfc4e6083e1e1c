// What the decode kernels share: numbers, the newest token of a row, and how the parts of a head come together.
//
// Older tokens lie in the cache since earlier steps: the kernels request them before griddepcontrol.wait. The newest
// one, which the kernel before this one computed, begins the softmax of one warp. With TURN > 0 the kernel itself
// rotates it (the last 2 * TURN elements of a head, i with i + TURN) and stores it: q then holds heads of queries, keys
// and values.
//
// Set by the compiler's options: D, HEADS (of queries), KEYS, PAGE, KIND (cache: 0 as q, 1 float8 e4m3, 2 int8, both
// with a float16 scale for each head), FLOAT16 (q, else bfloat16), TURN, WARPS, BLOCK, CLUSTER, DEPTH, STAGES.

constexpr int up(int n) { return n <= 1 ? 1 : 2 * up((n + 1) / 2); }
// A piece is 16 bytes of a head: EACH elements. WIDE threads hold a head.
enum { BYTES = KIND ? 1 : 2, EACH = 16 / BYTES, PIECES = D / EACH, WIDE = up(PIECES), LEAD = D - 2 * TURN };
enum { ROW = D + 4, BARRIER = 16 };  // floats of a part: sums, maximum, total; bytes before the ring
static_assert(D % EACH == 0 && WIDE <= 32 && TURN % EACH == 0 && LEAD % EACH == 0);
constexpr float LOWEST = -1e30f, LARGEST = KIND == 2 ? 127.f : 448.f;

struct Params {
    const u8 *q;
    u8 *k, *v;
    u16 *k_scale, *v_scale;
    const int *table, *lengths;
    const float *cos, *sin;
    u8 *out;
    float *parts;   // of attention_decode_stream.cu only, as the next four are
    int *counters;  // zero before and after a launch
    int rows, usual, splits;
    int q_stride, row_stride, scale_stride, table_stride;  // elements, from row to row; of scales from page to page
    float scale_log2;
};

// ---- numbers ----
__device__ __forceinline__ u32 packed(float a, float b) {  // two elements of q's type
    if (FLOAT16) return f16_pair(a, b);
    return bf16_pair(a, b);
}
__device__ __forceinline__ void pair(u32 word, float &a, float &b) {
    if (FLOAT16)
        a = f32_of_f16(word & 0xffff), b = f32_of_f16(word >> 16);
    else
        a = __uint_as_float(word << 16), b = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void codes(u32 word, float *f) {  // four elements of 8 bits
    if (KIND == 1) {
        u32 low, high;
        f16_of_fp8(word, low, high);
        f[0] = f32_of_f16(low & 0xffff), f[1] = f32_of_f16(low >> 16);
        f[2] = f32_of_f16(high & 0xffff), f[3] = f32_of_f16(high >> 16);
    } else {
        word ^= 0x80808080u;  // code + 128, as the last byte of 2^23 + code + 128
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388736.f;
    }
}
__device__ __forceinline__ void f16_codes(u32 word, u32 &low, u32 &high) {  // the same in pairs
    if (KIND == 1) return f16_of_fp8(word, low, high);
    word ^= 0x80808080u;  // code + 128, as the low byte of 1024 + code + 128
    low = f16_minus(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);
    high = f16_minus(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
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

// ---- where a token lies ----
__device__ __forceinline__ size_t slot_of(const Params &p, int row, int token) {
    return (size_t)__ldg(p.table + (size_t)row * p.table_stride + token / PAGE) * PAGE + token % PAGE;
}
// A page's scales of a head lie side by side, PAGE of them, an even number.
__device__ __forceinline__ size_t scale_at(const Params &p, int key, size_t slot) {
    return slot / PAGE * p.scale_stride + key * PAGE + slot % PAGE;
}
__device__ __forceinline__ void copy_scales(const Params &p, int key, u32 *to, size_t slot, bool value, bool wanted) {
    copy4(shared_address(to), (value ? p.v_scale : p.k_scale) + scale_at(p, key, slot), wanted);  // of two tokens
}
// Of the keys of a step of STEP tokens, then of its values.
template <int STEP>
__device__ __forceinline__ float scale_in(const u32 *coded, int token, bool value) {
    return f32_of_f16(((const u16 *)coded)[token + (value ? STEP : 0)]);
}

// ---- the newest token ----
struct Place {  // which piece of which head a thread holds; the same head stands in a warp 32 / WIDE times
    int row, key, piece, side, lane;
    bool inside;
};
struct Angle {  // of a piece's elements; other stands for the partners' factors
    float own[EACH], other[EACH];
};
struct Head {  // a piece and the partners of its elements
    float own[EACH], other[EACH];
};
__device__ __forceinline__ float across(float x) {  // the sum over a head's threads
#pragma unroll
    for (int o = WIDE / 2; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
    return x;
}
__device__ __forceinline__ void load_wide(const u8 *q, float (&f)[EACH]) {  // a piece's elements in q's type
#pragma unroll
    for (int i = 0; i < EACH / 8; i++) {
        const uint4 r = fresh(q + 16 * i);
        pair(r.x, f[8 * i], f[8 * i + 1]), pair(r.y, f[8 * i + 2], f[8 * i + 3]);
        pair(r.z, f[8 * i + 4], f[8 * i + 5]), pair(r.w, f[8 * i + 6], f[8 * i + 7]);
    }
}
__device__ __forceinline__ void load_angle(const Params &p, int row, int piece, bool inside, Angle &angle) {
    const int first = piece * EACH - LEAD;
#pragma unroll
    for (int i = 0; i < EACH; i++) angle.own[i] = 1.f, angle.other[i] = 0.f;
    if (TURN == 0 || first < 0 || !inside) return;
    const bool low = first < TURN;
    const size_t at = (size_t)row * TURN + (low ? first : first - TURN);
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        const float4 c = __ldcg((const float4 *)(p.cos + at + i)), s = __ldcg((const float4 *)(p.sin + at + i));
        angle.own[i] = c.x, angle.own[i + 1] = c.y, angle.own[i + 2] = c.z, angle.own[i + 3] = c.w;
        angle.other[i] = low ? -s.x : s.x, angle.other[i + 1] = low ? -s.y : s.y;
        angle.other[i + 2] = low ? -s.z : s.z, angle.other[i + 3] = low ? -s.w : s.w;
    }
}
__device__ __forceinline__ void load_head(
    const Params &p, int row, int head, int piece, bool inside, bool turned, Head &h
) {
    const u8 *at = p.q + 2 * ((size_t)row * p.q_stride + head * D);
    const int first = piece * EACH;
#pragma unroll
    for (int i = 0; i < EACH; i++) h.own[i] = h.other[i] = 0.f;
    if (!inside) return;
    load_wide(at + 2 * first, h.own);
    const int partner = first < LEAD + TURN ? first + TURN : first - TURN;
    if (TURN && turned && first >= LEAD) load_wide(at + 2 * partner, h.other);
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
        const float x[4] = {f[i] * by, f[i + 1] * by, f[i + 2] * by, f[i + 3] * by};
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
__device__ __forceinline__ void keep(float (&f)[EACH], u8 *to, u16 *scale_to, bool store, bool first) {
    uint4 raw;
    if (KIND) {
        const float scale = best_scale(f);
        raw = {four_codes(f, scale), four_codes(f + 4, scale), four_codes(f + 8 % EACH, scale),
               four_codes(f + 12 % EACH, scale)};
        unpack(raw, f);
#pragma unroll
        for (int i = 0; i < EACH; i++) f[i] *= scale;
        if (store && first) *scale_to = f16_of(scale);
    } else {
        raw = {packed(f[0], f[1]), packed(f[2], f[3]), packed(f[4], f[5]), packed(f[6], f[7])};
    }
    if (store) *(uint4 *)to = raw;
}
__device__ __forceinline__ void kept(float (&f)[EACH], const u8 *from, const u16 *scale, bool inside) {
    unpack(inside ? fresh(from) : uint4{0, 0, 0, 0}, f);
    if (!KIND) return;
    const float by = fresh_scale(scale);
#pragma unroll
    for (int i = 0; i < EACH; i++) f[i] *= by;
}
// The newest token's key and value: out of q, or, already stored, out of the cache.
__device__ __forceinline__ void load_newest(const Params &p, const Place &me, size_t slot, Head &k, Head &v) {
    const size_t at = (slot * p.row_stride + me.key * D + me.piece * EACH) * BYTES;
    const size_t scale = KIND ? scale_at(p, me.key, slot) : 0;
    if (TURN) {
        load_head(p, me.row, HEADS + me.key, me.piece, me.inside, true, k);
        load_head(p, me.row, HEADS + KEYS + me.key, me.piece, me.inside, false, v);
    } else {
        kept(k.own, p.k + at, p.k_scale + scale, me.inside);
        kept(v.own, p.v + at, p.v_scale + scale, me.inside);
    }
}
__device__ __forceinline__ void keep_newest(
    const Params &p, const Place &me, size_t slot, const Angle &angle, bool store, Head &k, Head &v
) {  // leaves what the cache now holds
    if (!TURN) return;
    const size_t at = (slot * p.row_stride + me.key * D + me.piece * EACH) * BYTES;
    const size_t scale = KIND ? scale_at(p, me.key, slot) : 0;
    store = store && me.side == 0 && me.inside;
    turn(k, angle);
    keep(k.own, p.k + at, p.k_scale + scale, store, me.piece == 0);
    keep(v.own, p.v + at, p.v_scale + scale, store, me.piece == 0);
}

// ---- a head of its own for each query ----
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
__device__ __forceinline__ void write(const Params &p, const Place &me, const Softmax &s) {
    if (me.side != 0 || !me.inside) return;
    const float by = 1.f / s.total;
    u8 *to = p.out + 2 * (((size_t)me.row * HEADS + me.key) * D + me.piece * EACH);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) *(u32 *)(to + 2 * i) = packed(s.mixed[i] * by, s.mixed[i + 1] * by);
}

// ---- putting together ----
// A warp puts `count` parts of one head together, always in the same order, and writes the result.
__device__ __forceinline__ void finish(const Params &p, int row, int head, const float *parts, int stride, int count) {
    const int lane = threadIdx.x % 32;
    const bool live = lane < count;
    const float *mine = parts + (live ? lane : 0) * stride + D;
    float top = live ? mine[0] : LOWEST;
#pragma unroll
    for (int o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    float weight = live ? power(mine[0] - top) : 0.f, total = live ? weight * mine[1] : 0.f;
#pragma unroll
    for (int o = 16; o; o /= 2) total += __shfl_xor_sync(~0u, total, o);
    weight /= total;
#pragma unroll
    for (int first = 0; first < D; first += 64) {
        const int at = first + 2 * lane;
        float a = 0.f, b = 0.f;
        for (int i = 0; i < count; i++) {
            const float w = __shfl_sync(~0u, weight, i);
            const float2 x = *(const float2 *)(parts + i * stride + (at < D ? at : 0));
            a += w * x.x, b += w * x.y;
        }
        if (at < D) *(u32 *)(p.out + 2 * (((size_t)row * HEADS + head) * D + at)) = packed(a, b);
    }
}
