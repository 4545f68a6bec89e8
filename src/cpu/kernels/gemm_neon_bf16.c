/* NEON with BF16.  Everything is BFMMLA, which multiplies 2 tokens x 4 k by 2 rows x 4 k into 2 x 2 sums, each the same
 * as two BFDOT in turn.  A block's 16 rows are decoded once into 1 KiB of such operands, then multiplied by up to 6
 * tokens at a time: 24 registers of sums, 3 of tokens and 1 of weights.  An odd last token fills both places of its
 * operand.  Run under emulation only (docs/performance-cpu.md).
 *
 * BFMMLA rounds its own way, whatever FPCR says (but for FPCR.EBF, which is 0 here): to odd, after adding the two
 * products of a pair and after adding those to the sum, and it flushes subnormal operands and results. */
#include <arm_neon.h>
#include <string.h>

#include "base/dims.h"
#include "cpu/kernels/decode_neon.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

enum {
    LINES = 4,
    LANES = 4,              /* rows in a register of codes */
    QUADS = BLOCK_SIZE / 4, /* of k in a block; a code line has two */
    SUBTILES = PANEL_ROWS / SUBTILE_ROWS,
    ROW_PAIRS = SUBTILE_ROWS / 2,
    TOKEN_PAIRS = TILE_TOKENS / 2,
    GROUP_PAIRS = 3 /* of tokens that are multiplied at a time */
};

/* Operands: [row or token of the pair][k of the quad], bf16. */
typedef uint16_t operand[8];

/* A subtile of a block to weights [8 quads][8 pairs of rows] without their scales.  A code line's lane holds, byte by
 * byte, k = 2|0, 6|4, 3|1, 7|5 (high and low nibble); with a row's low nibbles beside its high ones, even bytes are
 * k = 0..3, odd ones 4..7. */
static void decode_subtile(const uint8_t *codes, operand weights[QUADS][ROW_PAIRS])
{
    const struct decode_table table = decode_table();
    for (int line = 0; line < LINES; line++)
        for (int row = 0; row < SUBTILE_ROWS; row += LANES) {
            uint8x16_t packed = vld1q_u8(codes + line * LINE_BYTES + row * 4);
            uint32x4_t low = vreinterpretq_u32_u8(nibbles_low(packed));
            uint32x4_t high = vreinterpretq_u32_u8(nibbles_high(packed));
            uint16x8x2_t first = decode_even_odd(vreinterpretq_u8_u32(vzip1q_u32(low, high)), table);
            uint16x8x2_t second = decode_even_odd(vreinterpretq_u8_u32(vzip2q_u32(low, high)), table);
            for (int half = 0; half < 2; half++) {
                operand *quad = weights[2 * line + half];
                vst1q_u16(quad[row / 2], first.val[half]);
                vst1q_u16(quad[row / 2 + 1], second.val[half]);
            }
        }
}

/* x [16][n_tokens] pairs of k -> tokens [pair of tokens][8 quads] */
static void arrange_block(const uint32_t *x, int32_t n_tokens, operand tokens[TOKEN_PAIRS][QUADS])
{
    for (int quad = 0; quad < QUADS; quad++, x += 2 * n_tokens)
        for (int32_t t = 0; t < n_tokens; t += 2) {
            int32_t other = t + 1 < n_tokens ? t + 1 : t;
            const uint32_t pairs[4] = {x[t], x[n_tokens + t], x[other], x[n_tokens + other]};
            memcpy(tokens[t / 2][quad], pairs, sizeof pairs);
        }
}

static inline bfloat16x8_t load(const operand values)
{
    return vreinterpretq_bf16_u16(vld1q_u16(values));
}

