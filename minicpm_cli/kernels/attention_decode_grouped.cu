// Decode attention where a group of query heads shares a key head: up to 16 of them are the rows of mma.m16n8k16.
//
// A warp takes every WARPS-th unit of its block: 16 tokens of one key head. Lane (c, j) = (lane / 4, lane % 4) copies
// and reads, through its own part of the ring, just what its fragments need, in pieces of 16 bytes: of the keys, tokens
// c and c + 8, pieces j, j + 4, ..; of the values, tokens 2j, 2j + 1, 2j + 8, 2j + 9, pieces c, c + 8, .. Which element
// of a head stands where in a product follows from that: both sides of q k^T are permuted alike, and columns of p v are
// put back in place when they are sent. The loop has no barrier. At the end block r of the cluster puts together query
// heads r, r + CLUSTER, .. of the group. 8-bit codes are multiplied as float16, weights with their scales 256 times
// larger.

enum { GROUP = HEADS / KEYS, TILES = (GROUP + 15) / 16, PARTS = CLUSTER * WARPS, OWNED = 16 / CLUSTER, UNIT = 16 };
enum { NK = (PIECES + 3) / 4, NV = (PIECES + 7) / 8, WORDS = EACH / 2, CODED = KIND ? UNIT : 0 };
enum { STAGE = (2 * NK + 4 * NV) * 512, RING = STAGES * STAGE, WARP_BYTES = RING + STAGES * CODED * 4 };
static_assert(PARTS <= 32 && HEADS % KEYS == 0 && 16 % CLUSTER == 0);
constexpr bool F16 = KIND || FLOAT16;
constexpr float LARGER = KIND ? 256.f : 1.f;

struct Sums {  // of query heads c and c + 8: n-tile (i, e) holds elements (n + 8 i) * EACH + e, n = 2j, 2j + 1
    float top[2], total[2], mixed[NV][EACH][4];
};
typedef u32 Rows[NK][WORDS / 2][4];  // q as the left side of the products

#define MULTIPLY(type)                                                                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                               \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (F16)
        MULTIPLY("f16");
    else
        MULTIPLY("bf16");
}
__device__ __forceinline__ u32 tile_pair(float a, float b) { return F16 ? f16_pair(a, b) : packed(a, b); }
__device__ __forceinline__ void pairs(uint4 raw, u32 (&two)[WORDS]) {  // a piece's elements in twos, for a product
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (KIND)
            f16_codes(words[i], two[2 * i % WORDS], two[(2 * i + 1) % WORDS]);
        else
            two[i] = words[i];
    }
}

__device__ __forceinline__ void request(const Params &p, const Place &me, u8 *stage, u32 *coded, int unit, int older) {
    const int c = me.lane / 4, j = me.lane % 4, first = unit * UNIT;
    const size_t page = PAGE % UNIT == 0 ? slot_of(p, me.row, first) : 0;
    u8 *to = stage + me.lane * 16;
#pragma unroll
    for (int t = 0; t < 6; t++) {  // two tokens' keys, four tokens' values
        const int within = t < 2 ? c + 8 * t : 2 * j + (t - 2) % 2 + 8 * ((t - 2) / 2);
        const bool there = first + within < older;
        const size_t slot = PAGE % UNIT == 0 ? page + within : there ? slot_of(p, me.row, first + within) : 0;
        const u8 *from = (t < 2 ? p.k : p.v) + (slot * p.row_stride + me.key * D) * BYTES;
#pragma unroll
        for (int i = 0; i < (t < 2 ? NK : NV); i++, to += 512) {
            const int piece = t < 2 ? j + 4 * i : c + 8 * i;
            copy16(shared_address(to), from + (piece < PIECES ? piece : 0) * 16, there && piece < PIECES);
        }
    }
    if (KIND && me.lane < CODED) {  // the scales of two tokens' keys or values
        const int within = 2 * me.lane % UNIT, token = first + within;
        const size_t slot = PAGE % UNIT == 0 ? page + within : token < older ? slot_of(p, me.row, token) : 0;
        copy_scales(p, me.key, coded + me.lane, slot, 2 * me.lane >= UNIT, token < older);
    }
}
__device__ __forceinline__ void load_rows(const Params &p, const Place &me, int tile, Rows &q) {
    const int c = me.lane / 4, j = me.lane % 4;
#pragma unroll
    for (int i = 0; i < NK; i++) {
        const int piece = j + 4 * i;
        Angle angle;
        load_angle(p, me.row, piece, piece < PIECES, angle);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int member = tile * 16 + c + 8 * half;
            Head h;
            load_head(p, me.row, me.key * GROUP + member, piece, piece < PIECES && member < GROUP, true, h);
            turn(h, angle);
#pragma unroll
            for (int w = 0; w < WORDS; w++) q[i][w / 2][w % 2 * 2 + half] = tile_pair(h.own[2 * w], h.own[2 * w + 1]);
        }
    }
}
// The newest token, laid out by a warp in shared memory as float32 key and value, begins the softmax.
__device__ __forceinline__ void begin(const Params &p, const Place &me, Sums &s, const Rows &q, const float *newest) {
    const int c = me.lane / 4, j = me.lane % 4;
    float score[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < NK; i++) {
        const float *k = newest + (j + 4 * i < PIECES ? j + 4 * i : 0) * EACH;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float a, b;
                const u32 two = q[i][w / 2][w % 2 * 2 + half];  // zero beyond the head
                if (F16)
                    a = f32_of_f16(two & 0xffff), b = f32_of_f16(two >> 16);
                else
                    a = __uint_as_float(two << 16), b = __uint_as_float(two & 0xffff0000u);
                score[half] += a * k[2 * w] + b * k[2 * w + 1];
            }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        score[half] += __shfl_xor_sync(~0u, score[half], 1);
        score[half] += __shfl_xor_sync(~0u, score[half], 2);
        s.top[half] = score[half] * p.scale_log2, s.total[half] = j == 0 ? 1.f : 0.f;
    }
