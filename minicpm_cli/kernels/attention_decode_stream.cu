// Decode attention of many rows where each query head has a key head of its own: a block reads whole tokens, all heads.
//
// A row's older tokens are cut into `usual` parts, a long row's into more, at most `splits`. Blocks stay: each takes
// part after part, its first by its own number, the others from a counter, so that long rows hold nobody up.
// One warp asks the copy engine for stage after stage of TOKENS tokens, which lie in one
// part of a page, across the ends of parts; the others multiply. LANES threads hold a token's heads, 16 bytes each;
// SIDES such groups take DEPTH tokens of a stage each, and keep a softmax of their own until the part ends. The block
// that finishes a row's last part puts the parts together, always in the same order: what a row gives depends on its
// own length and on these two numbers alone.
//
// Set by the compiler's options besides: SIDES, DEPTH, STAGES, RESIDENT (blocks of a processor), HALVES,
// LONG (tokens of a part, at most, as far as `splits` allows it).

enum { LANES = HEADS * WIDE, WORKERS = LANES * SIDES, TOKENS = SIDES * DEPTH, LEADERS = (LANES + 31) / 32 * 32 };
enum { TOKEN_BYTES = 2 * HEADS * D * BYTES, STAGE = TOKENS * TOKEN_BYTES, SCALES = KIND ? 2 * HEADS * PAGE : 0 };
enum { SENT = (SIDES - 1) * LANES * (EACH + 2) * 4, TABLED = 32 };
enum { AT_SCALES = STAGES * STAGE, AT_SENT = AT_SCALES + STAGES * SCALES * 2, AT_HEADS = AT_SENT + SENT };
enum { AT_BARRIERS = AT_HEADS + STAGES * 16, AT_FLAG = AT_BARRIERS + STAGES * 16 };
enum { LAST = 1, END = 2 };  // of a part, of all
static_assert(HEADS == KEYS && WIDE == PIECES && WORKERS % 32 == 0 && PAGE % TOKENS == 0 && CLUSTER == 1);
static_assert(DEPTH % 2 == 0 && (!KIND || PAGE % 8 == 0));
// Codes are multiplied as float16 where HALVES says so: queries then SMALLER, weights with their scales LARGER, so that
// products neither overflow nor vanish. Four products of a score and two of a sum are added before they are widened.
constexpr float SMALLER = HALVES ? 1.f / 64 : 1.f, LARGER = HALVES ? 32.f : 1.f;
static_assert(!HALVES || KIND);
struct Query {
    float wide[HALVES ? 1 : EACH];
    u32 pairs[HALVES ? EACH / 2 : 1];
    float by;  // what a sum of products is to be multiplied by
};

struct Part {
    int row, split, older, first, last, count;  // units of TOKENS tokens; parts of the row that have any
    // All rows' first parts come before their second ones, and parts that only long rows have at the end.
    __device__ __forceinline__ Part(const Params &p, int item) {
        row = item % p.rows, split = item / p.rows, older = __ldg(p.lengths + row) - 1;
        const int parts = min(max(p.usual, (older + LONG - 1) / LONG), p.splits);
        const int units = (older + TOKENS - 1) / TOKENS, each = max((units + parts - 1) / parts, 1);
        first = split * each, last = min(first + each, units), count = max((units + each - 1) / each, 1);
    }
};
struct Stage {  // what lies in a slot of the ring
    int item, what, left, scales;
};
struct Ring {
    u8 *shared;
    int slot = 0, round = 0;
    __device__ __forceinline__ Ring(u8 *shared) : shared(shared) {}
    __device__ __forceinline__ u8 *tokens() const { return shared + slot * STAGE; }
    __device__ __forceinline__ Stage &stage() const { return ((Stage *)(shared + AT_HEADS))[slot]; }
    __device__ __forceinline__ u32 full() const { return shared_address(shared + AT_BARRIERS) + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return full() + STAGES * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == STAGES) slot = 0, round++;
    }
};

