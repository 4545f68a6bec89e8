/* AVX-512 without BF16.  As gemm_avx512_bf16.c (weights decoded in registers, lanes are output rows), but each decoded
 * pair is split into two f32 vectors, and activations are widened to f32 a block at a time. */
#include <immintrin.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/widen.h"

enum {
    LINES = 4, /* code lines of a subtile in a block */
    PAIRS = 4, /* pairs of k in a line */
    PREFETCH_BYTES = 8 * PANEL_BLOCK_BYTES
};

/* One pass over a panel: N_SUB of its subtiles from `first` on.  Always inlined with constants: N_SUB * N_TOKENS <= 24.
 */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const uint16_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums)
{
    const __m512i table = decode_table(), odd_half = _mm512_set1_epi32((int)0xFFFF0000);
    float wide[BLOCK_SIZE * TILE_TOKENS];
    __m512 acc[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) acc[s][t] = _mm512_setzero_ps();

    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        if (first == 0)
            for (int i = 0; i < PANEL_BLOCK_BYTES; i += LINE_BYTES)
                _mm_prefetch((const char *)panel + PREFETCH_BYTES + i, _MM_HINT_T0);
        widen_block(x, n_tokens, wide);
        __m512i scales[4];
        for (int s = 0; s < n_sub; s++) scales[s] = decode_scales(panel + (first + s) * SUBTILE_ROWS);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        const float *value = wide;
#pragma GCC unroll 1
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES)
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS; j++, value += 2 * n_tokens)
#pragma GCC unroll 4
                for (int s = 0; s < n_sub; s++) {
                    __m512i packed = _mm512_load_si512(codes + s * SUBTILE_BYTES);
                    __m512i pair = decode_pair(packed, j, table, scales[s]);
                    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pair, odd_half));
#pragma GCC unroll 12
                    for (int t = 0; t < n_tokens; t++) {
                        acc[s][t] = _mm512_fmadd_ps(even, _mm512_set1_ps(value[t]), acc[s][t]);
                        acc[s][t] = _mm512_fmadd_ps(odd, _mm512_set1_ps(value[n_tokens + t]), acc[s][t]);
                    }
                }
    }
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS, acc[s][t]);
}

#define GEMM_TILE(n)                                                                                                   \
    static void gemm_tile_##n(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, float *sums)                  \
    {                                                                                                                  \
        enum { N_SUB = (n) <= 6 ? 4 : 2 };                                                                             \
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

static void gemm_tile_avx512(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums)
{
    static void (*const tiles[])(const uint8_t *, int64_t, const uint16_t *, float *) = {
        NULL,        gemm_tile_1, gemm_tile_2, gemm_tile_3,  gemm_tile_4,  gemm_tile_5, gemm_tile_6,
        gemm_tile_7, gemm_tile_8, gemm_tile_9, gemm_tile_10, gemm_tile_11, gemm_tile_12};
    tiles[n_tokens](panel, n_blocks, x, sums);
}

const struct kernel kernel_avx512 = {"gemm_avx512", "f32 chain over k: fma", MOE4_ISA_AVX512, gemm_tile_avx512};