#pragma unroll
    for (int i = 0; i < NV; i++)
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int piece = 2 * j + n + 8 * i;
                s.mixed[i][e][n] = s.mixed[i][e][n + 2] = piece < PIECES ? newest[D + piece * EACH + e] * LARGER : 0.f;
            }
}
__device__ __forceinline__ void take(
    const Params &p, const Place &me, Sums &s, const Rows &q, const u8 *stage, const u32 *coded, int left
) {
    const int j = me.lane % 4;
    const uint4 *piece = (const uint4 *)(stage + me.lane * 16);
    float score[2][4] = {};  // tokens 2j, 2j + 1 (+ 8) of query heads c, c, c + 8, c + 8
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < NK; i++, piece += 32) {
            u32 two[WORDS];
            pairs(*piece, two);
#pragma unroll
            for (int w = 0; w < WORDS / 2; w++) multiply(score[t], q[i][w], two[2 * w], two[2 * w + 1]);
        }
    float by[2][2], fade[2];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int token = 8 * t + 2 * j + n;
            const float scale = p.scale_log2 * (KIND ? scale_in<UNIT>(coded, token, false) : 1.f);
            by[t][n] = LARGER * (!KIND ? 1.f : token < left ? scale_in<UNIT>(coded, token, true) : 0.f);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &x = score[t][2 * half + n];
                x = token < left ? x * scale : 2.f * LOWEST;
            }
        }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = fmaxf(score[0][2 * half], score[0][2 * half + 1]);
        top = fmaxf(fmaxf(score[1][2 * half], score[1][2 * half + 1]), top);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(fmaxf(top, __shfl_xor_sync(~0u, top, 2)), s.top[half]);
        fade[half] = power(s.top[half] - top);
        s.top[half] = top, s.total[half] *= fade[half];
    }
    u32 weights[4];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float a = power(score[t][2 * half] - s.top[half]), b = power(score[t][2 * half + 1] - s.top[half]);
            s.total[half] += a + b;
            weights[2 * t + half] = tile_pair(a * by[t][0], b * by[t][1]);
        }
