/* Conversions between f32 and the 16-bit formats, round to nearest even whatever the hardware's mode. */
#ifndef MOE4_BASE_CONVERT_H
#define MOE4_BASE_CONVERT_H

#include <stdint.h>
#include <string.h>

#include "moe4/moe4.h"

static inline uint32_t f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float bf16_to_f32(uint16_t x)
{
    return f32_from_bits((uint32_t)x << 16);
}

/* NaN stays a (quiet) NaN of the same sign. */
static inline uint16_t bf16_from_f32(float x)
{
    uint32_t bits = f32_bits(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 31u, mantissa = x & 0x3FFu;
    if (exponent == 31) return f32_from_bits(sign | 0x7F800000u | mantissa << 13);
    if (exponent) return f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    float magnitude = (float)mantissa * 0x1p-24f; /* exact: at most 10 bits */
    return sign ? -magnitude : magnitude;
}

static inline uint16_t f16_from_f32(float x)
{
    uint32_t bits = f32_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u);
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* 65520 and up round to infinity */
    if (magnitude < 0x33000001u) return (uint16_t)sign;              /* up to 2^-25 rounds to zero */
    uint32_t exponent = magnitude >> 23, mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
    uint32_t shift = exponent < 113 ? 126 - exponent : 13; /* bits to drop; more for a subnormal result */
    uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    kept += rest > half || (rest == half && kept & 1);
    if (exponent < 113) return (uint16_t)(sign | kept);
    return (uint16_t)(sign | (((exponent - 112) << 10) + kept - 0x400u));
}

/* Element `index` of an array of F32, F16 or BF16 that may begin at any byte. */
static inline float load_f32(const void *array, moe4_dtype dtype, int64_t index)
{
    uint16_t half;
    float value;
    if (dtype == MOE4_DTYPE_F32) {
        memcpy(&value, (const char *)array + index * 4, 4);
        return value;
    }
    memcpy(&half, (const char *)array + index * 2, 2);
    return dtype == MOE4_DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

#endif
