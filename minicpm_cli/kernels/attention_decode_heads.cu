// Decode attention where each query head has a key head of its own: bound by the reading of the cache alone.
//
// A warp takes every SUB-th of its block's steps of ACROSS heads, which lie side by side in a token's row, so that it
// reads 128 bytes or more in one place: WIDE threads for a token of a head, a piece each, SIDE tokens side by side, DEPTH
// of them one after the other. Every side of a head keeps a softmax of its own in registers; they meet once, at the end:
// by shuffles within the warp, then in the shared memory of the first block of the cluster. The loop has no barrier: a
// thread copies (cp.async) and reads only its own pieces of the ring. BLOCK: warps of a block with heads of their own.

enum { SIDE = 32 / WIDE / ACROSS, STEP = SIDE * DEPTH, SUB = WARPS / BLOCK, PARTS = CLUSTER * SUB };
enum { CODED = KIND ? STEP * ACROSS : 0, OWNED = BLOCK * ACROSS };
enum { RING = STAGES * DEPTH * 2 * 32 * 16, WARP_BYTES = RING + STAGES * CODED * 4 };
static_assert(PARTS <= 32 && WARPS % BLOCK == 0 && HEADS % OWNED == 0 && HEADS == KEYS && SIDE > 0);
static_assert(!KIND || (PAGE % 2 == 0 && STEP % 2 == 0));

__device__ __forceinline__ void request(const Params &p, const Place &me, u8 *stage, u32 *coded, int unit, int older) {
    const size_t page = PAGE % STEP == 0 ? slot_of(p, me.row, unit * STEP) : 0;  // a step lies in one page
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int within = d * SIDE + me.side, token = unit * STEP + within;
        const bool wanted = me.inside && token < older;
        const size_t slot = PAGE % STEP == 0 ? page + within : wanted ? slot_of(p, me.row, token) : 0;
        const size_t at = (slot * p.row_stride + me.key * D + (me.inside ? me.piece : 0) * EACH) * BYTES;
        copy16(shared_address(stage + (2 * d * 32 + me.lane) * 16), p.k + at, wanted);
        copy16(shared_address(stage + ((2 * d + 1) * 32 + me.lane) * 16), p.v + at, wanted);
    }
