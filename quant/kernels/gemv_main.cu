// The kernel for packed weights.

// The outputs: sums over the warps, what was on the way to them, and what they are added to. `base` is what this thread's
// first output is added to.
__device__ __forceinline__ void write_outputs(const Params &p, const Block &block, const float *sums,
                                              const float *partial, int warps, float base) {
    const int outputs = p.gate ? p.N / 2 : p.N, stride = block.tiles * 2 * NB * 32;
    for (int i = threadIdx.x; i < block.count * p.T; i += blockDim.x) {
        const int row = i / block.count, r = i - row * block.count;
        const float *from = sums + (p.gate ? r / 8 * 2 : r / 8) * NB * 32;
        float y = 0, up = 0;
#pragma unroll
        for (int w = 0; w < MOST_WARPS; w++)
            if (w < warps) y += Inputs::sum_of(from + w * stride, r % 8, row);
        const float factor = p.norm ? Inputs::inverse_rms(partial, row, warps, p) : 1.f;
        y *= factor;
        if (p.gate) {
#pragma unroll
            for (int w = 0; w < MOST_WARPS; w++)
                if (w < warps) up += Inputs::sum_of(from + w * stride + NB * 32, r % 8, row);
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

// Asks for W, item by item: the warp's tiles of a step, then of its next step.
struct Asking {
    const u8 *column, *from;  // the lane's first piece in the step's first tile, and in the next tile
    long long second;         // bytes to the item's second tile
    int inside, row, left, tiles_left, my_tiles, second_rows, row_stride, row_bytes, first_row, step_bytes;
    u32 to, start, end;

    __device__ __forceinline__ Asking(const Params &p, const Block &block, const Place &place, int my_steps, u32 ring,
                                      u32 ring_bytes) {
        row_bytes = p.K * BITS / 8, second_rows = p.gate ? 0 : 8;
        second = (long long)(p.gate ? p.N / 2 : 8) * row_bytes;
        my_tiles = (block.tiles - place.row_warp + p.row_warps - 1) / p.row_warps;
        left = my_steps * my_tiles, tiles_left = my_tiles;
        first_row = place.row_warp * block.tile_rows + place.g, row = first_row;
        row_stride = block.tile_rows * p.row_warps;
        const int at = place.column_warp * STEP_BYTES + place.t * 16;
        inside = row_bytes - at, step_bytes = p.column_warps * STEP_BYTES;
        column = p.weight + (long long)(block.first + first_row) * row_bytes + at, from = column;
        // A lane's pieces go to itself, or, where lanes read each other's words, so that neither side has conflicts.
        start = ring + (NARROW ? (place.t * 8 + (place.g ^ (2 * place.t))) * 16 : place.lane * 16);
        end = start + ring_bytes, to = start;
    }

    __device__ __forceinline__ void next(int count) {
        if (left > 0) {
            const bool first_live = row < count, second_live = row + second_rows < count;
#pragma unroll
            for (int u = 0; u < 2; u++) {
                request(to + u * 512, from + u * 64, first_live && u * 64 < inside ? 16 : 0);
                request(to + TILE_BYTES + u * 512, from + second + u * 64, second_live && u * 64 < inside ? 16 : 0);
            }
            to += 2 * TILE_BYTES;
            if (to == end) to = start;
            row += row_stride, from += row_stride * row_bytes;
            if (--tiles_left == 0)
                tiles_left = my_tiles, row = first_row, column += step_bytes, inside -= step_bytes, from = column;
            if (--left == 0) admit_next();  // its requests follow the block's own at once
        }
        close_requests();
    }
};

extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, RESIDENT) gemv(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 shared[];
    const Place place(p, threadIdx.x);
    const Block block(p, blockIdx.x);
    const int steps = (p.K + STEP - 1) / STEP, used_warps = min(p.column_warps, steps), warps = blockDim.x / 32;
    const int my_steps = (steps - place.column_warp + p.column_warps - 1) / p.column_warps;

    const int ring_bytes = p.stages * 2 * TILE_BYTES, ring = place.warp * ring_bytes;
    u8 *const prepared = shared + warps * ring_bytes, *const tables = prepared + warps * Inputs::shared_bytes();
    float *const sums = (float *)(tables + Scales::shared_bytes(p, block));  // [column_warps][tiles][2][NB][32]
    float *const partial = sums + p.column_warps * block.tiles * 2 * NB * 32;

    Scales scales;
    scales.request_rows(tables, p, block);
    close_requests();
    Asking asking(p, block, place, my_steps, address(shared) + ring, ring_bytes);
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) asking.next(block.count);
    Inputs inputs(p, place, prepared);
    await_requests<DEPTH>();  // the scales
    __syncthreads();
    await_inputs();

    inputs.load_x(p, place, place.column_warp);
    // What the thread's output is added to, asked for now: memory is far.
    float base = 0;
    if (p.onto && threadIdx.x < block.count * p.T) {
        const int row = threadIdx.x / block.count, outputs = p.gate ? p.N / 2 : p.N;
        base = plain(__ldcg(p.onto + (long long)row * outputs + block.first + threadIdx.x - row * block.count));
    }
    int at = ring;
#pragma unroll 1
    for (int s = place.column_warp; s < steps; s += p.column_warps) {
        inputs.prepare(p, place, s);
        float *to = sums + (place.column_warp * block.tiles + place.row_warp) * 2 * NB * 32 + place.lane;
        int row = place.row_warp * block.tile_rows;
        // Both tiles of an item at once, whose chains of products are independent, or the first alone.
        auto consume = [&](auto tiles) {
            await_requests<DEPTH - 1>();
            if (NARROW) __syncwarp();
            float total[tiles.value][NB];
#pragma unroll
            for (int i = 0; i < tiles.value; i++)
                inputs.tile(total[i], shared + at + i * TILE_BYTES, place, scales, i, (row + place.g) * p.groups);
#pragma unroll
            for (int i = 0; i < tiles.value; i++)
#pragma unroll
                for (int b = 0; b < NB; b++) {
                    float &sum = to[(i * NB + b) * 32];
                    sum = s == place.column_warp ? total[i][b] : sum + total[i][b];
                }
            if (NARROW) __syncwarp();
            asking.next(block.count);
            at += 2 * TILE_BYTES;
            if (at == ring + ring_bytes) at = ring;
        };
        const int later = s + p.column_warps;
        auto load_later = [&] {
            if (later >= steps) return;
            inputs.load_x(p, place, later);
            inputs.load_weight(p, place, later);
        };
        if (NB == 1) load_later();
#pragma unroll 1
        for (int tile = place.row_warp; tile < block.tiles; tile += p.row_warps) {
            if (row + asking.second_rows < block.count)
                consume(Count<2>{});
            else
                consume(Count<1>{});
            row += asking.row_stride, to += 2 * NB * 32 * p.row_warps;
        }
        if (NB > 1) load_later();
    }
    if (p.norm && place.row_warp == 0) inputs.leave_squares(partial, place);
    __syncthreads();
    write_outputs(p, block, sums, partial, used_warps, base);
}
