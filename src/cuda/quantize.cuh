/* Blocks of MXFP8, four lanes each (base/mxfp8.h has the rules). */
#ifndef MOE4_CUDA_QUANTIZE_CUH
#define MOE4_CUDA_QUANTIZE_CUH

#include "base/dims.h"
#include "cuda/mxfp8.cuh"

/* A lane's part of a block: eight elements as pairs of bf16, lower k first; the block's other lanes are its neighbours.
 */
enum { LANE_ELEMENTS = 8, LANES = BLOCK_SIZE / LANE_ELEMENTS };

struct values {
    uint32_t pairs[4];
};

struct codes {
    uint32_t pairs[4], scale; /* two codes each */
};

static __device__ __forceinline__ uint32_t bf16_pair_of(float low, float high)
{
    return bf16_bits(low) | (uint32_t)bf16_bits(high) << 16;
}

/* Nearest codes of a pair of finite values. */
static __device__ __forceinline__ uint32_t code_pair(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3_code(low) | e4m3_code(high) << 8;
#endif
}

static __device__ __forceinline__ float2 value_pair(uint32_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    float2 value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(value.x), "=f"(value.y)
        : "r"(halves));
    return value;
#else
    return {e4m3_value(pair & 0xFF), e4m3_value(pair >> 8)};
#endif
}

/* Of a block of bf16; all its lanes take part.  One with a NaN or an infinity gets scale NaN and codes 0. */
static __device__ __forceinline__ codes quantize(const values &x)
{
    uint32_t most = 0;
    for (int i = 0; i < 4; i++) most = __vmaxu2(most, x.pairs[i] & 0x7FFF7FFFu);
    const uint32_t peers = ((1u << LANES) - 1) << threadIdx.x % 32 / LANES * LANES;
    for (int lane = 1; lane < LANES; lane *= 2) most = __vmaxu2(most, __shfl_xor_sync(peers, most, lane));
    const uint32_t amax = max(most & 0xFFFFu, most >> 16);
    if (amax >= 0x7F80u) return {{0, 0, 0, 0}, NAN_SCALE};
    codes q = {{}, scale_of(bf16_float((uint16_t)amax))};
    const float inverse = inverse_of(q.scale);
    for (int i = 0; i < 4; i++)
        q.pairs[i] =
            code_pair(bf16_float((uint16_t)x.pairs[i]) * inverse, __uint_as_float(x.pairs[i] & 0xFFFF0000u) * inverse);
    return q;
}

/* What codes are worth. */
static __device__ __forceinline__ values worth_of_codes(const codes &q)
{
    const float scale = e8m0_value(q.scale);
    values v;
    for (int i = 0; i < 4; i++) {
        const float2 value = value_pair(q.pairs[i]);
        v.pairs[i] = bf16_pair_of(value.x * scale, value.y * scale);
    }
    return v;
}

#endif
