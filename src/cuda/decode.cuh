/* From packed bytes to operand A (layout.h). */
#ifndef MOE4_CUDA_DECODE_CUH
#define MOE4_CUDA_DECODE_CUH

#include <stdint.h>

/* The scale bytes of a lane's part of a step as bf16 factors: of row g and of row g+8, each the step's first block of
 * 32 k in the low half and its second in the high one. */
struct step_factors {
    uint32_t lower, upper;
};

static __device__ __forceinline__ step_factors factors_of(uint32_t scales)
{
    return {(scales & 0x00FF00FFu) << 7, scales >> 1 & 0x7F807F80u};
}

/* One half in both.  Said in halves, it becomes an operand's modifier; by shifts or permutations it would not. */
template <int half> static __device__ __forceinline__ uint32_t half_twice(uint32_t pair)
{
    uint16_t low, high;
    uint32_t twice;
    asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(pair));
    asm("mov.b32 %0, {%1, %1};" : "=r"(twice) : "h"(half ? high : low));
    return twice;
}

/* Exact, whatever is subnormal.  Adding -0 changes nothing, not even a zero's sign. */
static __device__ __forceinline__ uint32_t multiply_pair(uint32_t a, uint32_t b)
{
    uint32_t product;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return product;
}

/* One word of a block to the four registers of a k16 fragment. */
template <int block>
static __device__ __forceinline__ void decode_word(uint32_t word, const step_factors &factors, uint32_t *a)
{
    const uint32_t mask = 0x81C081C0u, lower = half_twice<block>(factors.lower),
                   upper = half_twice<block>(factors.upper);
    uint32_t r = __funnelshift_l(word, word, 6);
    a[0] = multiply_pair(word & mask, lower);
    a[1] = multiply_pair(word << 4 & mask, upper);
    a[2] = multiply_pair(__funnelshift_l(word, word, 10) & mask, lower);
    a[3] = multiply_pair((r ^ r << 8) & mask, upper);
}

/* A lane's part of a step: 64 k of rows g and g+8. */
static __device__ __forceinline__ void decode_step(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    const step_factors factors = factors_of(scales);
    decode_word<0>(codes.x, factors, a);
    decode_word<0>(codes.y, factors, a + 4);
    decode_word<1>(codes.z, factors, a + 8);
    decode_word<1>(codes.w, factors, a + 12);
}

#endif