// ---- the warp that asks ----
struct Pages {  // numbers of pages of a row, a lane each
    int base = 0, held = 0;
    __device__ __forceinline__ void begin(const Params &p, const Part &part, int page, int lane) {
        base = page;
        const int last = max(part.older - 1, 0) / PAGE;
        held = __ldg(p.table + (size_t)part.row * p.table_stride + min(page + lane, last));
    }
    __device__ __forceinline__ int of(const Params &p, const Part &part, int page, int lane) {
        if (page >= base + TABLED) begin(p, part, page, lane);
        return __shfl_sync(~0u, held, page - base);
    }
};
__device__ __forceinline__ void ask_part(const Params &p, const Part &part, int item, Ring &ring, int &turn, int lane) {
    Pages pages;
    pages.begin(p, part, part.first * TOKENS / PAGE, lane);
    int unit = part.first;
#pragma unroll 1
    do {
        const int token = unit * TOKENS, left = max(min(part.older - token, TOKENS), 0);
        const int page = pages.of(p, part, token / PAGE, lane);
        const bool scales = KIND && left > 0 && (unit == part.first || token % PAGE == 0);
        if (scales && ++turn == STAGES) turn = 0;
        if (ring.round) await_phase(ring.empty(), ring.round - 1 & 1);
        if (lane == 0) {
            ring.stage() = {item, unit + 1 >= part.last ? LAST : 0, left, turn * SCALES + token % PAGE};
            expect_bytes(ring.full(), left * TOKEN_BYTES + (scales ? SCALES * 2 : 0));
            const u8 *from = p.k + ((size_t)page * PAGE + token % PAGE) * TOKEN_BYTES;
            if (left > 0) copy_bulk(shared_address(ring.tokens()), from, left * TOKEN_BYTES, ring.full());
            if (scales)
                copy_bulk(shared_address(ring.shared + AT_SCALES + turn * SCALES * 2),
                          p.k_scale + (size_t)page * SCALES, SCALES * 2, ring.full());
        }
        __syncwarp();
        ring.next();
    } while (++unit < part.last);
}
__device__ __forceinline__ int next_item(const Params &p, int items, int lane) {
    int taken = 0;
    if (lane == 0) {
        taken = atomicAdd(p.counters, 1);
        if (taken == items - 1) atomicExch(p.counters, 0);  // each item but the blocks' first, and a miss of each block
    }
    return gridDim.x + __shfl_sync(~0u, taken, 0);
}
__device__ __forceinline__ void ask(const Params &p, u8 *shared, int lane) {
    const int items = p.rows * p.splits;
    Ring ring(shared);
    int turn = STAGES - 1;
    for (int item = blockIdx.x; item < items; item = next_item(p, items, lane)) {
        const Part part(p, item);
        if (part.split < part.count) ask_part(p, part, item, ring, turn, lane);
        if (item == blockIdx.x) await_inputs();  // and so the launch before it is done with the counter
    }
    if (ring.round) await_phase(ring.empty(), ring.round - 1 & 1);
    if (lane > 0) return;
    ring.stage() = {0, END, 0, 0};
    arrive(ring.full());
}

// ---- the warps that multiply ----
__device__ __forceinline__ void begin_part(const Params &p, Place &me, const Part &part, Softmax &s, Query &q) {
    Head h, k, v;
    Angle angle;
    me.row = part.row;
    s.top = LOWEST, s.total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] = 0.f;
    const bool newest = part.split == 0 && threadIdx.x < LEADERS;  // whole warps: they exchange numbers
    const size_t slot = newest ? slot_of(p, me.row, part.older) : 0;
    load_head(p, me.row, me.key, me.piece, true, true, h);
    load_angle(p, me.row, me.piece, true, angle);
    if (newest) load_newest(p, me, slot, k, v);
    turn(h, angle);
    q.by = p.scale_log2 / SMALLER;
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        if (HALVES)
            q.pairs[HALVES ? i / 2 : 0] = f16_pair(h.own[i] * SMALLER, h.own[i + 1] * SMALLER);
        else
            q.wide[HALVES ? 0 : i] = h.own[i] * p.scale_log2, q.wide[HALVES ? 0 : i + 1] = h.own[i + 1] * p.scale_log2;
    }
    if (!newest) return;
#pragma unroll
    for (int i = 0; i < EACH; i++) h.own[i] *= p.scale_log2;
    keep_newest(p, me, slot, angle, true, k, v);
