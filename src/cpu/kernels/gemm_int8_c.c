/* The portable kernel of int8 compute.  Its sums are those of every other, bit for bit, and it alone holds every scale
 * byte, so it also serves, on any machine, the experts whose scales the others cannot hold. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/mxfp4.h"
#include "cpu/int8.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

enum { LANE_CODES = 8, HALF = BLOCK_SIZE / 2, LARGEST_SINGLE_SCALE = 226, LARGEST_FINITE_SCALE = 252 };

/* Twice the weights of a block without their scales, [32][64], k in the order of the packed activations. */
static void decode_block(const uint8_t *block, int16_t weights[BLOCK_SIZE][PANEL_ROWS])
{
    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        const uint8_t *codes = block + CODES_OFFSET + r / SUBTILE_ROWS * SUBTILE_BYTES + r % SUBTILE_ROWS * 4;
        for (int32_t k = 0; k < BLOCK_SIZE; k++) {
            unsigned byte = codes[k / LANE_CODES * LINE_BYTES + k % 4];
            weights[k][r] = (int16_t)int8_weight(k % LANE_CODES < 4 ? byte & 15u : byte >> 4);
        }
    }
}

/* acc + sum/2 * 2^(byte-127) * scale, rounded once.  Of a large power of two the scale takes a part; where it overflows
 * so does the product, whatever its exact value. */
static float add_block(float acc, int32_t sum, uint8_t byte, float scale)
{
    const int is_split = byte > LARGEST_SINGLE_SCALE && byte != SCALE_NAN;
    float value = (float)sum * 0.5f * e8m0_to_f32(is_split ? LARGEST_SINGLE_SCALE : byte);
    if (is_split) scale = ldexpf(scale, byte - LARGEST_SINGLE_SCALE);
    if (isinf(scale)) scale = FLT_MAX;
    return fmaf(value, scale, acc);
}

/* What those weights of row r that are infinite in f32 make of a token's sum: 0 where there are none. */
static float infinite_terms(const int16_t weights[BLOCK_SIZE][PANEL_ROWS], int32_t r, uint8_t byte, const int32_t *x,
                            int32_t ldx)
{
    float sum = 0.0f;
    for (int32_t k = 0; k < BLOCK_SIZE; k++) {
        const float weight = (float)weights[k][r] * 0.5f * e8m0_to_f32(byte);
        int8_t codes[4];
        memcpy(codes, &x[k / 4 * ldx], sizeof codes);
        if (isinf(weight)) sum += (float)codes[k % 4] * weight;
    }
    return sum;
}

/* One token's block: codes of its row [32], a word every ldx. */
static void add_token(const uint8_t *block, const int16_t weights[BLOCK_SIZE][PANEL_ROWS], const int32_t *x,
                      int32_t ldx, float *sums)
{
    int32_t total[PANEL_ROWS] = {0};
    float scale;
    for (int32_t half = 0; half < 2; half++) {
        int16_t sum[PANEL_ROWS] = {0}; /* of 16 products of at most 127 * 12 */
        for (int32_t k = half * HALF; k < (half + 1) * HALF; k++) {
            int8_t codes[4];
            memcpy(codes, &x[k / 4 * ldx], sizeof codes);
            for (int32_t r = 0; r < PANEL_ROWS; r++) sum[r] = (int16_t)(sum[r] + codes[k % 4] * weights[k][r]);
        }
        for (int32_t r = 0; r < PANEL_ROWS; r++) total[r] += sum[r];
    }
    memcpy(&scale, &x[(INT8_CODE_WORDS + 1) * ldx], sizeof scale);
    for (int32_t r = 0; r < PANEL_ROWS; r++) {
        sums[r] = add_block(sums[r], total[r], block[r], scale);
        if (block[r] > LARGEST_FINITE_SCALE) sums[r] += infinite_terms(weights, r, block[r], x, ldx);
    }
}

static void gemm_tile_int8_c(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                             struct read_ahead *ahead)
{
    (void)ahead;
    const int32_t *words = (const int32_t *)(const void *)x;
    int16_t weights[BLOCK_SIZE][PANEL_ROWS];
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, words += INT8_BLOCK_WORDS * n_tokens) {
        decode_block(panel, weights);
        for (int32_t t = 0; t < n_tokens; t++)
            add_token(panel, (const int16_t(*)[PANEL_ROWS])weights, words + t, n_tokens, sums + t * PANEL_ROWS);
    }
}

const struct kernel kernel_int8_c = {.name = "gemm_int8_c",
                                     .order = "exact blocks of int8, scaled by fma",
                                     .isa = MOE4_ISA_C,
                                     .tile_tokens = TILE_TOKENS,
                                     .run = PAIR,
                                     .gemm_tile = gemm_tile_int8_c};
