// Packed weights: products of 8-bit integers, summed exactly (mma.m16n8k32 of unsigned codes and signed x), for which x
// becomes 16-bit fixed point with one scale a row and chunk: 256 * high + low, both signed bytes. What that rounds is
// 2^-16 of the chunk's largest, less than the 2^-9 (2^-12) of its own that bfloat16 (float16) has rounded it by. The
// scale of a chunk with an infinity or NaN is that, and with it all that the row gives.
//
// Columns 2j and 2j+1 of B are the high and the low bytes of row j / 2 of x in chunk j % 2, so that a lane (g, t) finds
// in c0 and c1 (t even) or c2 and c3 (t odd) what row g of W gives with row t / 2 of x in chunk t % 2.

constexpr bool NARROW = RUN < 4;
constexpr float LARGEST = 32000.f;
constexpr float INTEGER = 12582912.f;  // 1.5 * 2^23: the bits of this plus an integer of 22 bits are sums of the bits
enum { INTEGER_BITS = 0x4b400000, MIDDLE = BITS == 4 ? 8 : 128, WORDS = CHUNK / 16, CHUNK_LANES = CHUNK / 8 };
enum { STEP_LANES = 2 * CHUNK_LANES, PASS_ROWS = 32 / STEP_LANES, PASSES = 2 * NB / PASS_ROWS };
enum { TILE_BYTES = 1024, SUMS = 4 / RUN, SCALE_SIZE = SCALE == 2 ? 4 : 2, OTHER_SIZE = KIND == 1 ? 1 : 4 };

__device__ __forceinline__ float as_number(int sum) { return __uint_as_float(sum) - INTEGER; }

struct Place {  // of a thread
    int warp, lane, g, t, column_warp, row_warp;
    __device__ __forceinline__ Place(const Params &p, int thread) {
        warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
        row_warp = warp / p.column_warps, column_warp = warp - row_warp * p.column_warps;
    }
};

// Values of `size` bytes, one a row and group, of which the block's rows lie in shared memory as they do in memory: what
// is before the first and after the last in a piece of 16 bytes comes along.
struct Table {
    const u8 *first;
    int second;  // bytes from a row to the one of the other tile
    static __device__ __forceinline__ int half_bytes(const Params &p, const Block &block, int size) {
        return (block.tiles * block.tile_rows * p.groups * size + 15) / 16 * 16 + 16;
    }
    __device__ __forceinline__ void request_rows(u8 *to, const u8 *from, int size, const Params &p, const Block &block) {
        const int room = half_bytes(p, block, size);
        second = 8 * p.groups * size;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h == 1 && !p.gate) break;
            const long long begin = (long long)(block.first + h * (p.N / 2)) * p.groups * size, aligned = begin & ~15LL;
            const long long end = begin + block.count * p.groups * size, all = (long long)p.N * p.groups * size;
            const u8 *start = to + h * room + (int)(begin - aligned);
            if (h == 0) first = start;
            if (h == 1) second = (int)(start - first);
            for (long long i = aligned + threadIdx.x * 16; i < end; i += blockDim.x * 16)
                request(address(to) + h * room + (int)(i - aligned), from + i, (int)min(16LL, all - i));
        }
    }
};

struct Scales {
    Table scale, other;  // zero points or shifts
    static __device__ __forceinline__ int bytes(const Params &p, const Block &block, int size) {
        return (p.gate ? 2 : 1) * Table::half_bytes(p, block, size);
    }
    static __device__ __forceinline__ int shared_bytes(const Params &p, const Block &block) {
        return bytes(p, block, SCALE_SIZE) + (KIND == 0 ? 0 : bytes(p, block, OTHER_SIZE));
    }
    __device__ __forceinline__ void request_rows(u8 *to, const Params &p, const Block &block) {
        scale.request_rows(to, p.scale, SCALE_SIZE, p, block);
        if (KIND != 0)
            other.request_rows(to + bytes(p, block, SCALE_SIZE), KIND == 1 ? p.zero : p.shift, OTHER_SIZE, p, block);
    }
    __device__ __forceinline__ float scale_at(int tile, int index) const {
        const u8 *from = scale.first + tile * scale.second;
        if (SCALE == 0) return half_to_float(((const u16 *)from)[index]);
        if (SCALE == 1) return __uint_as_float((u32)((const u16 *)from)[index] << 16);
        return ((const float *)from)[index];
    }
    __device__ __forceinline__ float other_at(int tile, int index) const {
        const u8 *from = other.first + tile * other.second;
        return KIND == 1 ? (float)from[index] : ((const float *)from)[index];
    }
};

struct Inputs {
    u32 x[NB][WORDS];
    float scale[NB], squares[PASSES], sum[NB][SUMS];  // scale of the lane's chunk; sums of x as integers, for KIND 1 and 2
    int start[NB][SUMS][2], group[SUMS];              // what sums begin with; groups of the runs of the lane's chunk
    uint4 weight, loaded[PASSES];
    u8 *bytes;  // [2 NB rows][2 chunks][high, low][CHUNK], and after them the scales [2 NB][2]

