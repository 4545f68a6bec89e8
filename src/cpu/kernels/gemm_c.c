/* The portable kernel: decodes a block of a panel to f32 by the format's formula, then adds it to every token.  It is
 * exact for every scale byte, subnormal, overflowing or NaN, and therefore also serves, on any machine, the experts
 * whose scales the fast kernels cannot hold. */
#include <string.h>

#include "base/convert.h"
#include "base/mxfp4.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

static void decode_block(const uint8_t *block, float weights[BLOCK_SIZE][PANEL_ROWS])
{
    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        float scale = e8m0_to_f32(layout_scale(block, r));
        for (int32_t k = 0; k < BLOCK_SIZE; k++) weights[k][r] = e2m1_to_f32(layout_code(block, r, k)) * scale;
    }
}

static void gemm_tile_c(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums)
{
    float weights[BLOCK_SIZE][PANEL_ROWS];
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        decode_block(panel, weights);
        for (int32_t t = 0; t < n_tokens; t++) {
            float *row = sums + t * PANEL_ROWS;
            for (int32_t k = 0; k < BLOCK_SIZE; k++) {
                float value = bf16_to_f32(x[(k / 2 * n_tokens + t) * 2 + k % 2]);
                for (int32_t r = 0; r < PANEL_ROWS; r++) row[r] += value * weights[k][r];
            }
        }
    }
}

const struct kernel kernel_c = {"gemm_c", "f32 chain over k: multiply, add", MOE4_ISA_C, gemm_tile_c};
