/* AVX-512 with BF16.  Lanes are output rows; a lane holds two consecutive k.  Weights are decoded in registers,
 * straight from the packed lines, and multiplied at once: on 16 rows, a block of 32 k costs 28 decoding instructions,
 * whatever the number of tokens, and 16 dot products and one scaling fma a token.
 *
 * For many tiles of an expert, weights are decoded once, together with their scale, and stored for all of them.  That
 * is exact, and so are the products: a block's sum is then the unscaled sum times the scale to the last bit, and adding
 * it is what the fma does; but on Zen 4 additions, unlike that, run beside dot products.
 *
 * Tried and lost: putting the scale into the weights' exponents by saturating subtraction, which saves the fma and lets
 * a sum stay in its register for all of K.  On Zen 4 that instruction runs only where dot products do, and two plain
 * ones instead (max, subtract) cost 3 tokens' worth of dot products a block. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"

enum {
    LINES = 4,          /* code lines of a subtile in a block */
    PAIRS = 4,          /* pairs of k in a line */
    MOST_KEPT_SUMS = 12 /* vectors of sums that fit the registers beside those of a block */
};

/* acc += w . x over pairs.  Written in assembler for the broadcast operand, which spares a register a token. */
static inline __m512 dot_broadcast(__m512 acc, __m512i w, const uint32_t *x)
{
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}

/* One pass over a panel: N_SUB of its subtiles from `first` on, for N_TOKENS tokens.  Always inlined with constants, so
 * that a block's sums live in registers: N_SUB * N_TOKENS <= 24. */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const uint32_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums)
{
    const __m512i table = decode_table();
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES) {
        if (first == 0) prefetch_block(panel);
        if (n_tokens == 1) prefetch_block_near(panel);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        __m512 block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_setzero_ps();
#pragma GCC unroll 1
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES, x += PAIRS * n_tokens) {
            __m512i packed[4];
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES);
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS; j++)
#pragma GCC unroll 4
                for (int s = 0; s < n_sub; s++) {
                    __m512i w = decode_pair(packed[s], j, table);
#pragma GCC unroll 12
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = dot_broadcast(block[s][t], w, x + j * n_tokens + t);
                }
        }
        /* Sums that do not fit the registers stay in memory: the compiler shall not keep them on the stack instead. */
        if (n_sub * n_tokens > MOST_KEPT_SUMS) __asm__ volatile("" ::: "memory");
        for (int s = 0; s < n_sub; s++) {
            const __m512 scales = load_scales(panel + (first + s) * SUBTILE_ROWS);
            for (int t = 0; t < n_tokens; t++) {
                float *sum = sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS;
                _mm512_store_ps(sum, _mm512_fmadd_ps(block[s][t], scales, _mm512_load_ps(sum)));
            }
        }
    }
}

/* Up to 5 tokens all 64 rows fit the registers; more take the panel in two halves.  6 would fit, too, but with all
 * registers taken gcc's code is slower by 8 %. */
#define GEMM_TILE(n)                                                                                                   \
    static void gemm_tile_##n(const uint8_t *panel, int64_t n_blocks, const uint32_t *x, float *sums)                  \
    {                                                                                                                  \
        enum { N_SUB = (n) <= 5 ? 4 : 2 };                                                                             \
        for (int first = 0; first < 4; first += N_SUB) pass(panel, n_blocks, x, n, first, N_SUB, sums);                \
    }
GEMM_TILE(1)
GEMM_TILE(2)
GEMM_TILE(3)
GEMM_TILE(4)
GEMM_TILE(5)
GEMM_TILE(6)
GEMM_TILE(7)
GEMM_TILE(8)
GEMM_TILE(9)
GEMM_TILE(10)
GEMM_TILE(11)
GEMM_TILE(12)

static void gemm_tile_avx512_bf16(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                  float *sums)
{
    static void (*const tiles[])(const uint8_t *, int64_t, const uint32_t *, float *) = {
        NULL,        gemm_tile_1, gemm_tile_2, gemm_tile_3,  gemm_tile_4,  gemm_tile_5, gemm_tile_6,
        gemm_tile_7, gemm_tile_8, gemm_tile_9, gemm_tile_10, gemm_tile_11, gemm_tile_12};
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    tiles[n_tokens](panel, n_blocks, (const uint32_t *)(const void *)x, sums);
}