    static __device__ __forceinline__ int shared_bytes() { return 2 * NB * (4 * CHUNK + 8); }  // a warp

    __device__ __forceinline__ Inputs(const Params &p, const Place &place, u8 *shared) {
        bytes = shared + place.warp * shared_bytes();
#pragma unroll
        for (int i = 0; i < PASSES; i++) squares[i] = 0;
        load_weight(p, place, place.column_warp);
    }

    static __device__ __forceinline__ uint4 load(const u16 *from, int k, int K) {
        return k < K ? __ldcg((const uint4 *)(from + k)) : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load_weight(const Params &p, const Place &place, int step) {
        if (p.norm) weight = load(p.norm, step * STEP + place.lane % STEP_LANES * 8, p.K);
    }
    __device__ __forceinline__ void load_x(const Params &p, const Place &place, int step) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            if (i * PASS_ROWS >= p.T) break;
            const int row = min(i * PASS_ROWS + place.lane / STEP_LANES, p.T - 1);
            loaded[i] = load(p.x + (long long)row * p.K, step * STEP + place.lane % STEP_LANES * 8, p.K);
        }
    }

    // What was loaded as fixed point, in the order of the codes, and what the sums of all rows of W have in common.
    __device__ __forceinline__ void prepare(const Params &p, const Place &place, int step) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PASSES; i++)
            if (i * PASS_ROWS < p.T) round(p, i, place.lane);
        __syncwarp();
        const int kind = place.g % 2, chunk = place.g / 2 % 2;
#pragma unroll
        for (int b = 0; b < NB; b++) {
            const u8 *from = bytes + ((2 * b + place.g / 4) * 2 + chunk) * 2 * CHUNK + kind * CHUNK + place.t * WORDS * 4;
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 v = *(const uint4 *)(from + (WORDS == 8 ? (i ^ kind) * 16 : 0));
                x[b][4 * i] = v.x, x[b][4 * i + 1] = v.y, x[b][4 * i + 2] = v.z, x[b][4 * i + 3] = v.w;
            }
            scale[b] = scales()[(2 * b + place.t / 2) * 2 + place.t % 2];
        }
#pragma unroll
        for (int r = 0; r < SUMS; r++) {
            const int column = step * STEP + place.t % 2 * CHUNK + r * (CHUNK / SUMS);
            group[r] = min((int)__umulhi(column, p.group_inverse), p.groups - 1);
#pragma unroll
            for (int b = 0; b < NB; b++) {
                int c[2][4] = {};
#pragma unroll
                for (int i = r * (WORDS / SUMS); i < (r + 1) * (WORDS / SUMS); i += 2)
                    mma(c[i / 2 % 2], 0x01010101, 0x01010101, 0x01010101, 0x01010101, x[b][i], x[b][i + 1]);
                const int high = c[0][0] + c[1][0], low = c[0][1] + c[1][1];
                if (KIND != 0) sum[b][r] = (float)(256 * high + low);
                start[b][r][0] = INTEGER_BITS - (KIND == 0 ? MIDDLE * high : 0);
                start[b][r][1] = INTEGER_BITS - (KIND == 0 ? MIDDLE * low : 0);
            }
        }
    }
    __device__ __forceinline__ float *scales() const { return (float *)(bytes + 2 * NB * 4 * CHUNK); }

    // Eight columns of a row.
    __device__ __forceinline__ void round(const Params &p, int pass, int lane) {
        const int row = pass * PASS_ROWS + lane / STEP_LANES, piece = lane % STEP_LANES, chunk = piece / CHUNK_LANES;
        const u32 pairs[4] = {loaded[pass].x, loaded[pass].y, loaded[pass].z, loaded[pass].w};
        const u32 weights[4] = {weight.x, weight.y, weight.z, weight.w};
        float v[8], largest = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            v[i] = plain((u16)(pairs[i / 2] >> i % 2 * 16));
            if (p.norm) {
                squares[pass] = fmaf(v[i], v[i], squares[pass]);
                v[i] *= plain((u16)(weights[i / 2] >> i % 2 * 16));
            }
            largest = larger(largest, fabsf(v[i]));
        }
#pragma unroll
        for (int lanes = 1; lanes < CHUNK_LANES; lanes *= 2) largest = larger(largest, from_lane(largest, lanes));
        const float inverse = largest > 0 ? __fdividef(LARGEST, largest) : 0;
        u32 fixed[8];  // 128 more than x, so that the upper byte is the nearest
