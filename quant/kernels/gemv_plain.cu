// Plain weights: products of 16-bit numbers, summed in float32 (mma.m16n8k16). Column 2r of B is row r of x in the first
// chunk, column 2r+1 in the second, so the lane (g, t) finds in c0 and c3 what row g of W gives with row t of x. In
// float16 the norm's 1 / rms comes before the products, and the warps wait for each other.

enum { PAIRS = CHUNK / 8, TILE_BYTES = 2048 };  // pairs of x in a lane

// The lane's part of x in one step, in the order in which its words hold the columns.
template <int BLOCKS>
__device__ __forceinline__ void load_x(u32 (&x)[BLOCKS][PAIRS], const u16 *from, int K, int column, int t, int row, int T) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        const u16 *base = from + (long long)min(row + 4 * b, T - 1) * K;
#pragma unroll
        for (int q = 0; q < PAIRS / 4; q++) {
            int k = column + 32 * q + 8 * t;
            uint4 v = k < K ? __ldcg((const uint4 *)(base + k)) : make_uint4(0, 0, 0, 0);
            x[b][4 * q] = v.x, x[b][4 * q + 1] = v.y, x[b][4 * q + 2] = v.z, x[b][4 * q + 3] = v.w;
        }
    }
}

// Adds the squares of the lane's columns, as products of x with itself, of which only the diagonal matters: it lies in
// the lanes with t = g / 2.
__device__ __forceinline__ void add_squares(float (&sum)[NB], const u32 (&x)[NB][PAIRS], int g) {
#pragma unroll
    for (int b = 0; b < NB; b++) {
        float c[2][4] = {};
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2) mma(c[i / 2 % 2], x[b][i], 0, x[b][i + 1], 0, x[b][i], x[b][i + 1]);
        sum[b] += g % 2 ? c[0][1] + c[1][1] : c[0][0] + c[1][0];
    }
}

// partial: [column_warps][NB][8], a row of x in two neighbours.
__device__ __forceinline__ void leave_squares(float *partial, const float (&sum)[NB], int warp, int g, int t) {
#pragma unroll
    for (int b = 0; b < NB; b++)
        if (t == g / 2) partial[(warp * NB + b) * 8 + g] = sum[b];
}

__device__ __forceinline__ float inverse_rms(const float *partial, int row, int warps, const Params &p) {
    float all = 0;
#pragma unroll 4
    for (int w = 0; w < warps; w++) {
        const float2 v = *(const float2 *)(partial + (w * NB + row / 4) * 8 + row % 4 * 2);
        all += v.x + v.y;
    }
    return rsqrtf(__fdividef(all, (float)p.K) + p.eps);
}

__device__ __forceinline__ void weigh(u32 (&x)[PAIRS], const u32 (&weight)[PAIRS], float factor) {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        if constexpr (HALF)  // x * weight alone may leave float16's range
            x[i] = pack_pair(plain((u16)x[i]) * factor * plain((u16)weight[i]),
                             plain((u16)(x[i] >> 16)) * factor * plain((u16)(weight[i] >> 16)));
        else
            x[i] = product_pair(x[i], weight[i]);
    }
}

__device__ __forceinline__ void plain_tile(float (&total)[NB], const u8 *from, const u32 (&x)[NB][PAIRS]) {
    float even[NB][4] = {}, odd[NB][4] = {};
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const uint4 first = *(const uint4 *)(from + u * 512), second = *(const uint4 *)(from + (u + 2) * 512);
#pragma unroll
        for (int b = 0; b < NB; b++) {
            mma(even[b], first.x, second.x, first.y, second.y, x[b][4 * u], x[b][4 * u + 1]);
            mma(odd[b], first.z, second.z, first.w, second.w, x[b][4 * u + 2], x[b][4 * u + 3]);
        }
    }
#pragma unroll
    for (int b = 0; b < NB; b++) total[b] = (even[b][0] + odd[b][0]) + (even[b][3] + odd[b][3]);
}

// The outputs: sums over the warps, what was on the way to them, and what they are added to. `base` is what this thread's
// first output is added to.
__device__ __forceinline__ void write_outputs(const Params &p, const Block &block, const float *sums,
                                              const float *partial, int warps, float base) {
    const int outputs = p.gate ? p.N / 2 : p.N, stride = block.tiles * 2 * NB * 32;
    for (int i = threadIdx.x; i < block.count * p.T; i += blockDim.x) {
        const int r = i % block.count, row = i / block.count;
        const int tile = p.gate ? r / 8 * 2 : r / 8;
        const float *from = sums + (tile * NB + row / 4) * 32 + r % 8 * 4 + row % 4;
        float y = 0, up = 0;
#pragma unroll 4
        for (int w = 0; w < warps; w++) y += from[w * stride];
        const float factor = p.norm && !HALF ? inverse_rms(partial, row, warps, p) : 1.f;
        y *= factor;
        if (p.gate) {
#pragma unroll 4
            for (int w = 0; w < warps; w++) up += from[w * stride + NB * 32];
            y = activated(y, up * factor, p);
        }
        const long long to = (long long)row * outputs + block.first + r;
        if (p.onto && i != threadIdx.x) base = plain(__ldcg(p.onto + to));
        y = fmaf(p.alpha, y, base);
        if (p.wide)
            ((float *)p.out)[to] = y;
        else
            ((u16 *)p.out)[to] = (u16)pack_pair(y, 0.f);
    }
}

