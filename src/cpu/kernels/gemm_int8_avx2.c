/* int8 compute with AVX2.  Lanes are output rows; a lane holds four k.  Eight rows of a block are decoded into eight
 * registers and multiplied by one token after another: vpmaddubsw multiplies bytes and adds pairs to 16 bits, 2 * 24 *
 * 127 at most, so four of them are added before they are widened.  A token costs 8 of those and 13 instructions
 * besides. */
#include <immintrin.h>
#include <string.h>

#include "cpu/int8.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/layout.h"

enum { LANES = 8, GROUPS = PANEL_ROWS / LANES, LINES = 4, HALF_WORDS = INT8_CODE_WORDS / 2 };

/* 2w + 12 of eight rows' codes in a block: weights[2 * line + j] holds half j of the line's bytes. */
static inline void decode_group(const uint8_t *codes, __m256i weights[INT8_CODE_WORDS])
{
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int line = 0; line < LINES; line++) {
        __m256i packed = _mm256_load_si256((const __m256i *)(codes + line * LINE_BYTES));
        weights[2 * line] = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, low));
        weights[2 * line + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), low));
    }
}

/* Half of eight rows' scales, E8M0 bytes 1..254: subnormal for 1. */
static inline __m256 load_half_scales(const uint8_t *scales)
{
    __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(bytes, _mm256_set1_epi32(1)), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)));
}

/* Products of four words, added up in pairs of bytes and then in fours. */
static inline __m256i multiply_half(const __m256i weights[HALF_WORDS], const int32_t *x, int32_t ldx)
{
    __m256i pairs = _mm256_maddubs_epi16(weights[0], _mm256_set1_epi32(x[0]));
    for (int word = 1; word < HALF_WORDS; word++)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[word], _mm256_set1_epi32(x[word * ldx])));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* sums[t][0..7] += a block of eight rows times every token, x [INT8_BLOCK_WORDS][n_tokens]. */
static inline void multiply_group(const __m256i weights[INT8_CODE_WORDS], __m256 half_scales, const int32_t *x,
                                  int32_t n_tokens, float *sums)
{
    const int32_t *start = x + INT8_CODE_WORDS * n_tokens, *scales = start + n_tokens;
    for (int32_t t = 0; t < n_tokens; t++, sums += PANEL_ROWS) {
        __m256i first = multiply_half(weights, x + t, n_tokens);
        __m256i second = multiply_half(weights + HALF_WORDS, x + HALF_WORDS * n_tokens + t, n_tokens);
        __m256i block = _mm256_add_epi32(_mm256_add_epi32(first, _mm256_set1_epi32(start[t])), second);
        __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(block), half_scales);
        __m256 scale = _mm256_castsi256_ps(_mm256_set1_epi32(scales[t]));
        _mm256_store_ps(sums, _mm256_fmadd_ps(value, scale, _mm256_load_ps(sums)));
    }
}

static void gemm_tile_int8_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                float *sums, struct read_ahead *ahead)
{
    const int32_t *words = (const int32_t *)(const void *)x;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, words += INT8_BLOCK_WORDS * n_tokens) {
        uintptr_t at = read_lines(read_on(ahead, ahead->at), 1);
        for (int group = 0; group < GROUPS; group++) {
            __m256i weights[INT8_CODE_WORDS];
            at = read_lines(at, 2);
            decode_group(panel + CODES_OFFSET + group / 2 * SUBTILE_BYTES + group % 2 * (LINE_BYTES / 2), weights);
            multiply_group(weights, load_half_scales(panel + group * LANES), words, n_tokens, sums + group * LANES);
        }
        ahead->at = at;
    }
}

const struct kernel kernel_int8_avx2 = {.name = "gemm_int8_avx2",
                                        .order = "exact blocks of int8, scaled by fma",
                                        .isa = MOE4_ISA_AVX2,
                                        .tile_tokens = TILE_TOKENS,
                                        .gemm_tile = gemm_tile_int8_avx2};