#pragma unroll
        for (int i = 0; i < 8; i++) fixed[i] = __float_as_uint(fmaf(v[i], inverse, INTEGER + 128.f));
        u8 *to = bytes + (row * 2 + chunk) * 2 * CHUNK;
        if constexpr (BITS == 4) {
            u32 low[2], high[2];
            split(low[0], high[0], fixed[0], fixed[4], fixed[1], fixed[5]);
            split(low[1], high[1], fixed[2], fixed[6], fixed[3], fixed[7]);
            const int at = piece % CHUNK_LANES, place = (NARROW ? at % 4 * 4 + at / 4 : at) * 8;
            *(uint2 *)(to + place) = make_uint2(high[0], high[1]);
            *(uint2 *)(to + CHUNK + (place ^ 16)) = make_uint2(low[0], low[1]);
        } else {
            const int at = piece % CHUNK_LANES, place = NARROW ? at % 2 * 32 + at / 2 * 4 : at * 8;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 low, high;
                split(low, high, fixed[4 * i], fixed[4 * i + 2], fixed[4 * i + 1], fixed[4 * i + 3]);
                *(u32 *)(to + place + i * (NARROW ? 16 : 4)) = high;
                *(u32 *)(to + CHUNK + place + i * (NARROW ? 16 : 4)) = low;
            }
        }
        if (piece % CHUNK_LANES == 0) scales()[row * 2 + chunk] = largest * (1 / LARGEST);
    }
    // The lower two bytes of four numbers, each as four bytes of a word.
    static __device__ __forceinline__ void split(u32 &low, u32 &high, u32 a, u32 b, u32 c, u32 d) {
        const u32 first = __byte_perm(a, b, 0x5140), second = __byte_perm(c, d, 0x5140);
        low = __byte_perm(first, second, 0x5410) ^ 0x80808080, high = __byte_perm(first, second, 0x7632);
    }

    // partial: [column_warps][2 NB].
    __device__ __forceinline__ void leave_squares(float *partial, const Place &place) {
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            float all = squares[i];
#pragma unroll
            for (int lanes = 1; lanes < STEP_LANES; lanes *= 2) all += from_lane(all, lanes);
            if (place.lane % STEP_LANES == 0)
                partial[place.warp * 2 * NB + i * PASS_ROWS + place.lane / STEP_LANES] = all;
        }
    }
    static __device__ __forceinline__ float inverse_rms(const float *partial, int row, int warps, const Params &p) {
        float all = 0;
#pragma unroll
        for (int w = 0; w < MOST_WARPS; w++)
            if (w < warps) all += partial[w * 2 * NB + row];
        return rsqrtf(__fdividef(all, (float)p.K) + p.eps);
    }
    static __device__ __forceinline__ float sum_of(const float *tile, int r, int row) {
        const float2 v = *(const float2 *)(tile + row / 2 * 32 + r * 4 + row % 2 * 2);
        return v.x + v.y;
    }

    __device__ __forceinline__ void tile(float (&total)[NB], const u8 *from, const Place &place, const Scales &scales,
                                         int tile, int scale_row) const {
        u32 words[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if constexpr (NARROW) {
#pragma unroll
                for (int q = 0; q < 4; q++)
                    words[h][q] = *(const u32 *)(from + h * 512 + (q * 8 + (place.g ^ (2 * q))) * 16 + place.t * 4);
            } else {
                const uint4 v = *(const uint4 *)(from + h * 512 + place.lane * 16);
                words[h][0] = v.x, words[h][1] = v.y, words[h][2] = v.z, words[h][3] = v.w;
            }
        }
#pragma unroll
        for (int b = 0; b < NB; b++) total[b] = 0;
#pragma unroll
        for (int r = 0; r < SUMS; r++) {
            const float weight_scale = scales.scale_at(tile, scale_row + group[r]);
            const float other = KIND == 0 ? 0 : scales.other_at(tile, scale_row + group[r]);
#pragma unroll
            for (int b = 0; b < NB; b++) {
                int c[4] = {start[b][r][0], start[b][r][1], start[b][r][0], start[b][r][1]};
#pragma unroll
                for (int q = r * RUN; q < (r + 1) * RUN; q += BITS == 4 ? 1 : 2) {
                    const u32 a = words[0][q], a_next = words[0][BITS == 4 ? q : q + 1];
                    const u32 b_ = words[1][q], b_next = words[1][BITS == 4 ? q : q + 1];
                    constexpr u32 LOW = 0x0f0f0f0f;
                    if constexpr (BITS == 4)
                        mma(c, a & LOW, b_ & LOW, (a_next >> 4) & LOW, (b_next >> 4) & LOW, x[b][2 * q], x[b][2 * q + 1]);
                    else
                        mma(c, a, b_, a_next, b_next, x[b][q], x[b][q + 1]);
                }
                const int high = place.t % 2 ? c[2] : c[0], low = place.t % 2 ? c[3] : c[1];
                float y = fmaf(256.f, as_number(high), as_number(low));
                if (KIND == 1) y = fmaf(-other, sum[b][r], y);
                if (KIND == 2) y = fmaf(weight_scale, y, other * sum[b][r]);
                total[b] = fmaf(KIND == 2 ? scale[b] : weight_scale * scale[b], y, total[b]);
            }
        }
    }
};
