/* int8 compute with AVX2.  Lanes are output rows; a lane holds four k.  vpmaddubsw multiplies bytes and adds pairs to
 * 16 bits: 2 * 24 * 127 at most, so four of them fit before they are widened. */
#include <immintrin.h>

#include "cpu/int8.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

enum { LANES = 8, GROUPS = PANEL_ROWS / LANES, LINES = 4, LINES_A_SUM = 2, GROUP_TOKENS = 4 };

/* 2w + 12 of each code. */
static inline __m256i int8_table(void)
{
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* Half j of the lanes' bytes. */
static inline __m256i decode_half(__m256i codes, int j, __m256i table)
{
    __m256i index = j ? _mm256_srli_epi16(codes, 4) : codes;
    return _mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi8(15)));
}

/* Half of eight rows' scales, E8M0 bytes 1..254: subnormal for 1. */
static inline __m256 load_half_scales(const uint8_t *scales)
{
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(bytes, _mm256_set1_epi32(1)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

/* Eight rows of a panel, those of `group`, for N_TOKENS of the ld tokens of a tile: sums stay in registers. */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const int32_t *x,
                                                       int32_t ld, const int n_tokens, int group, float *sums)
{
    const __m256i table = int8_table(), ones = _mm256_set1_epi16(1);
    const uint8_t *codes = panel + CODES_OFFSET + group / 2 * SUBTILE_BYTES + group % 2 * (LINE_BYTES / 2);
    const uint8_t *scales = panel + group * LANES;
    __m256 sum[GROUP_TOKENS];
    for (int t = 0; t < n_tokens; t++) sum[t] = _mm256_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++, codes += PANEL_BLOCK_BYTES, scales += PANEL_BLOCK_BYTES) {
        const int32_t *word = x + b * INT8_BLOCK_WORDS * ld, *start = word + INT8_CODE_WORDS * ld;
        __m256i block[GROUP_TOKENS];
        for (int t = 0; t < n_tokens; t++) block[t] = _mm256_set1_epi32(start[t]);
#pragma GCC unroll 2
        for (int line = 0; line < LINES; line += LINES_A_SUM) {
            __m256i pairs[GROUP_TOKENS];
            for (int t = 0; t < n_tokens; t++) pairs[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
            for (int i = 0; i < 2 * LINES_A_SUM; i++, word += ld) {
                __m256i packed = _mm256_load_si256((const __m256i *)(codes + (line + i / 2) * LINE_BYTES));
                __m256i w = decode_half(packed, i % 2, table);
#pragma GCC unroll 4
                for (int t = 0; t < n_tokens; t++)
                    pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(w, _mm256_set1_epi32(word[t])));
            }
            for (int t = 0; t < n_tokens; t++) block[t] = _mm256_add_epi32(block[t], _mm256_madd_epi16(pairs[t], ones));
        }
        const __m256 half_scales = load_half_scales(scales);
        for (int t = 0; t < n_tokens; t++) {
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(block[t]), half_scales);
            sum[t] = _mm256_fmadd_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(start[ld + t])), sum[t]);
        }
    }
    for (int t = 0; t < n_tokens; t++) _mm256_store_ps(sums + t * PANEL_ROWS + group * LANES, sum[t]);
}

static void pass_tokens(const uint8_t *panel, int64_t n_blocks, const int32_t *x, int32_t ld, int32_t n_tokens,
                        int group, float *sums)
{
    switch (n_tokens) {
    case 1: pass(panel, n_blocks, x, ld, 1, group, sums); break;
    case 2: pass(panel, n_blocks, x, ld, 2, group, sums); break;
    case 3: pass(panel, n_blocks, x, ld, 3, group, sums); break;
    default: pass(panel, n_blocks, x, ld, 4, group, sums); break;
    }
}

static void gemm_tile_int8_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                float *sums)
{
    const int32_t *words = (const int32_t *)(const void *)x;
    for (int group = 0; group < GROUPS; group++)
        for (int32_t t = 0; t < n_tokens; t += GROUP_TOKENS) {
            int32_t n = n_tokens - t < GROUP_TOKENS ? n_tokens - t : GROUP_TOKENS;
            pass_tokens(panel, n_blocks, words + t, n_tokens, n, group, sums + t * PANEL_ROWS);
        }
}

const struct kernel kernel_int8_avx2 = {.name = "gemm_int8_avx2",
                                        .order = "exact blocks of int8, scaled by fma",
                                        .isa = MOE4_ISA_AVX2,
                                        .tile_tokens = TILE_TOKENS,
                                        .gemm_tile = gemm_tile_int8_avx2};
