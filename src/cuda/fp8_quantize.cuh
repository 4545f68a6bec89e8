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

/* From this scale on one step corrects what the reciprocal of it leaves of a quotient; below, something may underflow.
 */
#define FP8_ORDINARY_SCALE 0x1p-90f

/* x / scale, rounded to nearest. */
template <bool is_ordinary> static __device__ __forceinline__ float fp8_divide(float x, const fp8_divisor &by)
{
    if (!is_ordinary) return by.scale > 0.0f ? x / by.scale : 0.0f;
    const float q = x * by.reciprocal;
    return fmaf(fmaf(-q, by.scale, x), by.reciprocal, q);
}

/* Two codes, the first in the low byte. */
static __device__ __forceinline__ uint32_t fp8_code_pair(float first, float second)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

/* The codes of two bf16. */
template <bool is_ordinary> static __device__ __forceinline__ uint32_t fp8_codes(uint32_t two, const fp8_divisor &by)
{
    return fp8_code_pair(fp8_divide<is_ordinary>(__uint_as_float(two << 16), by),
                         fp8_divide<is_ordinary>(__uint_as_float(two & 0xFFFF0000u), by));
}

template <bool is_ordinary>
static __device__ __forceinline__ uint4 fp8_chunk(uint4 first, uint4 second, const fp8_divisor &by)
{
    return {fp8_codes<is_ordinary>(first.x, by) | fp8_codes<is_ordinary>(first.y, by) << 16,
            fp8_codes<is_ordinary>(first.z, by) | fp8_codes<is_ordinary>(first.w, by) << 16,
            fp8_codes<is_ordinary>(second.x, by) | fp8_codes<is_ordinary>(second.y, by) << 16,
            fp8_codes<is_ordinary>(second.z, by) | fp8_codes<is_ordinary>(second.w, by) << 16};
}

/* Sixteen bf16 of a row. */
struct chunk16 {
    uint4 first, second;
};

/* Sixteen bf16 to sixteen codes; all 0 under a scale that is NaN.  One branch for all of them, so that the compiler can
 * do several at once. */
static __device__ __forceinline__ uint4 fp8_chunk(uint4 first, uint4 second, const fp8_divisor &by)
{
    if (by.scale >= FP8_ORDINARY_SCALE) return fp8_chunk<true>(first, second, by);
    if (by.scale >= 0.0f) return fp8_chunk<false>(first, second, by);
    return {};
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

/* Of 128 columns, of which eight neighbouring lanes hold sixteen each. */
static __device__ __forceinline__ fp8_divisor fp8_divisor_of_eight(const chunk16 &v)
{
    uint32_t most = fp8_larger(fp8_larger(0, v.first), v.second);
    for (int offset = 1; offset < 8; offset *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
    return fp8_divisor_of(fp8_largest(most));
}

/* Byte offset of a row's chunk of 16 columns in its 128, `row` counted within its expert or tile. */
static __device__ __forceinline__ int64_t fp8_chunk_offset(int64_t row, int64_t chunk)
{
    return (chunk ^ (row & 7)) << 4;
}

#endif
