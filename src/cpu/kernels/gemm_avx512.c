/* AVX-512 without BF16.  As gemm_avx512_bf16.c (weights decoded in registers, lanes are output rows, a block's sums
 * scaled at its end), but each decoded pair is split into two f32 vectors, and activations are widened to f32 a block
 * at a time. */
#include <immintrin.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"
#include "cpu/kernels/widen.h"

enum {
    LINES = 4, /* code lines of a subtile in a block */
    PAIRS = 4  /* pairs of k in a line */
};

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
    const __m512i table = decode_table(), odd_half = _mm512_set1_epi32((int)0xFFFF0000);
    const uint8_t *const end = panel + n_blocks * PANEL_BLOCK_BYTES;
    uintptr_t at = ahead->at;
    struct wide_block wide;
    __m512 sum[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_setzero_ps();
    for (; panel < end; panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        at = read_lines(read_on(ahead, at), 1);
        if (n_tokens == 1) prefetch_near(panel, 0, 1);
        widen_block(x, n_tokens, &wide);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        __m512 block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_setzero_ps();
        UNROLL
        for (int line = 0; line < LINES; line++) {
            const float *even = wide.even + line * PAIRS * n_tokens, *odd = wide.odd + line * PAIRS * n_tokens;
            __m512i packed[4];
            at = read_lines(at, lines_ahead(n_sub));
            if (n_tokens == 1) prefetch_near(panel, 1 + line * LINES, LINES);
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES + line * LINE_BYTES);
            UNROLL
            for (int j = 0; j < PAIRS; j++) {
                UNROLL
                for (int s = 0; s < n_sub; s++) {
                    __m512i pair = decode_pair(packed[s], j, table);
                    __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
                    __m512 high = _mm512_castsi512_ps(_mm512_and_si512(pair, odd_half));
                    UNROLL
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = fma_broadcast(block[s][t], low, even + j * n_tokens + t);
                    UNROLL
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = fma_broadcast(block[s][t], high, odd + j * n_tokens + t);
                }
            }
        }
        for (int s = 0; s < n_sub; s++) {
            const __m512 scales = load_scales(panel + (first + s) * SUBTILE_ROWS);
            for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_fmadd_ps(block[s][t], scales, sum[s][t]);
        }
    }
    ahead->at = at;
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
                                     .gemm_tile = gemm_tile_avx512};
