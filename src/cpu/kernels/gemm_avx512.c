/* AVX-512 without BF16 and VNNI.  As gemm_avx512_bf16.c (weights decoded in registers, lanes are output rows, a
 * block's sums scaled at its end), but codes are looked up as f32, 16 rows of one k, and activations are widened to f32
 * a block at a time. */
#include <immintrin.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"
#include "cpu/kernels/widen.h"

enum {
    LINES = 4, /* code lines of a subtile in a block */
    LINE_K = 8
};

/* What vpermps finds by the lowest 4 bits of a lane. */
static inline __m512 f32_table(void)
{
    return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

/* Element k of a line's eight, of 16 rows. */
static inline __m512 decode_k(__m512i codes, int k, __m512 table)
{
    const unsigned at = (unsigned)(k / 2 * 4 + k % 2 * 16);
    return _mm512_permutexvar_ps(at ? _mm512_srli_epi32(codes, at) : codes, table);
}

/* acc += w * x.  Written in assembler for the broadcast operand, which spares a register a token. */
static inline __m512 fma_broadcast(__m512 acc, __m512 w, const float *x)
{
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}

/* One pass over a panel: N_SUB of its subtiles from `first` on.  Always inlined with constants, so that sums and those
 * of a block live in registers: N_SUB * N_TOKENS <= 12. */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const uint16_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums, struct read_ahead *ahead)
{
    const __m512 table = f32_table();
    const uint8_t *const end = panel + n_blocks * PANEL_BLOCK_BYTES;
    struct line_pair pair = ahead->pair;
    struct wide_block wide;
    __m512 sum[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_setzero_ps();
    for (; panel < end; panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        read_on(ahead, &pair);
        read_pairs(&pair, 1);
        if (n_tokens == 1) prefetch_near(panel, 0, 1);
        widen_block(x, n_tokens, &wide);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        __m512 block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_setzero_ps();
        UNROLL
        for (int line = 0; line < LINES; line++) {
            __m512i packed[4];
            read_pairs(&pair, pairs_ahead(n_sub, line));
            if (n_tokens == 1) prefetch_near(panel, 1 + line * LINES, LINES);
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES + line * LINE_BYTES);
            UNROLL
            for (int k = 0; k < LINE_K; k++) {
                const float *value = (k % 2 ? wide.odd : wide.even) + (line * LINE_K + k) / 2 * n_tokens;
                UNROLL
                for (int s = 0; s < n_sub; s++) {
                    const __m512 w = decode_k(packed[s], k, table);
                    UNROLL
                    for (int t = 0; t < n_tokens; t++) block[s][t] = fma_broadcast(block[s][t], w, value + t);
                }
            }
        }
        for (int s = 0; s < n_sub; s++) {
            const __m512 scales = load_scales(panel + (first + s) * SUBTILE_ROWS);
            for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_fmadd_ps(block[s][t], scales, sum[s][t]);
        }
    }
    ahead->pair = pair;
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS, sum[s][t]);
}

#define TILE_X uint16_t
#include "cpu/kernels/tiles_template.h"

static void gemm_tile_avx512(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                             struct read_ahead *ahead)
{
    tiles[n_tokens](panel, n_blocks, x, sums, ahead);
}

const struct kernel kernel_avx512 = {.name = "gemm_avx512",
                                     .order = "blocks of fma over k, scaled by fma",
                                     .isa = MOE4_ISA_AVX512,
                                     .tile_tokens = 6,
                                     .run = PAIR,
                                     .gemm_tile = gemm_tile_avx512};
