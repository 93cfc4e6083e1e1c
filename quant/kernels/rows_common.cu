// What the kernels in rows.cu and rows_bulk.cu have in common: a warp group's 64 rows of W on the left of wgmma, unpacked in
// registers where they are packed, and the sums' way out. Goes behind rows_ptx.cu and before either kernel's text.
//
// A stage is STAGE columns of a block's ROWS rows of W and NT rows of x. Lane (g, c) = (lane / 4, lane % 4) needs columns
// 2c, 2c+1, 2c+8, 2c+9 of every 16, of rows g and g+8: it loads whole words and shifts by its own amount to its pair, and
// columns stay in order.

enum { ROWS = 64 * WG, WORKERS = 128 * WG, STAGE = BITS == 16 ? 64 * CHUNKS : 128, HALVES = STAGE / 64 };
enum { ROW_BYTES = STAGE * BITS / 8, X_BYTES = NT * STAGE * 2, STAGE_BYTES = X_BYTES + ROWS * ROW_BYTES };
enum { OUTPUTS = GATE ? ROWS / 2 : ROWS, LINE = ROWS + 4, SUM_BYTES = NT * LINE * 4 };  // of a block
enum { RING_BYTES = DEPTH * STAGE_BYTES > SUM_BYTES ? DEPTH * STAGE_BYTES : SUM_BYTES };
constexpr float MIDDLE = BITS == 4 ? 8.f : 128.f;
// What a code is above its value when it is read as a number: 2^7 + c in bfloat16, 2^10 + c in float16. 8 bits do not
// fit bfloat16's mantissa: there the eighth is added apart, and nothing is above.
constexpr bool SPLIT = BITS == 8 && !HALF;
constexpr float ABOVE = HALF ? 1024.f : SPLIT ? 0.f : 128.f;

__device__ __forceinline__ float plain(u16 bits) { return HALF ? half_to_float(bits) : __uint_as_float((u32)bits << 16); }

// Scales as pairs [group][row], after them zeros with what codes are above, after them what shifts leave. Two threads share
// a row, and ask for AT_ONCE groups before they use the first: each is a way to memory and back.
template <class Params, class Part>
__device__ __forceinline__ void load_scales(u32 to, const Params &p, const Part &part, int count) {
    enum { AT_ONCE = 10 };
    int odd = threadIdx.x >= ROWS, row = threadIdx.x - odd * ROWS;
    long long first = (part.first_row + (part.inside(p, row) ? part.apart(p, row) : 0)) * p.groups;
#pragma unroll 1
    for (int begin = odd; begin < count; begin += 2 * AT_ONCE) {
        u32 scales[AT_ONCE], zeros[AT_ONCE], shifts[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            long long at = first + min(part.first_group() + min(begin + 2 * j, count - 1), p.groups - 1);
            scales[j] = SCALE == 2 ? fetch4((const u32 *)p.scale + at) : fetch2((const u16 *)p.scale + at);
            zeros[j] = KIND == 1 ? fetch1(p.zero + at) : 0;
            shifts[j] = KIND == 2 ? fetch4((const u32 *)p.shift + at) : 0;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int group = min(begin + 2 * j, count - 1);  // the last several times: a branch would draw each load behind it
            float s = SCALE == 0 ? half_to_float((u16)scales[j]) : __uint_as_float(scales[j] << (SCALE == 1 ? 16 : 0));
            float z = (float)zeros[j], h = __uint_as_float(shifts[j]);
            if (KIND == 2) {  // a whole zero, and the rest, which is small enough for 16 bits
                z = s == 0.f ? 0.f : fminf(fmaxf(floorf(0.5f - h / s), 0.f), 2 * MIDDLE - 1);
                h = fmaf(z, s, h);
                write1(to + ((2 * count + group) * ROWS + row) * 4, pack_pair(h, h));
            }
            if (KIND) write1(to + ((count + group) * ROWS + row) * 4, pack_pair(ABOVE + z, ABOVE + z));
            write1(to + (group * ROWS + row) * 4, pack_pair(s, s));
        }
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

// Words with 32 columns of the lane's rows, which become the left operands of two wgmma.
struct Words {
    u32 low[4], high[4];
    __device__ __forceinline__ void load(u32 row, int key, int piece, int c) {
        if constexpr (BITS == 4) {
            u32 at = row + ((piece ^ key) << 4);
            uint4 l = read4(at), h = read4(at + 8 * ROW_BYTES);
            low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
            high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 at = row + (((2 * piece + i / 2) ^ key) << 4) + (c >> 1) * 4 + i % 2 * 8;
                low[i] = read1(at), high[i] = read1(at + 8 * ROW_BYTES);
            }
        }
    }
    __device__ __forceinline__ void unpack(u32 (&a)[2][4], const Scale &scale, int c) const {
        int shift = BITS == 4 ? 4 * c : 8 * (c & 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i / 2][i % 2 * 2] = scale.weights(low[i], shift, 0);
            a[i / 2][i % 2 * 2 + 1] = scale.weights(high[i], shift, 1);
        }
    }
};

