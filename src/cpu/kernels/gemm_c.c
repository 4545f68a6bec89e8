/* The portable kernel: decodes a block of a panel to f32 by the format's formula, then adds it to every token.  It is
 * exact for every scale byte, subnormal, overflowing or NaN, and therefore also serves, on any machine, the experts
 * whose scales the fast kernels cannot hold. */
#include <string.h>

#include "base/convert.h"
#include "base/mxfp4.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

/* A lane's eight codes, k = 0..7, for one row: weights[k][0]. */
static void decode_lane(uint32_t lane, float scale, const float values[16], float (*weights)[PANEL_ROWS])
{
    for (int32_t pair = 0; pair < 4; pair++) {
        weights[2 * pair][0] = values[lane >> (4 * pair) & 15] * scale;
        weights[2 * pair + 1][0] = values[lane >> (4 * pair + 16) & 15] * scale;
    }
}

static void decode_block(const uint8_t *block, float weights[BLOCK_SIZE][PANEL_ROWS])
{
    float values[16];
    for (unsigned code = 0; code < 16; code++) values[code] = e2m1_to_f32(code);
    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        const float scale = e8m0_to_f32(block[r]);
        const uint8_t *codes = block + CODES_OFFSET + r / SUBTILE_ROWS * SUBTILE_BYTES + r % SUBTILE_ROWS * 4;
        for (int32_t line = 0; line < SUBTILE_BYTES / LINE_BYTES; line++) {
            uint32_t lane;
            memcpy(&lane, codes + line * LINE_BYTES, sizeof lane);
            decode_lane(lane, scale, values, (float(*)[PANEL_ROWS])(weights[8 * line] + r));
        }
    }
}

static void gemm_tile_c(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                        struct read_ahead *ahead)
{
    (void)ahead;
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

const struct kernel kernel_c = {.name = "gemm_c",
                                .order = "f32 chain over k: multiply, add",
                                .isa = MOE4_ISA_C,
                                .tile_tokens = LARGE_TILE_TOKENS,
                                .run = PAIR,
                                .gemm_tile = gemm_tile_c};
