/* NEON with fused multiply-add.  As gemm_avx2.c, and the same bits: a block's 16 rows are decoded once into 2 KiB of
 * f32, then multiplied by up to 6 tokens at a time: 24 sums, 4 weights and a few tokens fill the 32 registers.  Run
 * under emulation only (docs/performance-cpu.md). */
#include <arm_neon.h>
#include <string.h>

#include "base/dims.h"
#include "cpu/kernels/decode_neon.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/widen.h"
#include "cpu/layout.h"

enum { LINES = 4, LANES = 4, QUARTERS = SUBTILE_ROWS / LANES, GROUP_TOKENS = 6 };

/* Pairs of k of 4 rows to f32: even[row], odd[row]. */
static inline void store_pair(uint16x8_t pair, float *even, float *odd)
{
    uint32x4_t bits = vreinterpretq_u32_u16(pair);
    vst1q_f32(even, vreinterpretq_f32_u32(vshlq_n_u32(bits, 16)));
    vst1q_f32(odd, vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xFFFF0000u))));
}

/* A subtile of a block to weights [32][16] without their scales.  A code line's lane holds, byte by byte, k = 2|0, 6|4,
 * 3|1, 7|5 (high and low nibble). */
static void decode_subtile(const uint8_t *codes, float weights[BLOCK_SIZE][SUBTILE_ROWS])
{
    const struct decode_table table = decode_table();
    for (int line = 0; line < LINES; line++)
        for (int row = 0; row < SUBTILE_ROWS; row += LANES) {
            float(*k)[SUBTILE_ROWS] = weights + line * 8;
            uint8x16_t packed = vld1q_u8(codes + line * LINE_BYTES + row * 4);
            uint16x8x2_t low = decode_even_odd(nibbles_low(packed), table);
            uint16x8x2_t high = decode_even_odd(nibbles_high(packed), table);
            store_pair(low.val[0], k[0] + row, k[1] + row);
            store_pair(high.val[0], k[2] + row, k[3] + row);
            store_pair(low.val[1], k[4] + row, k[5] + row);
            store_pair(high.val[1], k[6] + row, k[7] + row);
        }
}

/* sums[t][0..15] += scales * (weights . x) for N_TOKENS tokens; a block's sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const float weights[BLOCK_SIZE][SUBTILE_ROWS],
                                                           const uint8_t *scales, const struct wide_block *x,
                                                           int32_t first_token, int32_t ldx, const int n_tokens,
                                                           float *sums)
{
    float32x4_t block[GROUP_TOKENS][QUARTERS];
    for (int t = 0; t < n_tokens; t++)
        for (int q = 0; q < QUARTERS; q++) block[t][q] = vdupq_n_f32(0);
    for (int k = 0; k < BLOCK_SIZE; k++) {
        const float *value = (k % 2 ? x->odd : x->even) + k / 2 * ldx + first_token;
        float32x4_t w[QUARTERS];
        for (int q = 0; q < QUARTERS; q++) w[q] = vld1q_f32(weights[k] + q * LANES);
#pragma GCC unroll 6
        for (int t = 0; t < n_tokens; t++)
#pragma GCC unroll 4
            for (int q = 0; q < QUARTERS; q++) block[t][q] = vfmaq_n_f32(block[t][q], w[q], value[t]);
    }
    for (int q = 0; q < QUARTERS; q++) {
        float32x4_t scale = load_scales(scales + q * LANES);
        for (int t = 0; t < n_tokens; t++) {
            float *sum = sums + t * PANEL_ROWS + q * LANES;
            vst1q_f32(sum, vfmaq_f32(vld1q_f32(sum), block[t][q], scale));
        }
    }
}

static void multiply_group(const float weights[BLOCK_SIZE][SUBTILE_ROWS], const uint8_t *scales,
                           const struct wide_block *x, int32_t first, int32_t ldx, int32_t n_tokens, float *sums)
{
    switch (n_tokens) {
    case 1: multiply(weights, scales, x, first, ldx, 1, sums); break;
    case 2: multiply(weights, scales, x, first, ldx, 2, sums); break;
    case 3: multiply(weights, scales, x, first, ldx, 3, sums); break;
    case 4: multiply(weights, scales, x, first, ldx, 4, sums); break;
    case 5: multiply(weights, scales, x, first, ldx, 5, sums); break;
    default: multiply(weights, scales, x, first, ldx, 6, sums); break;
    }
}

static void gemm_tile_neon(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                           struct read_ahead *ahead)
{
    (void)ahead;
    float weights[BLOCK_SIZE][SUBTILE_ROWS] __attribute__((aligned(64)));
    struct wide_block wide;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        widen_block(x, n_tokens, &wide);
        for (int subtile = 0; subtile < PANEL_ROWS / SUBTILE_ROWS; subtile++) {
            const int row = subtile * SUBTILE_ROWS;
            decode_subtile(panel + CODES_OFFSET + subtile * SUBTILE_BYTES, weights);
            for (int32_t t = 0; t < n_tokens; t += GROUP_TOKENS) {
                int32_t group = n_tokens - t < GROUP_TOKENS ? n_tokens - t : GROUP_TOKENS;
                multiply_group(weights, panel + row, &wide, t, n_tokens, group, sums + t * PANEL_ROWS + row);
            }
        }
    }
}

const struct kernel kernel_neon = {.name = "gemm_neon",
                                   .order = "blocks of fma over k, scaled by fma",
                                   .isa = MOE4_ISA_NEON,
                                   .tile_tokens = TILE_TOKENS,
                                   .run = PAIR,
                                   .gemm_tile = gemm_tile_neon};
