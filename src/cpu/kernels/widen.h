/* The packed activations of one block, widened for the kernels that multiply in f32. */
#ifndef MOE4_CPU_KERNELS_WIDEN_H
#define MOE4_CPU_KERNELS_WIDEN_H

#include <stdint.h>
#include <string.h>

#include "base/convert.h"
#include "base/dims.h"
#include "cpu/layout.h"

/* [16][n_tokens]: even k, and odd k.  Apart, so that widening is but a shift and a mask of whole vectors. */
struct wide_block {
    float even[BLOCK_SIZE / 2 * LARGE_TILE_TOKENS], odd[BLOCK_SIZE / 2 * LARGE_TILE_TOKENS];
} __attribute__((aligned(64)));

/* x [16][n_tokens] pairs of bf16, the low half the even k (little endian). */
static inline void widen_block(const uint16_t *x, int32_t n_tokens, struct wide_block *wide)
{
    for (int32_t i = 0; i < BLOCK_SIZE / 2 * n_tokens; i++) {
        uint32_t pair;
        memcpy(&pair, x + 2 * i, sizeof pair);
        wide->even[i] = f32_from_bits(pair << 16);
        wide->odd[i] = f32_from_bits(pair & 0xFFFF0000u);
    }
}

#endif
