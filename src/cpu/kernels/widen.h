/* The packed activations of one block, widened for the kernels that multiply in f32. */
#ifndef MOE4_CPU_KERNELS_WIDEN_H
#define MOE4_CPU_KERNELS_WIDEN_H

#include <stdint.h>

#include "base/convert.h"
#include "base/dims.h"

/* x [16][n_tokens] pairs of bf16 -> wide [32][n_tokens] f32.  A pair's low half is the even k (little endian). */
static inline void widen_block(const uint16_t *x, int32_t n_tokens, float *wide)
{
    for (int32_t pair = 0; pair < BLOCK_SIZE / 2; pair++, wide += 2 * n_tokens)
        for (int32_t t = 0; t < n_tokens; t++, x += 2) {
            wide[t] = bf16_to_f32(x[0]);
            wide[n_tokens + t] = bf16_to_f32(x[1]);
        }
}

#endif