/* sums[pair][0..7] += scales * (tokens . weights) for N_PAIRS pairs of tokens; a block's sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const operand weights[QUADS][ROW_PAIRS],
                                                           const uint8_t *scales, const operand tokens[][QUADS],
                                                           const int n_pairs, float32x4_t sums[][ROW_PAIRS])
{
    float32x4_t block[GROUP_PAIRS][ROW_PAIRS];
    for (int p = 0; p < n_pairs; p++)
        for (int r = 0; r < ROW_PAIRS; r++) block[p][r] = vdupq_n_f32(0);
    for (int quad = 0; quad < QUADS; quad++)
#pragma GCC unroll 8
        for (int r = 0; r < ROW_PAIRS; r++) {
            bfloat16x8_t w = load(weights[quad][r]);
#pragma GCC unroll 3
            for (int p = 0; p < n_pairs; p++) block[p][r] = vbfmmlaq_f32(block[p][r], load(tokens[p][quad]), w);
        }
    for (int r = 0; r < ROW_PAIRS; r += 2) {
        float32x4_t rows = load_scales(scales + 2 * r);
        float32x4_t first = vcombine_f32(vget_low_f32(rows), vget_low_f32(rows));
        float32x4_t second = vcombine_f32(vget_high_f32(rows), vget_high_f32(rows));
        for (int p = 0; p < n_pairs; p++) {
            sums[p][r] = vfmaq_f32(sums[p][r], block[p][r], first);
            sums[p][r + 1] = vfmaq_f32(sums[p][r + 1], block[p][r + 1], second);
        }
    }
}

static void multiply_group(const operand weights[QUADS][ROW_PAIRS], const uint8_t *scales,
                           const operand tokens[][QUADS], int32_t n_pairs, float32x4_t sums[][ROW_PAIRS])
{
    switch (n_pairs) {
    case 1: multiply(weights, scales, tokens, 1, sums); break;
    case 2: multiply(weights, scales, tokens, 2, sums); break;
    default: multiply(weights, scales, tokens, 3, sums); break;
    }
}

/* A subtile's sums, [pair of tokens][pair of rows] of 2 tokens x 2 rows, to sums [token][row]. */
static void spread_sums(const float32x4_t pairs[][ROW_PAIRS], int32_t n_tokens, float *sums)
{
    for (int32_t t = 0; t < n_tokens; t++, sums += PANEL_ROWS)
        for (int r = 0; r < ROW_PAIRS; r++) {
            float32x4_t both = pairs[t / 2][r];
            vst1_f32(sums + 2 * r, t % 2 ? vget_high_f32(both) : vget_low_f32(both));
        }
}

static void gemm_tile_neon_bf16(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                float *sums, struct read_ahead *ahead)
{
    (void)ahead;
    operand weights[QUADS][ROW_PAIRS] __attribute__((aligned(64)));
    operand tokens[TOKEN_PAIRS][QUADS] __attribute__((aligned(64)));
    float32x4_t pairs[SUBTILES][TOKEN_PAIRS][ROW_PAIRS];
    const int32_t n_pairs = (n_tokens + 1) / 2;
    memset(pairs, 0, sizeof pairs);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        arrange_block((const uint32_t *)(const void *)x, n_tokens, tokens);
        for (int subtile = 0; subtile < SUBTILES; subtile++) {
            decode_subtile(panel + CODES_OFFSET + subtile * SUBTILE_BYTES, weights);
            for (int32_t p = 0; p < n_pairs; p += GROUP_PAIRS) {
                int32_t group = n_pairs - p < GROUP_PAIRS ? n_pairs - p : GROUP_PAIRS;
                multiply_group(weights, panel + subtile * SUBTILE_ROWS, tokens + p, group, pairs[subtile] + p);
            }
        }
    }
    for (int subtile = 0; subtile < SUBTILES; subtile++)
        spread_sums(pairs[subtile], n_tokens, sums + subtile * SUBTILE_ROWS);
}

const struct kernel kernel_neon_bf16 = {.name = "gemm_neon_bf16",
                                        .order = "blocks of bfmmla, scaled by fma",
                                        .isa = MOE4_ISA_NEON_BF16,
                                        .tile_tokens = TILE_TOKENS,
                                        .run = PAIR,
                                        .gemm_tile = gemm_tile_neon_bf16};
