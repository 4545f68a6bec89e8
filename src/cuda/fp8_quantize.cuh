/* Quantising bf16 to e4m3 under an f32 scale (base/fp8.h has the rule). */
#ifndef MOE4_CUDA_FP8_QUANTIZE_CUH
#define MOE4_CUDA_FP8_QUANTIZE_CUH

#include <stdint.h>

/* A scale and what dividing by it takes. */
struct fp8_divisor {
    float scale, reciprocal;
};

/* Of values whose largest magnitude has these bf16 bits. */
static __device__ __forceinline__ fp8_divisor fp8_divisor_of(uint32_t amax)
{
    if (amax >= 0x7F80u) return {__uint_as_float(0x7FC00000u), 0.0f};
    const float scale = __uint_as_float(amax << 16) / 448.0f;
    return {scale, amax ? 1.0f / scale : 0.0f};
}

/* x / scale, rounded to nearest: one step corrects what the reciprocal leaves, as long as nothing underflows. */
static __device__ __forceinline__ float fp8_divide(float x, const fp8_divisor &by)
{
    if (by.scale < 0x1p-90f) return by.scale > 0.0f ? x / by.scale : 0.0f;
    float q = x * by.reciprocal;
    return fmaf(fmaf(-q, by.scale, x), by.reciprocal, q);
}

/* Two codes, the first in the low byte. */
static __device__ __forceinline__ uint32_t fp8_code_pair(float first, float second)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

/* The codes of four bf16, two a word; all 0 under a scale that is NaN. */
static __device__ __forceinline__ uint32_t fp8_codes(uint32_t low, uint32_t high, const fp8_divisor &by)
{
    if (!(by.scale >= 0.0f)) return 0;
    uint32_t first =
        fp8_code_pair(fp8_divide(__uint_as_float(low << 16), by), fp8_divide(__uint_as_float(low & 0xFFFF0000u), by));
    uint32_t second =
        fp8_code_pair(fp8_divide(__uint_as_float(high << 16), by), fp8_divide(__uint_as_float(high & 0xFFFF0000u), by));
    return first | second << 16;
}

/* Sixteen bf16 to sixteen codes. */
static __device__ __forceinline__ uint4 fp8_chunk(uint4 first, uint4 second, const fp8_divisor &by)
{
    return {fp8_codes(first.x, first.y, by), fp8_codes(first.z, first.w, by), fp8_codes(second.x, second.y, by),
            fp8_codes(second.z, second.w, by)};
}

/* The larger of bf16's magnitudes in each half: `most` so far, and those of eight more. */
static __device__ __forceinline__ uint32_t fp8_larger(uint32_t most, uint4 v)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    for (uint32_t word : words) most = __vmaxu2(most, word & 0x7FFF7FFFu);
    return most;
}

/* Bits of the larger of two magnitudes. */
static __device__ __forceinline__ uint32_t fp8_largest(uint32_t halves)
{
    return max(halves >> 16, halves & 0xFFFFu);
}

/* Byte offset of a row's chunk of 16 columns in its 128, `row` counted within its expert or tile. */
static __device__ __forceinline__ int64_t fp8_chunk_offset(int64_t row, int64_t chunk)
{
    return (chunk ^ (row & 7)) << 4;
}

#endif
