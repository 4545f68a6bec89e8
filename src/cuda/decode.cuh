/* From packed bytes to operand A (layout.h). */
#ifndef MOE4_CUDA_DECODE_CUH
#define MOE4_CUDA_DECODE_CUH

#include <stdint.h>

/* A stored scale byte as a pair of bf16 factors; its byte in `scales` is given by the selector. */
template <uint32_t byte> static __device__ __forceinline__ uint32_t scale_pair(uint32_t scales)
{
    /* the byte in bytes 1 and 3, then down by one: the exponent field of either half */
    return __byte_perm(scales, 0, 0x4 | byte << 4 | 0x400 | byte << 12) >> 1;
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

/* One word to the four registers of a k16 fragment; lower: factor of row g, upper: of row g+8. */
static __device__ __forceinline__ void decode_word(uint32_t word, uint32_t lower, uint32_t upper, uint32_t *a)
{
    const uint32_t mask = 0x81C081C0u;
    uint32_t r = __funnelshift_l(word, word, 6);
    a[0] = multiply_pair(word & mask, lower);
    a[1] = multiply_pair(word << 4 & mask, upper);
    a[2] = multiply_pair(__funnelshift_l(word, word, 10) & mask, lower);
    a[3] = multiply_pair((r ^ r << 8) & mask, upper);
}

/* A lane's part of a step: 64 k of rows g and g+8. */
static __device__ __forceinline__ void decode_step(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    uint32_t lower = scale_pair<0>(scales), upper = scale_pair<1>(scales);
    decode_word(codes.x, lower, upper, a);
    decode_word(codes.y, lower, upper, a + 4);
    lower = scale_pair<2>(scales), upper = scale_pair<3>(scales);
    decode_word(codes.z, lower, upper, a + 8);
    decode_word(codes.w, lower, upper, a + 12);
}

#endif