/* ---- Many tiles -------------------------------------------------------------------------------------------------- */

enum {
    HALF = 2,        /* subtiles taken together, so that the sums of MOST_TOKENS stay in registers */
    MOST_TOKENS = 7, /* of a tile */
    RUN_BLOCKS = 30, /* decoded at a time, 60 KiB: the second-level cache holds them */
    BLOCK_VECTORS = LINES * PAIRS * HALF
};

/* The value of each code times 2^(SCALE_MODERATE_MAX - 127); -0 becomes 0, which makes no difference to a sum. */
static inline __m512i upscaled_table(void)
{
    const __m512i table = decode_table();
    const __mmask32 nonzero = _mm512_test_epi16_mask(table, _mm512_set1_epi16(0x7FFF));
    return _mm512_maskz_add_epi16(nonzero, table, _mm512_set1_epi16((SCALE_MODERATE_MAX - 127) << 7));
}

/* By how much the exponents of 16 rows' upscaled weights are too large; more than 2^31 where they are too small. */
static inline __m512i load_excess(const uint8_t *scales)
{
    __m512i exponents = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
    return _mm512_sub_epi32(_mm512_set1_epi32(SCALE_MODERATE_MAX), exponents);
}

/* The same as bits of bf16, in both halves of a lane. */
static inline __m512i excess_bits(__m512i excess)
{
    return _mm512_or_si512(_mm512_slli_epi32(excess, 7), _mm512_slli_epi32(excess, 23));
}

/* weights - excess, but 0 stays 0.  On Zen 4 max and subtract run on any port, the saturating subtraction that gcc
 * would make of them only where dot products do. */
static inline __m512i scale_pair(__m512i weights, __m512i excess)
{
    weights = _mm512_max_epu16(weights, excess);
    __asm__("" : "+v"(weights));
    return _mm512_sub_epi16(weights, excess);
}

/* Sums of 32 rows, from panel row 16 * FIRST on, and N_TOKENS tokens += those of a run of blocks.  Its weights are
 * decoded and stored if DECODES, else they were before.  Returns whether the scales are moderate, without which nothing
 * else holds.  Always inlined with constants. */
static inline __attribute__((always_inline)) int run_pass(const int decodes, const uint8_t *panel, int32_t first,
                                                          int64_t n_blocks, const uint32_t *x, const int n_tokens,
                                                          __m512i *weights, float *sums)
{
    const __m512i table = upscaled_table();
    __m512 sum[MOST_TOKENS][HALF], block[MOST_TOKENS][HALF];
    __m512i excess[HALF] = {table, table}, packed[HALF] = {table, table}, most = _mm512_setzero_si512();
    for (int t = 0; t < n_tokens; t++)
        for (int s = 0; s < HALF; s++) sum[t][s] = _mm512_load_ps(sums + t * PANEL_ROWS + s * SUBTILE_ROWS);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES) {
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        if (decodes && first == 0) prefetch_block(panel);
        for (int s = 0; s < HALF; s++) {
            if (decodes) {
                excess[s] = load_excess(panel + (first + s) * SUBTILE_ROWS);
                most = _mm512_max_epu32(most, excess[s]);
                excess[s] = excess_bits(excess[s]);
            }
            for (int t = 0; t < n_tokens; t++) block[t][s] = _mm512_setzero_ps();
        }
#pragma GCC unroll 4
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            for (int s = 0; s < HALF; s++)
                if (decodes) packed[s] = load_line(codes + s * SUBTILE_BYTES);
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS; j++, weights += HALF, x += n_tokens) {
                __m512i w[HALF];
#pragma GCC unroll 2
                for (int s = 0; s < HALF; s++) {
                    w[s] = decodes ? scale_pair(decode_pair(packed[s], j, table), excess[s]) : weights[s];
                    if (decodes) weights[s] = w[s];
                    __asm__("" : "+v"(w[s])); /* gcc would load it once a token */
                }
#pragma GCC unroll 7
                for (int t = 0; t < n_tokens; t++)
#pragma GCC unroll 2
                    for (int s = 0; s < HALF; s++) block[t][s] = dot_broadcast(block[t][s], w[s], x + t);
            }
        }
        for (int t = 0; t < n_tokens; t++)
            for (int s = 0; s < HALF; s++) sum[t][s] = _mm512_add_ps(sum[t][s], block[t][s]);
    }
    for (int t = 0; t < n_tokens; t++)
        for (int s = 0; s < HALF; s++) _mm512_store_ps(sums + t * PANEL_ROWS + s * SUBTILE_ROWS, sum[t][s]);
    return !_mm512_cmpgt_epu32_mask(most, _mm512_set1_epi32(SCALE_MODERATE_MAX - SCALE_MODERATE_MIN));
}

