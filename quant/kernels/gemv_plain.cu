// Plain weights: products of 16-bit numbers, summed in float32 (mma.m16n8k16). Column 2r of B is row r of x in the first
// chunk, column 2r+1 in the second, so the lane (g, t) finds in c0 and c3 what row g of W gives with row t of x.

constexpr int PAIRS = CHUNK / 8;  // of x in a lane

struct Scales {
    static __device__ __forceinline__ int shared_bytes(const Params &, const Block &) { return 0; }
    __device__ __forceinline__ void request_rows(u8 *, const Params &, const Block &) {}
};

struct Inputs {
    u32 x[NB][PAIRS], loaded[NB][PAIRS], weight[PAIRS];
    float squares[NB], factor[NB];
    int row, chunk;  // of x, that are the lane's

    static __device__ __forceinline__ int shared_bytes() { return 0; }  // a warp

    __device__ __forceinline__ Inputs(const Params &p, const Place &place, u8 *) {
        row = place.lane / 8, chunk = place.g % 2 * CHUNK;
#pragma unroll
        for (int b = 0; b < NB; b++) squares[b] = 0;
        load_weight(p, place, place.column_warp);
    }

    static __device__ __forceinline__ void load(u32 (&to)[PAIRS], const u16 *from, int column, int t, int K) {
#pragma unroll
        for (int q = 0; q < PAIRS / 4; q++) {
            const int k = column + 32 * q + 8 * t;
            const uint4 v = k < K ? __ldcg((const uint4 *)(from + k)) : make_uint4(0, 0, 0, 0);
            to[4 * q] = v.x, to[4 * q + 1] = v.y, to[4 * q + 2] = v.z, to[4 * q + 3] = v.w;
        }
    }

    __device__ __forceinline__ void load_weight(const Params &p, const Place &place, int step) {
        if (p.norm) load(weight, p.norm, step * STEP + chunk, place.t, p.K);
    }

    __device__ __forceinline__ void load_x(const Params &p, const Place &place, int step) {
#pragma unroll
        for (int b = 0; b < NB; b++)
            load(loaded[b], p.x + (long long)min(row + 4 * b, p.T - 1) * p.K, step * STEP + chunk, place.t, p.K);
    }

    // In float16 x times the norm's weight alone may leave the range: there 1 / rms comes first, and the warps wait.
    __device__ __forceinline__ void begin(const Params &p, const Place &place, int steps, float *partial) {
        if constexpr (HALF) {
            if (!p.norm) return;
            for (int s = place.column_warp; s < steps; s += p.column_warps) {
                load_x(p, place, s);
                add_squares(place.g);
            }
            if (place.row_warp == 0) leave_squares(partial, place);
            __syncthreads();
#pragma unroll
            for (int b = 0; b < NB; b++) factor[b] = inverse_rms(partial, row + 4 * b, p.column_warps, p);
            load_x(p, place, place.column_warp);
        }
    }

    __device__ __forceinline__ void prepare(const Params &p, const Place &place, int) {
        if (p.norm && !HALF) add_squares(place.g);
#pragma unroll
        for (int b = 0; b < NB; b++)
#pragma unroll
            for (int i = 0; i < PAIRS; i++)
                x[b][i] = p.norm ? weighed(loaded[b][i], weight[i], factor[b]) : loaded[b][i];
    }

    static __device__ __forceinline__ u32 weighed(u32 x, u32 weight, float factor) {
        if constexpr (!HALF) return product_pair(x, weight);
        return pack_pair(plain((u16)x) * factor * plain((u16)weight),
                         plain((u16)(x >> 16)) * factor * plain((u16)(weight >> 16)));
    }

    // Products of x with itself, of which only the diagonal matters: it lies in the lanes with t = g / 2.
    __device__ __forceinline__ void add_squares(int g) {
#pragma unroll
        for (int b = 0; b < NB; b++) {
            float c[2][4] = {};
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2)
                mma(c[i / 2 % 2], loaded[b][i], 0, loaded[b][i + 1], 0, loaded[b][i], loaded[b][i + 1]);
            squares[b] += g % 2 ? c[0][1] + c[1][1] : c[0][0] + c[1][0];
        }
    }

    // partial: [column_warps][NB][8], a row of x in two neighbours.
    __device__ __forceinline__ void leave_squares(float *partial, const Place &place) {
#pragma unroll
        for (int b = 0; b < NB; b++)
            if (place.t == place.g / 2) partial[(place.warp * NB + b) * 8 + place.g] = squares[b];
    }

    static __device__ __forceinline__ float inverse_rms(const float *partial, int row, int warps, const Params &p) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < MOST_WARPS; w++) {
            if (w >= warps) break;
            const float2 v = *(const float2 *)(partial + (w * NB + row / 4) * 8 + row % 4 * 2);
            all += v.x + v.y;
        }
        return rsqrtf(__fdividef(all, (float)p.K) + p.eps);
    }

    static constexpr bool FACTOR_ON_SUMS = !HALF;
    static __device__ __forceinline__ float sum_of(const float *tile, int r, int row) {
        return tile[row / 4 * 32 + r * 4 + row % 4];
    }

    __device__ __forceinline__ void tile(float (&total)[NB], const u8 *from, const Place &place, const Scales &, int,
                                         int) const {
        float even[NB][4] = {}, odd[NB][4] = {};
        from += place.lane * 16;
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
};