extern "C" __global__ void __launch_bounds__(384, RESIDENT) gemv(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp / p.column_warps, column_warp = warp - row_warp * p.column_warps;
    const Block block(p, blockIdx.x);
    const int row_bytes = p.K * BITS / 8, steps = (p.K + STEP - 1) / STEP, used_warps = min(p.column_warps, steps);
    const int my_steps = (steps - column_warp + p.column_warps - 1) / p.column_warps;
    const int my_tiles = (block.tiles - row_warp + p.row_warps - 1) / p.row_warps;

    const u32 ring_bytes = p.stages * 2 * TILE_BYTES;
    float *const sums = (float *)(shared + blockDim.x / 32 * ring_bytes);  // [column_warps][tiles][2][NB][32]
    float *const partial = sums + p.column_warps * block.tiles * 2 * NB * 32;

    close_requests();  // an empty group, where packed weights ask for scales: as measured
    const u32 slot = lane * 16;
    const u32 ring = address(shared) + warp * ring_bytes + slot;
    const int second_rows = p.gate ? 0 : 8, tile_stride = block.tile_rows * p.row_warps;
    const long long second = (long long)(p.gate ? p.N / 2 : 8) * row_bytes;
    const u8 *ask_column = p.weight + (long long)(block.first + row_warp * block.tile_rows + g) * row_bytes +
                           column_warp * STEP_BYTES + t * 16;
    const u8 *ask_from = ask_column;
    int ask_inside = row_bytes - column_warp * STEP_BYTES - t * 16, ask_row = row_warp * block.tile_rows + g;
    int to_ask = my_steps * my_tiles, ask_tiles = my_tiles;
    u32 ask_to = ring;
    auto ask = [&] {
        if (to_ask > 0) {
            const bool first_live = ask_row < block.count, second_live = ask_row + second_rows < block.count;
#pragma unroll
            for (int u = 0; u < 4; u++) {
                request(ask_to + u * 512, ask_from + u * 64, first_live && u * 64 < ask_inside ? 16 : 0);
                request(ask_to + TILE_BYTES + u * 512, ask_from + second + u * 64,
                        second_live && u * 64 < ask_inside ? 16 : 0);
            }
            ask_to += 2 * TILE_BYTES;
            if (ask_to == ring + ring_bytes) ask_to = ring;
            ask_row += tile_stride, ask_from += tile_stride * row_bytes;
            if (--ask_tiles == 0) {
                ask_tiles = my_tiles, ask_row = row_warp * block.tile_rows + g;
                ask_column += p.column_warps * STEP_BYTES, ask_inside -= p.column_warps * STEP_BYTES;
                ask_from = ask_column;
            }
            if (--to_ask == 0) admit_next();  // its requests follow the block's own at once
        }
        close_requests();
    };
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) ask();

    const int x_row = lane / 8, x_chunk = (lane / 4) % 2 * CHUNK;
    u32 x[NB][PAIRS], weight[1][PAIRS];
    float squares[NB] = {}, factor[NB] = {};
    if (p.norm) load_x(weight, p.norm, p.K, column_warp * STEP + x_chunk, t, 0, 1);
    await_inputs();

    load_x(x, p.x, p.K, column_warp * STEP + x_chunk, t, x_row, p.T);
    // What the thread's output is added to, asked for now: memory is far.
    float base = 0;
    if (p.onto && threadIdx.x < block.count * p.T) {
        const int row = threadIdx.x / block.count, outputs = p.gate ? p.N / 2 : p.N;
        base = plain(__ldcg(p.onto + (long long)row * outputs + block.first + threadIdx.x - row * block.count));
    }
    if (HALF && p.norm) {
#pragma unroll 1
        for (int s = column_warp + (my_steps - 1) * p.column_warps; s >= 0; s -= p.column_warps) {
            if (my_steps > 1) load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
            add_squares(squares, x, g);
        }
        if (row_warp == 0) leave_squares(partial, squares, warp, g, t);
        __syncthreads();
#pragma unroll
        for (int b = 0; b < NB; b++) factor[b] = inverse_rms(partial, x_row + 4 * b, p.column_warps, p);
    }

    const int ring_start = warp * ring_bytes;
    int at = ring_start;
#pragma unroll 1
    for (int s = column_warp; s < steps; s += p.column_warps) {
        if (s != column_warp) {
            load_x(x, p.x, p.K, s * STEP + x_chunk, t, x_row, p.T);
            if (p.norm) load_x(weight, p.norm, p.K, s * STEP + x_chunk, t, 0, 1);
        }
        if (p.norm) {
            if (!HALF) add_squares(squares, x, g);
#pragma unroll
            for (int b = 0; b < NB; b++) weigh(x[b], weight[0], factor[b]);
        }
        float *to = sums + (column_warp * block.tiles + row_warp) * 2 * NB * 32 + lane;
        int row = row_warp * block.tile_rows;
        // Both tiles of an item at once, whose chains of products are independent, or the first alone.
        auto consume = [&](auto tiles) {
            await_requests<DEPTH - 1>();
            float total[tiles.value][NB];
#pragma unroll
            for (int i = 0; i < tiles.value; i++) plain_tile(total[i], shared + at + i * TILE_BYTES + slot, x);
#pragma unroll
            for (int i = 0; i < tiles.value; i++)
#pragma unroll
                for (int b = 0; b < NB; b++) {
                    float &sum = to[(i * NB + b) * 32];
                    sum = s == column_warp ? total[i][b] : sum + total[i][b];
                }
            ask();
            at += 2 * TILE_BYTES;
            if (at == ring_start + (int)ring_bytes) at = ring_start;
        };
#pragma unroll 1
        for (int i = 0; i < my_tiles; i++) {
            if (row + second_rows < block.count)
                consume(Count<2>{});
            else
                consume(Count<1>{});
            row += tile_stride, to += 2 * NB * 32 * p.row_warps;
        }
    }
    if (p.norm && !HALF && row_warp == 0) leave_squares(partial, squares, warp, g, t);
    __syncthreads();
    write_outputs(p, block, sums, partial, used_warps, base);
}
