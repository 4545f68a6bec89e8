/* Scales of MXFP8 blocks, and an element alone (base/mxfp8.h has the rules). */
#ifndef MOE4_CUDA_MXFP8_CUH
#define MOE4_CUDA_MXFP8_CUH

#include "cuda/e4m3.cuh"
#include "cuda/launch.cuh"

constexpr uint8_t NAN_SCALE = 0xFF;

static __device__ __forceinline__ uint32_t scale_of(float amax)
{
    uint32_t bits = __float_as_uint(amax * (1.0f / 448.0f)), exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    if (exponent == 0) return mantissa > 0x400000u;
    exponent += mantissa != 0;
    return exponent > 0xFE ? 0xFE : exponent;
}

static __device__ __forceinline__ float inverse_of(uint32_t scale)
{
    if (scale == 0) return 0.0f;
    return __uint_as_float(scale == 0xFE ? 0x00400000u : (254u - scale) << 23);
}

static __device__ __forceinline__ float e8m0_value(uint32_t scale)
{
    if (scale == NAN_SCALE) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(scale ? scale << 23 : 1u << 22);
}

/* What the code of a bf16 is worth in a block whose largest magnitude is amax, as bits. */
static __device__ __forceinline__ uint16_t worth_of(uint16_t x, uint32_t amax)
{
    const uint32_t scale = amax >= 0x7F80u ? NAN_SCALE : scale_of(bf16_float((uint16_t)amax));
    const uint32_t code = scale == NAN_SCALE ? 0 : e4m3_code(bf16_float(x) * inverse_of(scale));
    return bf16_bits(e4m3_value(code) * e8m0_value(scale));
}

#endif
