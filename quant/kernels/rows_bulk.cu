// y[T, N] = onto + alpha * x[T, K] W[N, K]^T for a batch of rows: W plain, or packed and unpacked in registers.
//
// A block computes ROWS = 64 * WG rows of W with NT rows of x and 1/PARTS of the columns. WG warp groups multiply; one
// warp more asks the copy engine for stage after stage of W and x, in a ring of DEPTH stages: `full` counts a stage's
// bytes as they arrive, `empty` the warps that are done with it. W is requested before griddepcontrol.wait, while the
// kernel that computes x still runs.
//
// The PARTS blocks of the same rows are a cluster and add up through each other's shared memory, always in the same order.
//
// Plain weights come as CHUNKS of 64 columns, eight rows of each before the next eight rows: memory is read along its rows.
// With one chunk, in boxes of two dimensions, numbers of rows and columns are any.
//
// Set by the compiler's options: BITS (16: plain), HALF (x is float16, else bfloat16), SCALE (0 float16, 1 bfloat16,
// 2 float32), KIND (0 middle, 1 zero points, 2 shifts), RUN (columns under one scale, in units of 32), NT, WG, PARTS,
// DEPTH, CHUNKS. The instructions stand in rows_ptx.cu, what rows.cu has too in rows_common.cu; both go before
// this text, with GATE as 0.

enum { THREADS = WORKERS + 32 };
// Blocks that share a processor, by the registers that they need: warps take turns at its four files of 512 a lane.
enum { NEEDED = NT / 2 + (BITS == 16 ? 32 : 64), FIT = 512 / ((2 * THREADS / 32 + 3) / 4) >= NEEDED ? 2 : 1 };
enum { W_COLUMNS = BITS == 16 ? 64 : STAGE * BITS / 32 };  // of a box, in numbers or words

struct Params {
    struct alignas(64) Map {
        u8 opaque[128];
    } w, x;
    const u8 *scale, *zero;
    const float *shift;
    const u8 *onto;
    u8 *out;
    int N, K, groups, T;
    float alpha;
};

struct Part {
    int first_n, first_t, end_t, begin, end, rank;
    long long first_row;
    __device__ __forceinline__ Part(const Params &p) {
        int tile = blockIdx.x / PARTS, batches = (p.T + NT - 1) / NT, stages = (p.K + STAGE - 1) / STAGE;
        rank = blockIdx.x % PARTS, begin = rank * stages / PARTS, end = (rank + 1) * stages / PARTS;
        first_n = tile / batches * ROWS, first_t = tile % batches * NT, end_t = p.T, first_row = first_n;
    }
    __device__ __forceinline__ int apart(const Params &, int local) const { return local; }
    __device__ __forceinline__ bool inside(const Params &p, int local) const { return first_n + local < p.N; }
    __device__ __forceinline__ int block(int other) const { return other; }
    __device__ __forceinline__ int first_group() const { return begin * (STAGE / 32) / RUN; }
};

struct Ring {
    u32 stages, barriers;
    int slot = 0, round = 0;
    __device__ __forceinline__ u32 stage() const { return stages + slot * STAGE_BYTES; }
    __device__ __forceinline__ u32 full() const { return barriers + slot * 8; }
    __device__ __forceinline__ u32 empty() const { return barriers + (DEPTH + slot) * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == DEPTH) slot = 0, round++;
    }
};

__device__ __forceinline__ void begin_barriers(u32 barriers) {
    for (int i = 0; i < DEPTH; i++) {
        begin_barrier(barriers + i * 8, 1);
        begin_barrier(barriers + (DEPTH + i) * 8, 4 * WG);
    }
    show_barriers();
}
__device__ __forceinline__ void load_w(const Params &p, const Part &part, const Ring &ring, int stage) {
    u32 to = ring.stage() + X_BYTES;
    expect_bytes(ring.full(), STAGE_BYTES);
    if (CHUNKS > 1)
        load_chunks(to, &p.w, stage * CHUNKS, part.first_n / 8, ring.full());
    else
        load_box(to, &p.w, stage * W_COLUMNS, part.first_n, ring.full());
}
__device__ __forceinline__ void load_x(const Params &p, const Part &part, const Ring &ring, int stage) {
#pragma unroll
    for (int half = 0; half < HALVES; half++)
        load_box(ring.stage() + half * (NT * 128), &p.x, stage * STAGE + half * 64, part.first_t, ring.full());
}

