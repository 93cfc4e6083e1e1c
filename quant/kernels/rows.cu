// y[T, N] = onto + alpha * x[T, K] W[N, K]^T for a batch of rows: W unpacked in registers, which feed wgmma.
//
// A block computes ROWS = 64 * WG rows of W, a warp group 64 of them, with NT rows of x and 1/PARTS of the columns; the
// PARTS blocks of a tile are a cluster and add up through each other's shared memory, always in the same order. A stage
// is 128 columns.
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
// GATE (0 none, 1 silu, 2 relu), EXPERTS (0 or 1). The instructions stand in rows_ptx.cu, what rows_bulk.cu has too
// in rows_common.cu; both go before this text.

enum { THREADS = WORKERS, PIECES = ROW_BYTES / 16, AHEAD = DEPTH - 2 };
static_assert(DEPTH >= 3, "a stage is refilled two stages after it was multiplied");

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
    __device__ __forceinline__ int block(int rank) const { return rank; }  // of the cluster
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

__device__ __forceinline__ void multiply_stage(float (&acc)[NT / 2], u32 x, u32 row, int key, int c, u32 scales, int run,
                                               int count, Scale &scale, int stage, int first_group) {
    u32 a[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int piece = 2 * half + j;
            if (RUN % 4 || piece == 0) scale.load(scales, (stage * 4 + piece) / RUN - first_group, count);
            Words words;
            words.load(row, key, piece, c);
            words.unpack(*(u32(*)[2][4])a[half][2 * j], scale, c);
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
    u32 scales = ring + RING_BYTES;
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
    leave_sums(ring, acc, row, c);
    Finish<Params, Part> finish(p, part);
    if (PARTS > 1) meet_cluster();
    else __syncthreads();
    finish.store(ring);
    if (PARTS > 1) meet_cluster();  // nobody leaves while others still read its sums
}
