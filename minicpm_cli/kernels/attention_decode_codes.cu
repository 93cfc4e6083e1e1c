// Decode attention over 8-bit codes where each query head has a key head of its own. To turn each code into a float32 and
// add it up by itself takes more instructions than the reading leaves time for: here tensor cores multiply, with the one
// query in all rows of its operand.
//
// A warp takes every SUB-th unit of its block: 16 tokens of one head. Lane (c, j) = (lane / 4, lane % 4) reads of the keys
// tokens c and c + 8, pieces j, j + 4, .., and so finds the scores of tokens 2j, 2j + 1, 2j + 8, 2j + 9, as the right side
// of the product with the values wants them. Those are transposed as they are read: the lane gets elements 2c and 2c + 1
// of every piece. BLOCK: heads of a block. The newest token lies in the cache already.

enum { UNIT = 16, NK = PIECES / 4, SUB = WARPS / BLOCK, PARTS = CLUSTER * SUB, STAGE = 2 * UNIT * D, CODED = UNIT };
enum { RING = STAGES * STAGE, WARP_BYTES = RING + STAGES * CODED * 4 };
static_assert(PARTS <= 32 && WARPS % BLOCK == 0 && HEADS % BLOCK == 0 && HEADS == KEYS);
static_assert(KIND && TURN == 0 && PAGE % 2 == 0 && PIECES % 4 == 0);

struct Softmax {  // mixed[i][0] and [i][2]: elements 2c and 2c + 1 of piece i
    float top, total, mixed[PIECES][4];
};

__device__ __forceinline__ void request(const Params &p, const Place &me, u8 *stage, u32 *coded, int unit, int older) {
    const int c = me.lane / 4, j = me.lane % 4, first = unit * UNIT;
    const size_t page = PAGE % UNIT == 0 ? slot_of(p, me.row, first) : 0;
#pragma unroll
    for (int t = 0; t < 3; t++) {  // two tokens' keys; the values of one, whose pieces lie UNIT tokens apart
        const int within = t < 2 ? c + 8 * t : me.lane % UNIT;
        const bool there = first + within < older;
        const size_t slot = PAGE % UNIT == 0 ? page + within : there ? slot_of(p, me.row, first + within) : 0;
        const u8 *from = (t < 2 ? p.k : p.v) + slot * p.row_stride + me.key * D;
#pragma unroll
        for (int i = 0; i < (t < 2 ? NK : 2 * NK); i++) {
            const int piece = t < 2 ? j + 4 * i : me.lane / UNIT + 2 * i;
            u8 *to = stage + (t < 2 ? (t * NK + i) * 512 : UNIT * D + i * 512) + me.lane * 16;
            copy16(shared_address(to), from + piece * 16, there);
        }
    }
    if (me.lane < CODED) {  // the scales of two tokens' keys or values
        const int within = 2 * me.lane % UNIT, token = first + within;
        const size_t slot = PAGE % UNIT == 0 ? page + within : token < older ? slot_of(p, me.row, token) : 0;
        copy_scales(p, me.key, coded + me.lane, slot, 2 * me.lane >= UNIT, token < older);
    }
}
// The newest token alone; `line` is room for its value.
__device__ __forceinline__ void begin(const Params &p, const Place &me, Softmax &s, size_t slot, float *line) {
    const int c = me.lane / 4;
    Head q, k, v;
    load_head(p, me.row, me.key, me.piece, me.inside, false, q);
    load_newest(p, me, slot, k, v);
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) score += k.own[i] * q.own[i];
    s.top = across(score) * p.scale_log2, s.total = me.lane % 4 == 0 ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (me.side == 0) line[me.piece * EACH + i] = v.own[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        s.mixed[i][0] = line[i * EACH + 2 * c] * LARGER;
        s.mixed[i][2] = line[i * EACH + 2 * c + 1] * LARGER;
    }
    __syncwarp();
}
__device__ __forceinline__ void transposed(const u8 *from, u32 (&to)[4]) {  // four tiles of 8 tokens by 16 bytes
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void take(
    const Params &p, const Place &me, Softmax &s, const u32 (&q)[NK][WORDS], const u8 *stage, const u32 *coded, int left
) {
    const int j = me.lane % 4;
    float score[2][4] = {}, by[2][2], top = s.top;  // tokens 8t + 2j and the one after it
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < NK; i++) {
            u32 two[WORDS];
            pairs(*(const uint4 *)(stage + (t * NK + i) * 512 + me.lane * 16), two);
#pragma unroll
            for (int w = 0; w < WORDS; w += 2) {
                const u32 row[4] = {q[i][w], q[i][w], q[i][w + 1], q[i][w + 1]};
                multiply(score[t], row, two[w], two[w + 1]);
            }
        }
        const u32 k_scales = coded[4 * t + j], v_scales = coded[CODED / 2 + 4 * t + j];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const bool there = 8 * t + 2 * j + n < left;  // behind the last there may be anything
            const float k_scale = f32_of_f16(n ? k_scales >> 16 : k_scales & 0xffff);
            const float v_scale = f32_of_f16(n ? v_scales >> 16 : v_scales & 0xffff);
            score[t][n] = there ? score[t][n] * (p.scale_log2 * k_scale) : 2.f * LOWEST;
            by[t][n] = there ? LARGER * v_scale : 0.f;
            top = fmaxf(top, score[t][n]);
        }
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float fade = power(s.top - top);
    s.top = top, s.total *= fade;
    u32 weights[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const float a = power(score[t][0] - top), b = power(score[t][1] - top);
        s.total += a + b;
        weights[t] = f16_pair(a * by[t][0], b * by[t][1]);
    }
