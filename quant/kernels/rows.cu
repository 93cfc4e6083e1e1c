// y[T, N] = onto + alpha * x[T, K] W[N, K]^T for a batch of rows: W unpacked in registers, which feed wgmma.
//
// A block computes ROWS = 64 * WG rows of W, a warp group 64 of them, with NT rows of x and 1/PARTS of the columns; the
// PARTS blocks of a tile are a cluster and add up through each other's shared memory, always in the same order. A stage
// is 128 columns. W stands on the left, so lane (g, c) = (lane / 4, lane % 4) needs columns 2c, 2c+1, 2c+8, 2c+9 of every
// 16, of rows g and g+8: it loads whole words and shifts by its own amount to its pair, and columns stay in order.
//
// W and x stream through a ring of DEPTH stages (cp.async). W is requested before griddepcontrol.wait, while the kernel
// that computes x still runs. In shared memory pieces of 16 bytes are exchanged (xor) so that eight rows' pieces lie in
// different banks; for x that is wgmma's 128-byte pattern, two halves of 64 columns a stage.
//
// With a GATE the upper half of a block's rows are gate rows, the lower half the up rows of the same outputs. With
// EXPERTS the rows of x are those of one expert, first_t on in the experts' order, and W is that expert's.
//
// Set by the compiler's options: BITS, HALF (x is float16, else bfloat16), SCALE (0 float16, 1 bfloat16, 2 float32),
// KIND (0 middle, 1 zero points, 2 shifts), RUN (columns under one scale, in units of 32), NT, WG, PARTS, DEPTH,
// GATE (0 none, 1 silu, 2 relu), EXPERTS (0 or 1). The instructions stand in rows_ptx.cu, which goes before this text.

enum { ROWS = 64 * WG, THREADS = 128 * WG, STAGE = 128, ROW_BYTES = STAGE * BITS / 8, PIECES = ROW_BYTES / 16 };
enum { X_BYTES = NT * STAGE * 2, STAGE_BYTES = X_BYTES + ROWS * ROW_BYTES, AHEAD = DEPTH - 2, LINE = ROWS + 4 };
enum { OUTPUTS = GATE ? ROWS / 2 : ROWS };  // of a block
static_assert(DEPTH >= 3, "a stage is refilled two stages after it was multiplied");
constexpr float MIDDLE = BITS == 4 ? 8.f : 128.f;
// What a code is above its value when it is read as a number: 2^7 + c in bfloat16, 2^10 + c in float16. 8 bits do not
// fit bfloat16's mantissa: there the eighth is added apart, and nothing is above.
constexpr bool SPLIT = BITS == 8 && !HALF;
constexpr float ABOVE = HALF ? 1024.f : SPLIT ? 0.f : 128.f;

struct Params {
    const u8 *weight, *scale, *zero;
    const float *shift;
    const u8 *x, *onto;
    u8 *out;
    const int *order, *starts;  // pairs (token * active + place) by expert, and where each expert's begin
    int N, K, groups, T, stride;  // N: outputs, half as many as rows of W behind a gate; bytes from row to row of x
    int experts, active;  // active 0: x is in the experts' order itself
    float alpha, threshold;
};

__device__ __forceinline__ float plain(u16 bits) { return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16); }

// The block's part of the work.
struct Part {
    int first_n, first_t, end_t, begin, end, rank;
    long long first_row;  // of W
    __device__ __forceinline__ Part(const Params &p) {
        int tile = blockIdx.x / PARTS, tiles = (p.N + OUTPUTS - 1) / OUTPUTS, stages = (p.K + STAGE - 1) / STAGE;
        rank = blockIdx.x % PARTS, begin = rank * stages / PARTS, end = (rank + 1) * stages / PARTS;
        first_n = tile % tiles * OUTPUTS, first_t = tile / tiles * NT, end_t = p.T, first_row = first_n;
        if (EXPERTS) {
            int expert = 0, block = tile / tiles, blocks = 0;
            for (; expert < p.experts; expert++, block -= blocks) {
                first_t = p.starts[expert], end_t = p.starts[expert + 1], blocks = (end_t - first_t + NT - 1) / NT;
                if (block < blocks) break;
            }
            first_t = expert < p.experts ? first_t + block * NT : end_t;  // none is left
            first_row += (long long)expert * p.N * (GATE ? 2 : 1);
        }
    }
    // How far W's row for the block's row `local` is from its first, and whether it is one of its outputs.
    __device__ __forceinline__ int apart(const Params &p, int local) const {
        return GATE && local >= OUTPUTS ? local + p.N - OUTPUTS : local;
    }
    __device__ __forceinline__ bool inside(const Params &p, int local) const {
        return first_n + (GATE && local >= OUTPUTS ? local - OUTPUTS : local) < p.N;
    }
    __device__ __forceinline__ int first_group() const { return begin * (STAGE / 32) / RUN; }
};