// What the one thread does that asks for the stages.
__device__ __forceinline__ void ask_early(const Params &p, const Part &part, Ring ring) {
    int stage = part.begin;
    for (int i = 0; i < DEPTH && stage < part.end; i++, stage++, ring.next()) load_w(p, part, ring, stage);
}
__device__ __forceinline__ void ask(const Params &p, const Part &part, Ring ring) {
#pragma unroll 1
    for (int stage = part.begin; stage < part.end; stage++, ring.next()) {
        if (ring.round) {
            await_barrier(ring.empty(), ring.round - 1 & 1);
            load_w(p, part, ring, stage);
        }
        load_x(p, part, ring, stage);
    }
}

// The warp is done with what the slot holds.
__device__ __forceinline__ void release(u32 empty, int lane) {
    meet_warp();
    if (lane == 0) arrive(empty);
}

__device__ __forceinline__ void multiply_plain(float (&acc)[NT / 2], u32 stage, int group) {
    fence_multiply();
#pragma unroll
    for (int chunk = 0; chunk < HALVES; chunk++)
#pragma unroll
        for (int q = 0; q < 4; q++)
            multiply_shared(acc, describe(stage + X_BYTES + group * (8192 * CHUNKS) >> 4, chunk * 1024 + q * 32, CHUNKS * 1024),
                            describe(stage >> 4, chunk * (NT * 128) + q * 32));
    close_multiply();
    await_multiply<1>();
}

// What the warp groups do. The stage before is released when its last product is known to be done.
__device__ __forceinline__ void work(float (&acc)[NT / 2], const Part &part, Ring ring, u32 scales, int count) {
    int lane = threadIdx.x % 32, c = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
    int key = BITS == 4 ? row >> 1 & 3 : row & 7, first_group = part.first_group();
    u32 before = 0;
    Scale scale;
#pragma unroll 1
    for (int stage = part.begin; stage < part.end; stage++, ring.next()) {
        await_barrier(ring.full(), ring.round & 1);
        if (BITS == 16) {
            multiply_plain(acc, ring.stage(), threadIdx.x / 128);
            if (before) release(before, lane);
        } else {
            u32 a[2][4][4], w = ring.stage() + X_BYTES + row * ROW_BYTES;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                Words words[2];
#pragma unroll
                for (int j = 0; j < 2; j++) words[j].load(w, key, 2 * half + j, c);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int piece = 2 * half + j;
                    if (RUN % 4 || piece == 0) scale.load(scales + row * 4, (stage * 4 + piece) / RUN - first_group, count);
                    words[j].unpack(*(u32(*)[2][4])a[half][2 * j], scale, c);
                }
                fence_multiply();
#pragma unroll
                for (int q = 0; q < 4; q++)
                    multiply(acc, a[half][q][0], a[half][q][1], a[half][q][2], a[half][q][3],
                             describe(ring.stage() >> 4, half * (NT * 128) + q * 32));
                close_multiply();
                await_multiply<1>();
                if (half == 0 && before) release(before, lane);
            }
        }
        before = ring.empty();
    }
    await_multiply<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, FIT) __cluster_dims__(PARTS, 1, 1)
    rows(const __grid_constant__ Params p) {
    extern __shared__ u8 raw[];
    u32 start = (address(raw) + 1023) & ~1023u, barriers = start + RING_BYTES, scales = barriers + 128;
    Ring ring{start, barriers};
    bool worker = threadIdx.x < WORKERS, asks = threadIdx.x == WORKERS;
    admit_next();
    Part part(p);
    int count = BITS == 16 ? 0 : ((part.end * 4 - 1) / RUN) - part.first_group() + 1;
    if (asks) {
        begin_barriers(barriers);
        ask_early(p, part, ring);
    }
    if (BITS != 16 && worker) load_scales(scales, p, part, count);
    meet_warp();
    meet_block();  // barriers and scales are there
    await_inputs();
    if (asks) ask(p, part, ring);
    meet_warp();
    float acc[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; i++) acc[i] = 0;
    if (worker) {
        work(acc, part, ring, scales, count);
        meet_workers();  // the sums take the ring's place
        int lane = threadIdx.x % 32;
        leave_sums(start, acc, threadIdx.x / 32 * 16 + lane / 4, lane % 4);
    }
    Finish<Params, Part> finish(p, part);
    if (PARTS > 1)
        meet_cluster();
    else
        meet_block();
    if (worker) finish.store(start);
    if (PARTS > 1) meet_cluster();  // nobody leaves while others still need its memory
}