#pragma unroll
    for (int i = 0; i < PIECES; i += 2) {
        u32 raw[4];
        transposed(stage + UNIT * D + i * UNIT * 16 + me.lane * 16, raw);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 value[4];  // elements 2c, 2c + 1 of the first eight tokens, and of the others
            code_pairs(__byte_perm(raw[2 * n], 0, 0x3120), value[0], value[1]);
            code_pairs(__byte_perm(raw[2 * n + 1], 0, 0x3120), value[2], value[3]);
            float(&d)[4] = s.mixed[i + n];
            d[0] *= fade, d[2] *= fade;  // the other two are copies that nobody reads
            multiply(d, value, weights[0], weights[1]);
        }
    }
}
__device__ __forceinline__ void send_two(u32 at, float a, float b, u32 barrier) {
    if (CLUSTER > 1)
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                     :
                     : "r"(at), "f"(a), "f"(b), "r"(barrier)
                     : "memory");
    else
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void put(const Place &me, const Softmax &s, float *to, const void *barrier) {
    const int c = me.lane / 4, j = me.lane % 4;
    const u32 at = in_block(to, 0), by = in_block(barrier, 0);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (i % 4 == j) send_two(at + (i * EACH + 2 * c) * 4, s.mixed[i][0], s.mixed[i][2], by);
    if (me.lane == 0) send(at + D * 4, s.top, s.total * LARGER, 0.f, 0.f, by);
}
__device__ __forceinline__ void write(const Params &p, const Place &me, const Softmax &s) {
    const int c = me.lane / 4, j = me.lane % 4;
    const float by = 1.f / (s.total * LARGER);
    u8 *to = p.out + 2 * (((size_t)me.row * HEADS + me.key) * D + 2 * c);
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (i % 4 == j) *(u32 *)(to + 2 * i * EACH) = packed(s.mixed[i][0] * by, s.mixed[i][2] * by);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, CLUSTER > 1 ? 1 : (D > 64 ? 512 : 768) / (32 * WARPS))
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        attention_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const int own = warp % BLOCK, sub = warp / BLOCK;
    Place me;
    me.row = block / (HEADS / BLOCK), me.key = block % (HEADS / BLOCK) * BLOCK + own;
    me.lane = threadIdx.x % 32, me.piece = me.lane % WIDE, me.side = me.lane / WIDE, me.inside = me.piece < PIECES;

    const int older = __ldg(p.lengths + me.row) - 1, units = (older + UNIT - 1) / UNIT;
    const int each = max((units + CLUSTER - 1) / CLUSTER, 1), last = min((rank + 1) * each, units);
    const int count = max((units + each - 1) / each, 1) * SUB;  // parts of a head
    if (CLUSTER > 1) {
        if (rank == 0 && threadIdx.x == 0) expect(shared, count * BLOCK * ROW * 4);
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        if (rank > 0 && rank * each >= units) return;
    }
    u8 *ring = shared + BARRIER + warp * WARP_BYTES;
    u32 *coded = (u32 *)(ring + RING);
    float *parts = (float *)(shared + BARRIER + WARPS * WARP_BYTES) + own * PARTS * ROW;
    int asked = rank * each + sub;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++, asked += SUB) {
        if (asked < last) request(p, me, ring + i * STAGE, coded + i * CODED, asked, older);
        commit();
    }
    Softmax s = {LOWEST, 0.f, {}};
    const bool first = rank == 0 && sub == 0;
    const size_t slot = first ? slot_of(p, me.row, older) : 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");

    u32 q[NK][WORDS];
#pragma unroll
    for (int i = 0; i < NK; i++) {
        Head h;
        load_head(p, me.row, me.key, me.lane % 4 + 4 * i, true, false, h);
#pragma unroll
        for (int w = 0; w < WORDS; w++) q[i][w] = f16_pair(h.own[2 * w], h.own[2 * w + 1]);
    }
    if (first) begin(p, me, s, slot, parts);  // this part of `parts` is its own
    int stage = 0;
    for (int unit = rank * each + sub; unit < last; unit += SUB, asked += SUB) {
        arrived<STAGES - 2>();
        __syncwarp();
        take(p, me, s, q, ring + stage * STAGE, coded + stage * CODED, older - unit * UNIT);
        __syncwarp();
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (asked < last) request(p, me, ring + free * STAGE, coded + free * CODED, asked, older);
        commit();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    s.total += __shfl_xor_sync(~0u, s.total, 1);
    s.total += __shfl_xor_sync(~0u, s.total, 2);
    if (PARTS == 1) return write(p, me, s);
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait;" ::: "memory");  // the first block's barrier is there
    put(me, s, parts + (rank * SUB + sub) * ROW, shared);
    if (CLUSTER == 1) __syncthreads();
    if (rank > 0 || sub > 0) return;
    if (CLUSTER > 1) await(shared);
    finish(p, me.row, me.key, parts, ROW, count);
}