#pragma unroll
    for (int i = 0; i < EACH; i++) v.own[i] *= LARGER;
    begin(me, s, h.own, k.own, v.own);
}
__device__ __forceinline__ float scale_of(const u16 *scales, int token) {  // of DEPTH tokens side by side
    const u32 two = ((const u32 *)scales)[token / 2];
    return f32_of_f16(token % 2 ? two >> 16 : two & 0xffff);
}
__device__ __forceinline__ float product(uint4 raw, const Query &q) {
    if (!HALVES) {
        float k[EACH], even = 0.f, odd = 0.f;
        unpack(raw, k);
#pragma unroll
        for (int i = 0; i < EACH; i += 2)
            even += k[i] * q.wide[HALVES ? 0 : i], odd += k[i + 1] * q.wide[HALVES ? 0 : i + 1];
        return even + odd;
    }
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    u32 sum[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low, high;
        f16_codes(words[i], low, high);
        const u32 a = q.pairs[HALVES ? 2 * i : 0], b = q.pairs[HALVES ? 2 * i + 1 : 0];
        sum[i / 2] = f16_times_plus(high, b, i % 2 ? f16_times_plus(low, a, sum[i / 2]) : f16_times(low, a));
    }
    const float a = f32_of_f16(sum[0] & 0xffff) + f32_of_f16(sum[0] >> 16);
    return a + (f32_of_f16(sum[1] & 0xffff) + f32_of_f16(sum[1] >> 16));
}
// Adds two tokens' values; `fade` is for what has been added before.
__device__ __forceinline__ void mix(Softmax &s, uint4 first, uint4 second, float a, float b, float fade) {
    if (!HALVES) {
        float v[EACH];
        unpack(first, v);
#pragma unroll
        for (int i = 0; i < EACH; i++) s.mixed[i] = s.mixed[i] * fade + a * v[i];
        unpack(second, v);
#pragma unroll
        for (int i = 0; i < EACH; i++) s.mixed[i] += b * v[i];
        return;
    }
    const u32 one[4] = {first.x, first.y, first.z, first.w}, two[4] = {second.x, second.y, second.z, second.w};
    const u32 by_one = f16_pair(a * LARGER, a * LARGER), by_two = f16_pair(b * LARGER, b * LARGER);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 x[2], y[2];
        f16_codes(one[i], x[0], x[1]), f16_codes(two[i], y[0], y[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 sum = f16_times_plus(y[j], by_two, f16_times(x[j], by_one));
            float &low = s.mixed[(4 * i + 2 * j) % EACH], &high = s.mixed[(4 * i + 2 * j + 1) % EACH];
            low = low * fade + f32_of_f16(sum & 0xffff), high = high * fade + f32_of_f16(sum >> 16);
        }
    }
}
template <bool WHOLE>
__device__ __forceinline__ void take(
    const Place &me, Softmax &s, const Query &q, const u8 *pieces, const u16 *scales, int left
) {
    float score[DEPTH], weight[DEPTH], top = s.top;
    uint4 value[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const bool there = WHOLE || d < left;
        score[d] = across(product(there ? *(const uint4 *)(pieces + d * TOKEN_BYTES) : uint4{0, 0, 0, 0}, q));
        if (KIND) score[d] *= HALVES ? scale_of(scales, d) * q.by : scale_of(scales, d);
        if (!there) score[d] = 2.f * LOWEST;
        top = fmaxf(top, score[d]);
    }
    const float fade = power(s.top - top);
    s.top = top, s.total *= fade;
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const bool there = WHOLE || d < left;
        weight[d] = power(score[d] - top);
        s.total += weight[d];
        if (KIND) weight[d] = there ? weight[d] * scale_of(scales + HEADS * PAGE, d) : 0.f;
        value[d] = there ? *(const uint4 *)(pieces + d * TOKEN_BYTES + HEADS * D * BYTES) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d += 2) mix(s, value[d], value[d + 1], weight[d], weight[d + 1], d == 0 ? fade : 1.f);
}
__device__ __forceinline__ void take_part(const Place &me, Softmax &s, const Query &q, Ring &ring, int within) {
    const int offset = me.side * DEPTH;
    for (bool last = false; !last; ring.next()) {
        await_phase(ring.full(), ring.round & 1);
        const Stage stage = ring.stage();
        const u8 *pieces = ring.tokens() + offset * TOKEN_BYTES + within * 16;
        const u16 *scales = (const u16 *)(ring.shared + AT_SCALES) + stage.scales + me.key * PAGE + offset;
        if (stage.left == TOKENS)
            take<true>(me, s, q, pieces, scales, DEPTH);
        else
            take<false>(me, s, q, pieces, scales, stage.left - offset);
        __syncwarp();
        if (me.lane == 0) arrive(ring.empty());
        last = stage.what & LAST;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] *= 1.f / LARGER;
}
__device__ __forceinline__ void add(Softmax &s, float top, float total, const float (&mixed)[EACH]) {
    const float most = fmaxf(s.top, top), mine = power(s.top - most), other = power(top - most);
    s.top = most, s.total = s.total * mine + total * other;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] = s.mixed[i] * mine + mixed[i] * other;
}
__device__ __forceinline__ float4 four(const Softmax &s, int i) {
    return {s.mixed[i], s.mixed[i + 1], s.mixed[i + 2], s.mixed[i + 3]};
}
__device__ __forceinline__ void gather_sides(const Place &me, Softmax &s, u8 *shared, int within) {
    float4 *sums = (float4 *)(shared + AT_SENT);
    float2 *tops = (float2 *)(sums + (SIDES - 1) * LANES * (EACH / 4));
    meet(1, WORKERS);  // what was sent before has been read
    if (me.side > 0) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) sums[((me.side - 1) * (EACH / 4) + i / 4) * LANES + within] = four(s, i);
        tops[(me.side - 1) * LANES + within] = {s.top, s.total};
    }
    meet(1, WORKERS);
    if (me.side > 0) return;
