/* From packed bytes, arranged for fp8, to operand A in e5m2 (layout.h). */
#ifndef MOE4_CUDA_FP8_DECODE_CUH
#define MOE4_CUDA_FP8_DECODE_CUH

#include <stdint.h>

#include "cuda/layout.h"

/* The eight magnitudes under relative exponent 0, and what one binade adds to each: 0 stays 0, 0.5 is 2^-14, the least
 * normal number.  A table for the stored scale byte is magnitudes + byte * step, with `base` of the tile taken off. */
struct fp8_magnitudes {
    uint32_t low, high;
};

constexpr uint32_t FP8_LOW = 0x0A080400u, FP8_HIGH = 0x12100E0Cu; /* 1.5 1 .5 0, 6 4 3 2 */
constexpr uint32_t FP8_LOW_STEP = 0x04040400u, FP8_HIGH_STEP = 0x04040404u;
constexpr int FP8_UNIT = 13; /* decoded values are 2^13 too small */

static __device__ __forceinline__ fp8_magnitudes fp8_magnitudes_of(uint32_t base)
{
    return {FP8_LOW - base * FP8_LOW_STEP, FP8_HIGH - base * FP8_HIGH_STEP};
}

/* What sums of a tile's decoded values are multiplied with, a power of two.  The stored byte of 2^0 is
 * CUDA_SCALE_OFFSET + 127 under base 0. */
static __device__ __forceinline__ float fp8_tile_unit(int base)
{
    return __int_as_float((base - CUDA_SCALE_OFFSET + FP8_UNIT) << 23);
}

/* Bytes of low (0..3) and high (4..7) by the selector's nibbles, whose top bits must be 0: __byte_perm would mask them
 * once more. */
static __device__ __forceinline__ uint32_t fp8_select(uint32_t low, uint32_t high, uint32_t select)
{
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(select));
    return bytes;
}

/* Eight codes of one row and block: the registers of k = 0..15 and k = 16..31 of a lane's part of an m64nNk32. */
static __device__ __forceinline__ void fp8_decode_word(uint32_t word, uint32_t scale, const fp8_magnitudes &of,
                                                       uint32_t *first, uint32_t *second)
{
    const uint32_t low = of.low + scale * FP8_LOW_STEP, high = of.high + scale * FP8_HIGH_STEP;
    const uint32_t select = word & 0x77777777u;
    *first = fp8_select(low, high, select) | (word & 0x80808080u);
    *second = fp8_select(low, high, select >> 16) | (word << 4 & 0x80808080u);
}

/* A lane's part of a step: 64 k of rows g and g+8. */
static __device__ __forceinline__ void fp8_decode_step(uint4 codes, uint32_t scales, const fp8_magnitudes &of,
                                                       uint32_t *a)
{
    fp8_decode_word(codes.x, scales & 255, of, a, a + 2);
    fp8_decode_word(codes.y, __byte_perm(scales, 0, 0x4441), of, a + 1, a + 3);
    fp8_decode_word(codes.z, __byte_perm(scales, 0, 0x4442), of, a + 4, a + 6);
    fp8_decode_word(codes.w, scales >> 24, of, a + 5, a + 7);
}

#endif
