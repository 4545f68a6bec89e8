/* Weights of experts that no fast kernel holds: packed in the bf16 arrangement, scales as the checkpoint has them. */
#ifndef MOE4_CUDA_RAW_CUH
#define MOE4_CUDA_RAW_CUH

#include "cuda/pack.h"

static __device__ __forceinline__ float e8m0_value(uint8_t scale)
{
    if (scale == SCALE_NAN) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(scale ? (uint32_t)scale << 23 : 1u << 22);
}

/* A code's bits as in a register's half are the value's, 2^126 too small. */
static __device__ __forceinline__ float code_value(uint32_t half)
{
    return __uint_as_float(half << 16) * 0x1p126f;
}

/* Weights k and k+1 (k even, below 64) of row r of a step. */
static __device__ __forceinline__ float2 raw_weights(const uint8_t *step, int32_t r, int32_t k)
{
    const int32_t warp = r / 16, half = r / 8 % 2, g = r % 8, lane = g * 4 + k % 8 / 2;
    const float scale = e8m0_value(step[warp * 32 + g * 4 + k / 32 * 2 + half]);
    uint32_t pairs[4];
    split_word(((const uint32_t *)(step + CUDA_STEP_SCALES))[(warp * 32 + lane) * 4 + k / 16], pairs);
    const uint32_t pair = pairs[k % 16 / 8 * 2 + half];
    return {code_value(pair & 0xFFFFu) * scale, code_value(pair >> 16) * scale};
}

#endif