#define RUN_TILE(n)                                                                                                    \
    static int decode_run_##n(const uint8_t *panel, int32_t first, int64_t n_blocks, const uint32_t *x,                \
                              __m512i *weights, float *sums)                                                           \
    {                                                                                                                  \
        return run_pass(1, panel, first, n_blocks, x, n, weights, sums);                                               \
    }                                                                                                                  \
    static int stored_run_##n(const uint8_t *panel, int32_t first, int64_t n_blocks, const uint32_t *x,                \
                              __m512i *weights, float *sums)                                                           \
    {                                                                                                                  \
        return run_pass(0, panel, first, n_blocks, x, n, weights, sums);                                               \
    }
RUN_TILE(1)
RUN_TILE(2)
RUN_TILE(3)
RUN_TILE(4)
RUN_TILE(5)
RUN_TILE(6)
RUN_TILE(7)

typedef int run_tile_fn(const uint8_t *panel, int32_t first, int64_t n_blocks, const uint32_t *x, __m512i *weights,
                        float *sums);

static int gemm_tiles_avx512_bf16(const uint8_t *panel, int64_t n_blocks, const struct gemm_operand *tiles,
                                  int32_t n_tiles, float *sums)
{
    static run_tile_fn *const decode[] = {NULL,         decode_run_1, decode_run_2, decode_run_3,
                                          decode_run_4, decode_run_5, decode_run_6, decode_run_7};
    static run_tile_fn *const stored[] = {NULL,         stored_run_1, stored_run_2, stored_run_3,
                                          stored_run_4, stored_run_5, stored_run_6, stored_run_7};
    __m512i weights[RUN_BLOCKS * BLOCK_VECTORS];
    int32_t n_rows = 0;
    for (int32_t i = 0; i < n_tiles; i++) n_rows += tiles[i].n_tokens;
    memset(sums, 0, (size_t)n_rows * PANEL_ROWS * sizeof *sums);
    for (int32_t first = 0; first < PANEL_ROWS / SUBTILE_ROWS; first += HALF)
        for (int64_t b = 0; b < n_blocks; b += RUN_BLOCKS) {
            const uint8_t *run = panel + b * PANEL_BLOCK_BYTES;
            const int64_t n = n_blocks - b < RUN_BLOCKS ? n_blocks - b : RUN_BLOCKS;
            float *sum = sums + first * SUBTILE_ROWS;
            for (int32_t i = 0; i < n_tiles; i++) {
                const int32_t n_tokens = tiles[i].n_tokens;
                const uint16_t *x = tiles[i].x + b * BLOCK_SIZE * n_tokens;
                run_tile_fn *multiply = (i ? stored : decode)[n_tokens];
                if (!multiply(run, first, n, (const uint32_t *)(const void *)x, weights, sum)) return 0;
                sum += n_tokens * PANEL_ROWS;
            }
        }
    return 1;
}

const struct kernel kernel_avx512_bf16 = {.name = "gemm_avx512_bf16",
                                          .order = "blocks of vdpbf16ps, scaled by fma",
                                          .isa = MOE4_ISA_AVX512_BF16,
                                          .tile_tokens = MOST_TOKENS,
                                          .gemm_tile = gemm_tile_avx512_bf16,
                                          .many_tiles = 5,
                                          .gemm_tiles = gemm_tiles_avx512_bf16};