#pragma unroll
    for (int i = me.lane; i < CODED; i += 32) {  // the scales of two tokens' keys or values
        const int key = me.key - me.lane / WIDE % ACROSS + i / STEP, of = 2 * (i % STEP);
        const int within = of % STEP, token = unit * STEP + within;
        const size_t slot = PAGE % STEP == 0 ? page + within : token < older ? slot_of(p, me.row, token) : 0;
        copy_scales(p, key, coded + i, slot, of >= STEP, token < older);
    }
}
__device__ __forceinline__ void take(
    const Params &p, const Place &me, Softmax &s, const float (&q)[EACH], const u8 *stage, const u32 *coded, int left
) {
    float score[DEPTH], by[DEPTH], top = s.top;
    coded += me.lane / WIDE % ACROSS * STEP;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        float k[EACH], sum = 0.f;
        unpack(*(const uint4 *)(stage + (2 * d * 32 + me.lane) * 16), k);
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += k[i] * q[i];
        score[d] = across(sum);
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const int at = d * SIDE + me.side;
        if (KIND) score[d] *= scale_in<STEP>(coded, at, false);
        if (KIND) by[d] = at < left ? scale_in<STEP>(coded, at, true) : 0.f;  // there may be anything behind the last
        score[d] = at < left ? score[d] : 2.f * LOWEST;
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
__device__ __forceinline__ void gather_sides(Softmax &s) {
    float top = s.top;
#pragma unroll
    for (int o = WIDE * ACROSS; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float fade = power(s.top - top);
    s.top = top, s.total *= fade;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] *= fade;
#pragma unroll
    for (int o = WIDE * ACROSS; o < 32; o *= 2) {
        s.total += __shfl_xor_sync(~0u, s.total, o);
#pragma unroll
        for (int i = 0; i < EACH; i++) s.mixed[i] += __shfl_xor_sync(~0u, s.mixed[i], o);
    }
}
__device__ __forceinline__ void put(const Place &me, const Softmax &s, float *to, const void *barrier) {
    if (me.side != 0) return;
    const u32 at = in_block(to, 0), by = in_block(barrier, 0);
#pragma unroll
    for (int i = 0; i < EACH; i += 4)
        if (me.inside)
            send(at + (me.piece * EACH + i) * 4, s.mixed[i], s.mixed[i + 1], s.mixed[i + 2], s.mixed[i + 3], by);
    if (me.piece == 0) send(at + D * 4, s.top, s.total, 0.f, 0.f, by);
}

// With many rows registers make room for blocks; with few each block's own latency counts.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CLUSTER > 1 ? 1 : 640 / (32 * WARPS))
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        attention_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    admit_next();
    const int warp = threadIdx.x / 32, rank = blockIdx.x % CLUSTER, block = blockIdx.x / CLUSTER;
    const int sub = warp / BLOCK, head = warp % BLOCK * ACROSS;  // the warp's first in the block
    Place me;
    me.lane = threadIdx.x % 32, me.piece = me.lane % WIDE, me.inside = me.piece < PIECES;
    const int other = me.lane / WIDE % ACROSS, key = block % (HEADS / OWNED) * OWNED + head;
    me.row = block / (HEADS / OWNED), me.key = key + other, me.side = me.lane / WIDE / ACROSS;

    const int older = __ldg(p.lengths + me.row) - 1, units = (older + STEP - 1) / STEP;
    const int each = max((units + CLUSTER - 1) / CLUSTER, 1), last = min((rank + 1) * each, units);
    const int count = max((units + each - 1) / each, 1) * SUB;  // parts of a head
    if (CLUSTER > 1) {
        if (rank == 0 && threadIdx.x == 0) expect(shared, count * OWNED * ROW * 4);
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
        if (rank > 0 && rank * each >= units) return;
    }
    u8 *ring = shared + BARRIER + warp * WARP_BYTES;
    u32 *coded = (u32 *)(ring + RING);
    float *parts = (float *)(shared + BARRIER + WARPS * WARP_BYTES) + head * PARTS * ROW;
    int asked = rank * each + sub;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++, asked += SUB) {
        if (asked < last) request(p, me, ring + i * (RING / STAGES), coded + i * CODED, asked, older);
        commit();
    }
    Softmax s = {LOWEST, 0.f, {}};
    const bool first = rank == 0 && sub == 0;
    const size_t slot = first ? slot_of(p, me.row, older) : 0;
    await_inputs();

    Head q, k, v;
    Angle angle;
    load_head(p, me.row, me.key, me.piece, me.inside, true, q);
    load_angle(p, me.row, me.piece, me.inside, angle);
    if (first) load_newest(p, me, slot, k, v);
    turn(q, angle);
#pragma unroll
    for (int i = 0; i < EACH; i++) q.own[i] *= p.scale_log2;
    if (first) {
        keep_newest(p, me, slot, angle, true, k, v);
        begin(me, s, q.own, k.own, v.own);
    }
    int stage = 0;
    for (int unit = rank * each + sub; unit < last; unit += SUB, asked += SUB) {
        arrived<STAGES - 2>();
        __syncwarp();
        take(p, me, s, q.own, ring + stage * (RING / STAGES), coded + stage * CODED, older - unit * STEP);
        __syncwarp();
        const int free = stage == 0 ? STAGES - 1 : stage - 1;
        if (asked < last) request(p, me, ring + free * (RING / STAGES), coded + free * CODED, asked, older);
        commit();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    gather_sides(s);
    if (PARTS == 1) return write(p, me, s);
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait;" ::: "memory");  // the first block's barrier is there
    put(me, s, parts + (other * PARTS + rank * SUB + sub) * ROW, shared);
    if (CLUSTER == 1) __syncthreads();
    if (rank > 0 || sub > 0) return;
    if (CLUSTER > 1) await(shared);
#pragma unroll
    for (int i = 0; i < ACROSS; i++) finish(p, me.row, key + i, parts + i * PARTS * ROW, ROW, count);
}