// What a thread requests: one piece of every so many rows, the same of every stage. Nothing is read past the ends.
struct Source {
    enum { W_STEP = THREADS / PIECES, X_STEP = THREADS / 16, X_COUNT = (NT + X_STEP - 1) / X_STEP };
    const u8 *w, *x, *gathered[EXPERTS ? X_COUNT : 1];
    int w_local, w_piece, w_to, x_row, x_piece, x_to;
    __device__ __forceinline__ Source(const Params &p, const Part &part) {
        int t = threadIdx.x / 16, half = threadIdx.x / 8 % 2;
        w_local = threadIdx.x / PIECES, w_piece = threadIdx.x % PIECES * 16;
        w = p.weight + (part.first_row + w_local) * (p.K / 8 * BITS) + w_piece;
        int key = BITS == 4 ? w_local >> 1 & 3 : w_local & 7;
        w_to = X_BYTES + w_local * ROW_BYTES + (threadIdx.x % PIECES ^ key) * 16;
        x_row = part.first_t + t, x_piece = threadIdx.x % 16 * 8;
        x = p.x + (long long)x_row * p.stride + x_piece * 2;
        x_to = half * (NT * 128) + t * 128 + (threadIdx.x % 8 ^ t & 7) * 16;
        if (EXPERTS)
            for (int j = 0; j < X_COUNT; j++) {
                int row = min(x_row + j * X_STEP, part.end_t - 1);
                gathered[j] = p.x + (long long)(p.active ? p.order[row] / p.active : row) * p.stride + x_piece * 2;
            }
    }
    __device__ __forceinline__ void load_w(u32 to, const Params &p, const Part &part, int stage) const {
        int bytes = p.K / 8 * BITS;
        bool inside = stage * ROW_BYTES + w_piece < bytes;
        const u8 *from = w + stage * ROW_BYTES;
#pragma unroll
        for (int j = 0; j < ROWS / W_STEP; j++) {
            bool valid = inside && part.inside(p, w_local + j * W_STEP);
            request(to + w_to + j * (W_STEP * ROW_BYTES), from, valid);
            from += (part.apart(p, w_local + (j + 1) * W_STEP) - part.apart(p, w_local + j * W_STEP)) * (long long)bytes;
        }
    }
    __device__ __forceinline__ void load_x(u32 to, const Params &p, const Part &part, int stage) const {
        bool inside = stage * STAGE + x_piece < p.K;
        const u8 *from = x + stage * (STAGE * 2);
#pragma unroll
        for (int j = 0; j < X_COUNT; j++) {
            if (NT % X_STEP && threadIdx.x / 16 + j * X_STEP >= NT) break;
            bool valid = inside && x_row + j * X_STEP < part.end_t;
            request(to + x_to + j * (X_STEP * 128), EXPERTS ? gathered[j] + stage * (STAGE * 2) : from, valid);
            from += X_STEP * p.stride;
        }
    }
};

// Scales as pairs [group][row], after them zeros with what codes are above, after them what shifts leave.
__device__ __forceinline__ void load_scales(u32 to, const Params &p, const Part &part, int count) {
    int first = part.first_group();
#pragma unroll 2
    for (int i = threadIdx.x; i < ROWS * count; i += THREADS) {
        int row = i / count, group = i % count;
        int apart = part.inside(p, row) ? part.apart(p, row) : 0;
        long long at = (part.first_row + apart) * p.groups + min(first + group, p.groups - 1);
        float s = SCALE == 0   ? half_to_float(((const u16 *)p.scale)[at])
                  : SCALE == 1 ? __uint_as_float((u32)((const u16 *)p.scale)[at] << 16)
                               : ((const float *)p.scale)[at];
        float z = KIND == 1 ? (float)p.zero[at] : 0.f;
        if (KIND == 2) {  // a whole zero, and the rest, which is small enough for 16 bits
            float h = p.shift[at];
            z = s == 0.f ? 0.f : fminf(fmaxf(floorf(0.5f - h / s), 0.f), 2 * MIDDLE - 1);
            h = fmaf(z, s, h);
            write1(to + ((2 * count + group) * ROWS + row) * 4, pack_pair(h, h));
        }
        if (KIND) write1(to + ((count + group) * ROWS + row) * 4, pack_pair(ABOVE + z, ABOVE + z));
        write1(to + (group * ROWS + row) * 4, pack_pair(s, s));
    }
}

