/* e4m3 codes in integer arithmetic, as base/mxfp8.h has them. */
#ifndef MOE4_CUDA_E4M3_CUH
#define MOE4_CUDA_E4M3_CUH

#include <stdint.h>

static __device__ __forceinline__ float e4m3_value(uint32_t code)
{
    uint32_t magnitude = code & 0x7Fu;
    float value = magnitude == 0x7F ? __uint_as_float(0x7FC00000u) : __uint_as_float(magnitude << 20) * 0x1p120f;
    return __uint_as_float(__float_as_uint(value) | (code & 0x80u) << 24);
}

/* Nearest e4m3, ties to even, of a finite value; what is above 448 becomes 448. */
static __device__ __forceinline__ uint32_t e4m3_code(float x)
{
    uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
    uint32_t normal = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = __float_as_uint(__uint_as_float(magnitude) * 512.0f + 0x1p23f) & 0xFu;
    uint32_t code = magnitude < 0x3C800000u ? subnormal : normal;
    return (bits >> 24 & 0x80u) | (magnitude > 0x43E00000u ? 0x7Eu : code);
}

#endif
