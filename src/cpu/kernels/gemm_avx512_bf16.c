/* AVX-512 with BF16.  Lanes are output rows; a lane holds two consecutive k.  Weights are decoded in registers,
 * straight from the packed lines, and multiplied at once: on 16 rows, a block of 32 k costs 28 decoding instructions,
 * whatever the number of tokens, and 16 dot products and two more instructions, which scale and add, a token.  No
 * decoded weight is ever stored.
 *
 * On Zen 4 dot products run on two of four vector ports.  With four tokens or more they are what takes time, and all
 * else is chosen to stay off these ports: vscalefps and an addition, where an fma would do the work of both but there,
 * and sums that stay in registers, since stores of vectors are in the way, too.  With fewer tokens all ports are busy,
 * and a multiplication by the scale, which has the same bits, spares those that shift and look up. */
#include <immintrin.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"

enum {
    LINES = 4,     /* code lines of a subtile in a block */
    PAIRS = 4,     /* pairs of k in a line */
    FEW_TOKENS = 3 /* those that do not keep the dot product's ports busy */
};

/* acc += w . x over pairs.  Written in assembler for the broadcast operand, which spares a register a token; volatile,
 * so that they stay in their order, which is as good as any and better than most that gcc finds. */
static inline __m512 dot_broadcast(__m512 acc, __m512i w, const uint32_t *x)
{
    __asm__ volatile("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}

/* One pass over a panel: N_SUB of its subtiles from `first` on, for N_TOKENS tokens.  Always inlined with constants, so
 * that sums and those of a block live in registers: N_SUB * N_TOKENS <= 12. */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const uint32_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums, struct read_ahead *ahead)
{
    const __m512i table = decode_table();
    const uint8_t *const end = panel + n_blocks * PANEL_BLOCK_BYTES;
    struct line_pair pair = ahead->pair;
    __m512 sum[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_setzero_ps();
    for (; panel < end; panel += PANEL_BLOCK_BYTES, x += LINES * PAIRS * n_tokens) {
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        __m512 block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_setzero_ps();
        read_on(ahead, &pair);
        read_pairs(&pair, 1);
        if (n_tokens <= FEW_TOKENS) prefetch_near(panel, 0, 1);
        UNROLL
        for (int line = 0; line < LINES; line++) {
            __m512i packed[4];
            read_pairs(&pair, pairs_ahead(n_sub, line));
            if (n_tokens <= FEW_TOKENS) prefetch_near(panel, 1 + line * LINES, LINES);
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES + line * LINE_BYTES);
            UNROLL
            for (int j = 0; j < PAIRS; j++) {
                __m512i w[4];
                UNROLL
                for (int s = 0; s < n_sub; s++) {
                    w[s] = decode_pair(packed[s], j, table);
                    if (n_tokens <= 2) __asm__ volatile("" : "+v"(w[s])); /* here, neither before nor after */
                }
                UNROLL
                for (int t = 0; t < n_tokens; t++) {
                    UNROLL
                    for (int s = 0; s < n_sub; s++)
                        block[s][t] = dot_broadcast(block[s][t], w[s], x + (line * PAIRS + j) * n_tokens + t);
                }
            }
        }
        for (int s = 0; s < n_sub; s++) {
            const uint8_t *scales = panel + (first + s) * SUBTILE_ROWS;
            const __m512 scale = n_tokens <= FEW_TOKENS ? load_scales(scales) : load_scale_exponents(scales);
            for (int t = 0; t < n_tokens; t++)
                sum[s][t] = _mm512_add_ps(sum[s][t], n_tokens <= FEW_TOKENS ? _mm512_mul_ps(block[s][t], scale)
                                                                            : _mm512_scalef_ps(block[s][t], scale));
        }
    }
    ahead->pair = pair;
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS, sum[s][t]);
}

#define TILE_X uint32_t
#include "cpu/kernels/tiles_template.h"

static void gemm_tile_avx512_bf16(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                  float *sums, struct read_ahead *ahead)
{
    tiles[n_tokens](panel, n_blocks, (const uint32_t *)(const void *)x, sums, ahead);
}

const struct kernel kernel_avx512_bf16 = {.name = "gemm_avx512_bf16",
                                          .order = "blocks of vdpbf16ps, scaled, added",
                                          .isa = MOE4_ISA_AVX512_BF16,
                                          .tile_tokens = 6,
                                          .run = PAIR,
                                          .gemm_tile = gemm_tile_avx512_bf16};