#pragma unroll
    for (int side = 0; side < SIDES - 1; side++) {
        float mixed[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const float4 x = sums[(side * (EACH / 4) + i / 4) * LANES + within];
            mixed[i] = x.x, mixed[i + 1] = x.y, mixed[i + 2] = x.z, mixed[i + 3] = x.w;
        }
        const float2 x = tops[side * LANES + within];
        add(s, x.x, x.y, mixed);
    }
}
__device__ __forceinline__ bool last_of_row(const Params &p, const Part &part, volatile int *flag) {
    __threadfence();
    meet(2, LEADERS);
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(p.counters + 1 + part.row, 1) == part.count - 1;
        if (last) atomicExch(p.counters + 1 + part.row, 0);
        *flag = last;
        __threadfence();
    }
    meet(2, LEADERS);
    return *flag;
}
__device__ __forceinline__ void gather_parts(const Params &p, const Part &part, Softmax &s, int within) {
    const float4 *sums = (const float4 *)p.parts;
    const float2 *tops = (const float2 *)(sums + (size_t)p.rows * p.splits * (EACH / 4) * LANES);
    s.top = LOWEST, s.total = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) s.mixed[i] = 0.f;
#pragma unroll 2
    for (int split = 0; split < part.count; split++) {
        const size_t item = (size_t)part.row * p.splits + split;
        float mixed[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            const float4 x = __ldcg(sums + (item * (EACH / 4) + i / 4) * LANES + within);
            mixed[i] = x.x, mixed[i + 1] = x.y, mixed[i + 2] = x.z, mixed[i + 3] = x.w;
        }
        const float2 x = __ldcg(tops + item * LANES + within);
        add(s, x.x, x.y, mixed);
    }
}
__device__ __forceinline__ void end_part(
    const Params &p, const Place &me, const Part &part, Softmax &s, u8 *shared, int within
) {
    if (SIDES > 1) gather_sides(me, s, shared, within);
    if (part.count == 1) return write(p, me, s);
    if (threadIdx.x >= LEADERS) return;
    float4 *sums = (float4 *)p.parts;
    float2 *tops = (float2 *)(sums + (size_t)p.rows * p.splits * (EACH / 4) * LANES);
    const size_t item = (size_t)part.row * p.splits + part.split;
    if (me.side == 0) {
#pragma unroll
        for (int i = 0; i < EACH; i += 4) sums[(item * (EACH / 4) + i / 4) * LANES + within] = four(s, i);
        tops[item * LANES + within] = {s.top, s.total};
    }
    if (!last_of_row(p, part, (volatile int *)(shared + AT_FLAG)) || me.side > 0) return;
    gather_parts(p, part, s, within);
    write(p, me, s);
}
__device__ __forceinline__ void work(const Params &p, u8 *shared) {
    const int within = threadIdx.x % LANES;
    Place me;
    me.lane = threadIdx.x % 32, me.side = threadIdx.x / LANES, me.key = within / WIDE, me.piece = within % WIDE;
    me.inside = true;
    Ring ring(shared);
    await_inputs();
    for (;;) {
        await_phase(ring.full(), ring.round & 1);
        if (ring.stage().what & END) return;
        const Part part(p, ring.stage().item);
        Softmax s;
        Query q;
        begin_part(p, me, part, s, q);
        take_part(me, s, q, ring, within);
        end_part(p, me, part, s, shared, within);
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, RESIDENT)
    attention_decode(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    admit_next();
    if (threadIdx.x == 0) {
        const u32 barriers = shared_address(shared + AT_BARRIERS);
        for (int i = 0; i < STAGES; i++)
            begin_barrier(barriers + i * 8, 1), begin_barrier(barriers + (STAGES + i) * 8, WORKERS / 32);
        show_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS)
        ask(p, shared, threadIdx.x % 32);
    else
        work(p, shared);
}