// What the lane's two rows have in common over a run of columns.
struct Scale {
    u32 s[2], z[2], h[2];
    __device__ __forceinline__ void load(u32 from, int group, int count) {
        u32 at = from + group * (ROWS * 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[i] = read1(at + i * 32);
            if (KIND) z[i] = read1(at + count * (ROWS * 4) + i * 32);
            if (KIND == 2) h[i] = read1(at + 2 * count * (ROWS * 4) + i * 32);
        }
    }
    __device__ __forceinline__ u32 weights(u32 word, int shift, int i) const {  // a pair of row g + 8i
        u32 t = word >> shift;
        if (SPLIT) {
            u32 top = t << 7 & 0x40004000;  // 2.0 where the eighth bit is set, 64 times which is 128
            t = plus(number(t, 0x007f007f, 0x43004300), KIND ? 0xC300C300 : 0xC380C380);  // less 128, or 256
            t = times_plus(top, 0x42804280, t);
            if (KIND) t = minus(t, z[i]);
        } else {
            t = number(t, BITS == 4 ? 0x000f000f : 0x00ff00ff, HALF ? 0x64006400 : 0x43004300);
            t = minus(t, KIND ? z[i] : HALF ? (BITS == 4 ? 0x64086408 : 0x64806480) : 0x43084308);
        }
        return KIND == 2 ? times_plus(t, s[i], h[i]) : times(t, s[i]);
    }
};

// Weights of 32 columns of the lane's rows, as the left operands of two wgmma.
__device__ __forceinline__ void unpack(u32 (&a)[2][4], u32 row, int key, int piece, const Scale &scale, int c) {
    if constexpr (BITS == 4) {
        u32 at = row + ((piece ^ key) << 4);
        uint4 low = read4(at), high = read4(at + 8 * ROW_BYTES);
        int shift = 4 * c;
        a[0][0] = scale.weights(low.x, shift, 0), a[0][1] = scale.weights(high.x, shift, 1);
        a[0][2] = scale.weights(low.y, shift, 0), a[0][3] = scale.weights(high.y, shift, 1);
        a[1][0] = scale.weights(low.z, shift, 0), a[1][1] = scale.weights(high.z, shift, 1);
        a[1][2] = scale.weights(low.w, shift, 0), a[1][3] = scale.weights(high.w, shift, 1);
    } else {
        int shift = 8 * (c & 1);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            u32 at = row + (((2 * piece + q) ^ key) << 4) + (c >> 1) * 4;
            a[q][0] = scale.weights(read1(at), shift, 0), a[q][1] = scale.weights(read1(at + 8 * ROW_BYTES), shift, 1);
            a[q][2] = scale.weights(read1(at + 8), shift, 0);
            a[q][3] = scale.weights(read1(at + 8 + 8 * ROW_BYTES), shift, 1);
        }
    }
}

// Rows of x, `offset` bytes from the stage at `x` / 16, in wgmma's 128-byte pattern: eight of them are 1024 bytes.
__device__ __forceinline__ u64 describe(u32 x, u32 offset) {
    return (u64)(1u << 30 | 1024 >> 4) << 32 | (x + (offset >> 4) | 1u << 16);
}

__device__ __forceinline__ void multiply_stage(float (&acc)[NT / 2], u32 x, u32 row, int key, int c, u32 scales, int run,
                                               int count, Scale &scale, int stage, int first_group) {
    u32 a[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int piece = 2 * half + j;
            if (RUN % 4 || piece == 0) scale.load(scales, (stage * 4 + piece) / RUN - first_group, count);
            unpack(*(u32(*)[2][4])a[half][2 * j], row, key, piece, scale, c);
        }
        fence_multiply();
#pragma unroll
        for (int q = 0; q < 4; q++)
            multiply(acc, a[half][q][0], a[half][q][1], a[half][q][2], a[half][q][3],
                     describe(x, half * (NT * 128) + q * 32));
        close_multiply();
        await_multiply<1>();
    }
}

// Four neighbouring outputs of row t, the sums of all parts, always in the same order.
__device__ __forceinline__ float4 sum(u32 sums, int t, int n) {
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int rank = 0; rank < PARTS; rank++) {
        float4 w = read_sums(sums + (t * LINE + n) * 4, rank);
        v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
    }
    return v;
}
__device__ __forceinline__ float gated(float gate, float up, float threshold) {
    return (GATE == 1 ? gate / (1.f + __expf(-gate)) : gate >= threshold ? gate : 0.f) * up;
}