#pragma unroll
    for (int i = 0; i < NV; i++) {
        u32 token[4][WORDS];
#pragma unroll
        for (int t = 0; t < 4; t++) pairs(piece[(t * NV + i) * 32], token[t]);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            float(&d)[4] = s.mixed[i][e];
            d[0] *= fade[0], d[1] *= fade[0], d[2] *= fade[1], d[3] *= fade[1];
            const u32 which = e % 2 ? 0x7632 : 0x5410;
            const u32 b0 = __byte_perm(token[0][e / 2], token[1][e / 2], which);
            multiply(d, weights, b0, __byte_perm(token[2][e / 2], token[3][e / 2], which));
        }
    }
}
__device__ __forceinline__ void put(const Place &me, Sums &s, int tile, float *parts, int part, const void *barrier) {
    const int c = me.lane / 4, j = me.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int member = c + 8 * half, rank = member % CLUSTER;
        s.total[half] += __shfl_xor_sync(~0u, s.total[half], 1);
        s.total[half] += __shfl_xor_sync(~0u, s.total[half], 2);
        if (tile * 16 + member >= GROUP) continue;
        const u32 at = in_block(parts + (part * OWNED + member / CLUSTER) * ROW, rank), by = in_block(barrier, rank);
#pragma unroll
        for (int i = 0; i < NV; i++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const int piece = 2 * j + n + 8 * i, x = 2 * half + n;
                if (piece >= PIECES) continue;
#pragma unroll
                for (int e = 0; e < EACH; e += 4)
                    send(at + (piece * EACH + e) * 4, s.mixed[i][e][x], s.mixed[i][e + 1][x], s.mixed[i][e + 2][x],
                         s.mixed[i][e + 3][x], by);
            }
        if (j == 0) send(at + D * 4, s.top[half], s.total[half] * LARGER, 0.f, 0.f, by);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        attention_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    admit_next();
    const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const int tile = block % TILES;
    Place me;
    me.row = block / (KEYS * TILES), me.key = block / TILES % KEYS;
    me.lane = threadIdx.x % 32, me.piece = me.lane % WIDE, me.side = me.lane / WIDE, me.inside = me.piece < PIECES;

    const int older = __ldg(p.lengths + me.row) - 1, units = (older + UNIT - 1) / UNIT;
    const int each = max((units + CLUSTER - 1) / CLUSTER, 1), last = min((rank + 1) * each, units);
    const int count = max((units + each - 1) / each, 1) * WARPS, heads = min(GROUP - tile * 16, 16);
    const int owned = heads > rank ? (heads - rank + CLUSTER - 1) / CLUSTER : 0;
    if (CLUSTER > 1) {
        if (threadIdx.x == 0) expect(shared, count * owned * ROW * 4);
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    }
    u8 *ring = shared + BARRIER + warp * WARP_BYTES;
    u32 *coded = (u32 *)(ring + RING);
    float *parts = (float *)(shared + BARRIER + WARPS * WARP_BYTES), *newest = parts + PARTS * OWNED * ROW;
    const bool idle = rank > 0 && rank * each >= units, first = rank == 0 && warp == 0;
    int asked = rank * each + warp, stage = 0;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++, asked += WARPS) {
        if (asked < last) request(p, me, ring + i * STAGE, coded + i * CODED, asked, older);
        commit();
    }
    const size_t slot = first ? slot_of(p, me.row, older) : 0;
    await_inputs();

    if (!idle) {
        Rows q;
        Sums s = {{LOWEST, LOWEST}, {}, {}};
        Head k, v;
        if (first) load_newest(p, me, slot, k, v);
        load_rows(p, me, tile, q);
        if (first) {
            Angle angle;
            load_angle(p, me.row, me.piece, me.inside, angle);
            keep_newest(p, me, slot, angle, tile == 0, k, v);
            float *to = newest + me.piece * EACH;
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (me.side == 0 && me.inside) to[i] = k.own[i], to[D + i] = v.own[i];
            __syncwarp();
            begin(p, me, s, q, newest);
        }
        for (int unit = rank * each + warp; unit < last; unit += WARPS, asked += WARPS) {
            arrived<STAGES - 2>();
            __syncwarp();
            take(p, me, s, q, ring + stage * STAGE, coded + stage * CODED, older - unit * UNIT);
            __syncwarp();
            const int free = stage == 0 ? STAGES - 1 : stage - 1;
            if (asked < last) request(p, me, ring + free * STAGE, coded + free * CODED, asked, older);
            commit();
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        if (CLUSTER > 1) asm volatile("barrier.cluster.wait;" ::: "memory");  // the blocks' barriers are there
        put(me, s, tile, parts, rank * WARPS + warp, shared);
    }
    if (CLUSTER > 1)
        await(shared);
    else
        __syncthreads();
    for (int i = warp; i < owned; i += WARPS)
        finish(p, me.row, me.key * GROUP + tile * 16 + rank + i * CLUSTER, parts + i * ROW, OWNED * ROW, count);
}
