/* AVX-512 without BF16.  As gemm_avx512_bf16.c (weights decoded in registers, lanes are output rows, a block's sums
 * scaled at its end), but each decoded pair is split into two f32 vectors, and activations are widened to f32 a block
 * at a time. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/widen.h"

enum {
    LINES = 4,          /* code lines of a subtile in a block */
    PAIRS = 4,          /* pairs of k in a line */
    MOST_KEPT_SUMS = 12 /* vectors of sums that fit the registers beside those of a block */
};

/* acc += w * x.  Written in assembler for the broadcast operand, which spares a register a token. */
static inline __m512 fma_broadcast(__m512 acc, __m512 w, const float *x)
{
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}

/* One pass over a panel: N_SUB of its subtiles from `first` on.  Always inlined with constants: N_SUB * N_TOKENS <= 24.
 */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const uint16_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums)
{
    const __m512i table = decode_table(), odd_half = _mm512_set1_epi32((int)0xFFFF0000);
    const int is_kept = n_sub * n_tokens <= MOST_KEPT_SUMS;
    struct wide_block wide;
    __m512 sum[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        if (first == 0) prefetch_far(panel, 0, 1);
        if (n_tokens == 1) prefetch_near(panel, 0, 1);
        widen_block(x, n_tokens, 1.0f, &wide);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        const float *even = wide.even, *odd = wide.odd;
        __m512 block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int line = 0; line < LINES;
             line++, codes += LINE_BYTES, even += PAIRS * n_tokens, odd += PAIRS * n_tokens) {
            __m512i packed[4];
            if (first == 0) prefetch_far(panel, 1 + line * LINES, LINES);
            if (n_tokens == 1) prefetch_near(panel, 1 + line * LINES, LINES);
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES);
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS; j++)
#pragma GCC unroll 4
                for (int s = 0; s < n_sub; s++) {
                    __m512i pair = decode_pair(packed[s], j, table);
                    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pair, odd_half));
#pragma GCC unroll 12
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = fma_broadcast(block[s][t], low, even + j * n_tokens + t);
#pragma GCC unroll 12
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = fma_broadcast(block[s][t], high, odd + j * n_tokens + t);
                }
        }
        /* Sums that do not fit the registers stay in memory: the compiler shall not keep them on the stack instead. */
        if (!is_kept) __asm__ volatile("" ::: "memory");
        for (int s = 0; s < n_sub; s++) {
            const __m512 scales = load_scales(panel + (first + s) * SUBTILE_ROWS);
            for (int t = 0; t < n_tokens; t++) {
                float *stored = sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS;
                sum[s][t] = _mm512_fmadd_ps(block[s][t], scales, is_kept ? sum[s][t] : _mm512_load_ps(stored));
                if (!is_kept) _mm512_store_ps(stored, sum[s][t]);
            }
        }
    }
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; is_kept && t < n_tokens; t++)
            _mm512_store_ps(sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS, sum[s][t]);
}

#define TILE_X      uint16_t
#define N_SUB_OF(n) ((n) <= 3 ? 4 : 2)
#include "cpu/kernels/tiles_template.h"

static void gemm_tile_avx512(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums)
{
    if (n_tokens > 6) memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    tiles[n_tokens](panel, n_blocks, x, sums);
}

const struct kernel kernel_avx512 = {.name = "gemm_avx512",
                                     .order = "blocks of fma over k, scaled by fma",
                                     .isa = MOE4_ISA_AVX512,
                                     .tile_tokens = 6,
                                     .gemm_tile = gemm_tile_avx512};
