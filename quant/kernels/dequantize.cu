// Packed integers to plain weights of 16 bits, computed in float32 and rounded once.
//
// Groups divide rows and hold whole pieces of 8 weights, so pieces, groups and outputs lie flat, one row behind the other.
// A thread asks for PIECES pieces and their scales before it uses the first; neighbours in a warp write 16 bytes each side
// by side. What is read once goes past the caches, what is written stays in L2 for the product that follows.
//
// Set by the compiler's options: BITS, HALF (weights are float16, else bfloat16), SCALE (0 float16, 1 bfloat16, 2 float32),
// KIND (0 middle, 1 zero points, 2 shifts), GROUP (pieces under one scale), THREADS, PIECES.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
enum { WORDS = BITS / 4 };  // of a piece
// A code in the low bits of 2^23 is 2^23 plus the code, which takes a subtraction instead of a slow conversion.
constexpr float ABOVE = 8388608.f, MIDDLE = BITS == 4 ? 8.f : 128.f;

struct Params {
    const u8 *words, *scale, *zero;
    const float *shift;
    u8 *out;
    u32 count;  // pieces
};

__device__ __forceinline__ float scale_at(const Params &p, u32 group) {
    if (SCALE == 2) return __ldg((const float *)p.scale + group);
    u16 bits = __ldg((const u16 *)p.scale + group);
    float value;
    if (SCALE == 1) return __uint_as_float((u32)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ u32 pack_pair(float low, float high) {
    u32 d;
    if (HALF)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ float weight(u32 word, int at, float s, float base) {  // base: shift, or 2^23 + zero
    float code = __uint_as_float((word >> at & (1 << BITS) - 1) | 0x4B000000);
    return KIND == 2 ? fmaf(code - ABOVE, s, base) : (code - base) * s;
}
__device__ __forceinline__ u32 weights(const u32 (&piece)[WORDS], int pair, float s, float base) {
    u32 word = piece[pair * BITS / 16];
    int at = pair * BITS % 16;
    return pack_pair(weight(word, at, s, base), weight(word, at + 16, s, base));
}

extern "C" __global__ void __launch_bounds__(THREADS) dequantize(const __grid_constant__ Params p) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    u32 first = blockIdx.x * (THREADS * PIECES) + threadIdx.x, piece[PIECES][WORDS];
    float s[PIECES], base[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        u32 i = min(first + j * THREADS, p.count - 1);
        if (BITS == 4) {
            piece[j][0] = __ldcs((const u32 *)p.words + i);
        } else {
            uint2 both = __ldcs((const uint2 *)p.words + i);
            piece[j][0] = both.x, piece[j][WORDS - 1] = both.y;
        }
        s[j] = scale_at(p, i / GROUP);
        base[j] = KIND == 2 ? __ldg(p.shift + i / GROUP) : ABOVE + (KIND ? (float)__ldg(p.zero + i / GROUP) : MIDDLE);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the product before may still read what was in `out`
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        u32 i = first + j * THREADS;
        if (i >= p.count) return;
        uint4 v;
        v.x = weights(piece[j], 0, s[j], base[j]), v.y = weights(piece[j], 1, s[j], base[j]);
        v.z = weights(piece[j], 2, s[j], base[j]), v.w = weights(piece[j], 3, s[j], base[j]);
        ((uint4 *)p.out)[i] = v;
    }
}
