/* The MXFP8 block: 32 consecutive e4m3 codes share one E8M0 scale.
 *
 *   code s eeee mmm, bias 7, no infinities, 0x7F and 0xFF are NaN, largest 448; the smallest step is 2^-9 */
#ifndef MOE4_BASE_MXFP8_H
#define MOE4_BASE_MXFP8_H

#include <math.h>
#include <stdint.h>

#include "base/convert.h"
#include "base/dims.h"
#include "base/mxfp4.h"

static inline float e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7Fu;
    float value = f32_from_bits(magnitude << 20) * 0x1p120f; /* exact, from a subnormal f32 where the code is one */
    return f32_from_bits(sign | (magnitude == 0x7F ? 0x7FC00000u : f32_bits(value)));
}

/* Nearest e4m3, ties to even, of a finite value; what is above 448 becomes 448. */
static inline uint8_t e4m3_from_f32(float x)
{
    uint32_t bits = f32_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = f32_bits(f32_from_bits(magnitude) * 512.0f + 0x1p23f) & 0xFu;
    uint32_t code = magnitude < 0x3C800000u ? subnormal : normal; /* 2^-6 */
    return (uint8_t)(sign | (magnitude > 0x43E00000u ? 0x7Eu : code));
}

/* The smallest E8M0 that is at least amax/448 (amax finite).  448 * RN(1/448) rounds to 1: a power of two times 448
 * gets that power. */
static inline uint8_t mxfp8_scale(float amax)
{
    uint32_t bits = f32_bits(amax * (1.0f / 448.0f)), exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    if (exponent == 0) return mantissa > 0x400000u;
    exponent += mantissa != 0;
    return (uint8_t)(exponent > 0xFE ? 0xFE : exponent);
}

/* 2^(127-scale), what a block's elements are multiplied by; 0 for scale 0, whose codes are all 0. */
static inline float mxfp8_inverse(uint8_t scale)
{
    if (scale == 0) return 0.0f;
    return f32_from_bits(scale == 0xFE ? 0x00400000u : (254u - scale) << 23);
}

/* Quantises a block of bf16.  A block with a NaN or an infinity gets scale NaN and codes 0. */
static inline uint8_t mxfp8_quantize_block(const uint16_t *x, uint8_t *codes)
{
    uint32_t amax = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) amax = (x[i] & 0x7FFFu) > amax ? x[i] & 0x7FFFu : amax;
    int is_finite = amax < 0x7F80u;
    uint8_t scale = is_finite ? mxfp8_scale(bf16_to_f32((uint16_t)amax)) : SCALE_NAN;
    float inverse = is_finite ? mxfp8_inverse(scale) : 0.0f;
    for (int i = 0; i < BLOCK_SIZE; i++) codes[i] = is_finite ? e4m3_from_f32(bf16_to_f32(x[i]) * inverse) : 0;
    return scale;
}

/* A block's values as bf16: exact for scale bytes 3..246; outside, what bf16 cannot hold is rounded or infinite. */
static inline void mxfp8_dequantize_block(const uint8_t *codes, uint8_t scale, uint16_t *x)
{
    float factor = e8m0_to_f32(scale);
    for (int i = 0; i < BLOCK_SIZE; i++) x[i] = bf16_from_f32(e4m3_to_f32(codes[i]) * factor);
}

#endif
