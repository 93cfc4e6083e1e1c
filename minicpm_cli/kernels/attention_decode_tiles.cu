// Products on tensor cores, mma.m16n8k16, for the two decode kernels that use them. 8-bit codes are multiplied as
// float16, weights with their scales 256 times larger.

enum { WORDS = EACH / 2 };
constexpr bool F16 = KIND || FLOAT16;
constexpr float LARGER = KIND ? 256.f : 1.f;

#define MULTIPLY(type)                                                                                       \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                               \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (F16)
        MULTIPLY("f16");
    else
        MULTIPLY("bf16");
}
__device__ __forceinline__ u32 tile_pair(float a, float b) { return F16 ? f16_pair(a, b) : packed(a, b); }
__device__ __forceinline__ void code_pairs(u32 word, u32 &low, u32 &high) {  // four codes as float16
    if (KIND == 1) {
        asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
            : "=r"(low), "=r"(high)
            : "r"(word));
    } else {  // code + 128, as the low byte of 1024 + code + 128
        word ^= 0x80808080u;
        asm("sub.f16x2 %0, %1, %2;" : "=r"(low) : "r"(__byte_perm(word, 0x64646464u, 0x4140)), "r"(0x64806480u));
        asm("sub.f16x2 %0, %1, %2;" : "=r"(high) : "r"(__byte_perm(word, 0x64646464u, 0x4342)), "r"(0x64806480u));
    }
}
__device__ __forceinline__ void pairs(uint4 raw, u32 (&two)[WORDS]) {  // a piece's elements in twos, for a product
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (!KIND) {
            two[i] = words[i];
        } else {
            code_pairs(words[i], two[2 * i % WORDS], two[(2 * i + 1) % WORDS]);
        }
    }
}