// Every PARTS-th row of x with what is around the product.
__device__ __forceinline__ void finish(u32 sums, const Params &p, const Part &part) {
#pragma unroll 1
    for (int i = threadIdx.x; i < (NT + PARTS - 1) / PARTS * (OUTPUTS / 4); i += THREADS) {
        int t = i / (OUTPUTS / 4) * PARTS + part.rank, n = i % (OUTPUTS / 4) * 4;
        if (t >= NT || part.first_t + t >= part.end_t) continue;
        float4 v = sum(sums, t, n);
        if (GATE) {
            float4 up = sum(sums, t, n + OUTPUTS);
            v.x = gated(v.x, up.x, p.threshold), v.y = gated(v.y, up.y, p.threshold);
            v.z = gated(v.z, up.z, p.threshold), v.w = gated(v.w, up.w, p.threshold);
        }
        n += part.first_n;
        long long at = (long long)(part.first_t + t) * p.N + n;
        const u16 *onto = (const u16 *)p.onto + at;
        u16 *out = (u16 *)p.out + at;
        if (p.N % 4 == 0) {
            if (n >= p.N) continue;
            ushort4 old = p.onto ? *(const ushort4 *)onto : make_ushort4(0, 0, 0, 0);
            u32 low = pack_pair(fmaf(p.alpha, v.x, plain(old.x)), fmaf(p.alpha, v.y, plain(old.y)));
            u32 high = pack_pair(fmaf(p.alpha, v.z, plain(old.z)), fmaf(p.alpha, v.w, plain(old.w)));
            *(uint2 *)out = make_uint2(low, high);
        } else {
            float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (n + j < p.N) out[j] = (u16)pack_pair(fmaf(p.alpha, each[j], p.onto ? plain(onto[j]) : 0.f), 0.f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, (NT > 64 ? 2 : 4) / WG > 0 ? (NT > 64 ? 2 : 4) / WG : 1) __cluster_dims__(PARTS, 1, 1)
    rows(const __grid_constant__ Params p) {
    extern __shared__ u8 raw[];
    u32 ring = (address(raw) + 1023) & ~1023u;
    int lane = threadIdx.x % 32, c = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
    admit_next();
    if (EXPERTS) await_inputs();  // which weights are needed is computed, too
    Part part(p);
    if (EXPERTS && part.first_t >= part.end_t) return;
    Source source(p, part);
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) {
        if (part.begin + i < part.end) source.load_w(ring + i * STAGE_BYTES, p, part, part.begin + i);
        close_requests();
    }
    if (threadIdx.x < ROWS && part.inside(p, threadIdx.x)) {  // the rest of W only as far as the L2 cache
        int bytes = p.K / 8 * BITS, from = (part.begin + AHEAD) * ROW_BYTES, size = min(part.end * ROW_BYTES, bytes) - from;
        const u8 *at = p.weight + (part.first_row + part.apart(p, threadIdx.x)) * bytes + from;
        if (size > 0) fetch_ahead(at, size);
    }
    u32 scales = ring + (DEPTH * STAGE_BYTES > NT * LINE * 4 ? DEPTH * STAGE_BYTES : NT * LINE * 4);
    int first_group = part.first_group(), count = ((part.end * 4 - 1) / RUN) - first_group + 1;
    load_scales(scales, p, part, count);
    if (!EXPERTS) await_inputs();
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) {
        if (part.begin + i < part.end) source.load_x(ring + i * STAGE_BYTES, p, part, part.begin + i);
        close_requests();
    }
    float acc[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; i++) acc[i] = 0;
    Scale scale;
    int key = BITS == 4 ? row >> 1 & 3 : row & 7, slot = 0, refill = AHEAD;
#pragma unroll 1
    for (int stage = part.begin; stage < part.end; stage++) {
        await_requests<AHEAD - 1>();
        show_arrived();
        __syncthreads();
        if (stage + AHEAD < part.end) {
            source.load_w(ring + refill * STAGE_BYTES, p, part, stage + AHEAD);
            source.load_x(ring + refill * STAGE_BYTES, p, part, stage + AHEAD);
        }
        close_requests();
        u32 x = ring + slot * STAGE_BYTES;
        multiply_stage(acc, x >> 4, x + X_BYTES + row * ROW_BYTES, key, c, scales + row * 4, RUN, count, scale, stage,
                       first_group);
        slot = slot + 1 == DEPTH ? 0 : slot + 1, refill = refill + 1 == DEPTH ? 0 : refill + 1;
    }
    await_multiply<0>();
    await_requests<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NT / 2; i++) settle(acc[i]);
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        int t = i / 4 * 8 + 2 * c + i % 2, n = row + i / 2 % 2 * 8;
        write1(ring + (t * LINE + n) * 4, __float_as_uint(acc[i]));
    }
    if (PARTS > 1) meet_cluster();
    else __syncthreads();
    finish(ring, p, part);
    if (PARTS > 1) meet_cluster();  // nobody leaves while others still read its sums
}