// Rows, `offset` bytes from what begins at `start` / 16, in wgmma's 128-byte pattern: eight of them are 1024 bytes, and
// `step` bytes after them come the next eight.
__device__ __forceinline__ u64 describe(u32 start, u32 offset, u32 step = 1024) {
    return (u64)(1u << 30 | step >> 4) << 32 | (start + (offset >> 4) | 1u << 16);
}

__device__ __forceinline__ float gated(float gate, float up, float threshold) {
    return (GATE == 1 ? gate / (1.f + __expf(-gate)) : gate >= threshold ? gate : 0.f) * up;
}

// Leaves the warp group's products where `Finish` finds them: a row of LINE sums for each row of x.
__device__ __forceinline__ void leave_sums(u32 sums, float (&acc)[NT / 2], int row, int c) {
#pragma unroll
    for (int i = 0; i < NT / 2; i++) settle(acc[i]);
#pragma unroll
    for (int i = 0; i < NT / 2; i++) {
        int t = i / 4 * 8 + 2 * c + i % 2, n = row + i / 2 % 2 * 8;
        write1(sums + (t * LINE + n) * 4, __float_as_uint(acc[i]));
    }
}

// Every PARTS-th row of x with what is around the product; the sums of all parts always in the same order. What they are
// added to is asked for before the parts meet.
template <class Params, class Part> struct Finish {
    enum { ITEMS = (NT + PARTS - 1) / PARTS * (OUTPUTS / 4), COUNT = (ITEMS + WORKERS - 1) / WORKERS };
    const Params &p;
    const Part &part;
    ushort4 old[COUNT];

    __device__ __forceinline__ Finish(const Params &p, const Part &part) : p(p), part(part) {
        if (p.N % 4 || !p.onto) return;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int t, n;
            old[j] = make_ushort4(0, 0, 0, 0);
            if (place(j, t, n)) old[j] = *(const ushort4 *)((const u16 *)p.onto + at(t, n));
        }
    }
    __device__ __forceinline__ bool place(int j, int &t, int &n) const {
        int i = threadIdx.x + j * WORKERS;
        t = i / (OUTPUTS / 4) * PARTS + part.rank, n = i % (OUTPUTS / 4) * 4;
        return t < NT && part.first_t + t < part.end_t && part.first_n + n < p.N;
    }
    __device__ __forceinline__ long long at(int t, int n) const {
        return (long long)(part.first_t + t) * p.N + part.first_n + n;
    }
    __device__ __forceinline__ float4 sum4(u32 sums, int t, int n) const {
        float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int rank = 0; rank < PARTS; rank++) {
            float4 w = read_sums(sums + (t * LINE + n) * 4, part.block(rank));
            v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
        }
        return v;
    }
    __device__ __forceinline__ float sum1(u32 sums, int t, int n) const {
        float v = 0;
#pragma unroll
        for (int rank = 0; rank < PARTS; rank++) v += read_sum(sums + (t * LINE + n) * 4, part.block(rank));
        return v;
    }
    __device__ __forceinline__ void store(u32 sums) const {
        if (p.N % 4) return store_each(sums);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            int t, n;
            if (!place(j, t, n)) continue;
            float4 v = sum4(sums, t, n);
            if constexpr (GATE != 0) {
                float4 up = sum4(sums, t, n + OUTPUTS);
                v.x = gated(v.x, up.x, p.threshold), v.y = gated(v.y, up.y, p.threshold);
                v.z = gated(v.z, up.z, p.threshold), v.w = gated(v.w, up.w, p.threshold);
            }
            ushort4 o = p.onto ? old[j] : make_ushort4(0, 0, 0, 0);
            u32 low = pack_pair(fmaf(p.alpha, v.x, plain(o.x)), fmaf(p.alpha, v.y, plain(o.y)));
            u32 high = pack_pair(fmaf(p.alpha, v.z, plain(o.z)), fmaf(p.alpha, v.w, plain(o.w)));
            *(uint2 *)((u16 *)p.out + at(t, n)) = make_uint2(low, high);
        }
    }
    __device__ __forceinline__ void store_each(u32 sums) const {  // of outputs that are no multiple of 4
#pragma unroll 2
        for (int i = threadIdx.x; i < (NT + PARTS - 1) / PARTS * OUTPUTS; i += WORKERS) {
            int t = i / OUTPUTS * PARTS + part.rank, n = i % OUTPUTS;
            if (t >= NT || part.first_t + t >= part.end_t || part.first_n + n >= p.N) continue;
            float v = sum1(sums, t, n);
            if constexpr (GATE != 0) v = gated(v, sum1(sums, t, n + OUTPUTS), p.threshold);
            float o = p.onto ? plain(((const u16 *)p.onto)[at(t, n)]) : 0.f;
            ((u16 *)p.out)[at(t, n)] = (u16)pack_pair(fmaf(p.alpha, v, o), 0.f);
        }
    }
};
