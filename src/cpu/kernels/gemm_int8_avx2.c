/* int8 compute with AVX2.  Lanes are output rows; a lane holds four k.  vpmaddubsw multiplies bytes and adds pairs to
 * 16 bits.  All products of a block are added up there, modulo 2^16, from -12 times the sum of the activations on: the
 * sum of 16 weights, -12 to 12, times 127 is at most 24384, so it is right in the end, whatever it was between.  A
 * token costs 8 rows 20 instructions of arithmetic, for which there are four ports.
 *
 * Up to three tokens meet weights decoded in registers; more take 16 rows of a block that is decoded to memory, up to 6
 * of them at once: a broadcast serves two products, a weight six. */
#include <immintrin.h>
#include <string.h>

#include "cpu/int8.h"
#include "cpu/kernels/decode_avx2.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/unroll.h"
#include "cpu/layout.h"

enum { FEW_TOKENS = 3, GROUP_TOKENS = 6 };

/* 2w + 12 of 16 rows in a block, four k a lane. */
typedef __m256i subtile_weights[INT8_CODE_WORDS][HALVES];

/* Meanwhile asks for as much of what comes: a pair of lines at a time, since the codes come from the second level, and
 * would wait behind requests for all of it. */
APART void decode_block(const uint8_t *codes, struct line_pair ahead, subtile_weights weights[SUBTILES])
{
    for (int s = 0; s < SUBTILES; s++)
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            read_pairs(&ahead, line % 2);
            for (int h = 0; h < HALVES; h++)
                decode_half_line(codes + h * LINE_BYTES / HALVES, &weights[s][2 * line][h],
                                 &weights[s][2 * line + 1][h]);
        }
}

/* Half of the scales, E8M0 bytes 1..254: subnormal for 1. */
static inline void decode_scales(const uint8_t *scales, panel_scales halves)
{
    for (int i = 0; i < SUBTILES * HALVES; i++) {
        __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + i * LANES)));
        __m256i bits = _mm256_slli_epi32(_mm256_sub_epi32(bytes, _mm256_set1_epi32(1)), 23);
        halves[i / HALVES][i % HALVES] = _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x00400000)));
    }
}

/* Left to itself, gcc adds up products first, and runs out of registers. */
static inline __m256i multiply_word(__m256i sum, __m256i w, int32_t x)
{
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, _mm256_set1_epi32(x)));
    __asm__("" : "+x"(sum));
    return sum;
}

struct sums {
    __m256i of[GROUP_TOKENS][HALVES];
};

/* x is [INT8_BLOCK_WORDS][ldx] words of the tile.  Always inlined with a constant number of tokens, like all that takes
 * them: sums stay in registers. */
static inline __attribute__((always_inline)) void sums_begin(const int32_t *x, int32_t ldx, const int n_tokens,
                                                             struct sums *block)
{
    UNROLL
    for (int t = 0; t < n_tokens; t++)
        for (int h = 0; h < HALVES; h++) block->of[t][h] = _mm256_set1_epi32(x[(INT8_CODE_WORDS + 2) * ldx + t]);
}

static inline __attribute__((always_inline)) void sums_add(const struct sums *block, const int32_t *x, int32_t ldx,
                                                           const __m256 half_scales[HALVES], const int n_tokens,
                                                           float *sums)
{
    const float *scales = (const float *)(const void *)(x + (INT8_CODE_WORDS + 1) * ldx);
    UNROLL
    for (int t = 0; t < n_tokens; t++, sums += PANEL_ROWS) {
        const __m256 scale = _mm256_broadcast_ss(scales + t);
        UNROLL
        for (int h = 0; h < HALVES; h++) {
            const __m256i sum = _mm256_madd_epi16(block->of[t][h], _mm256_set1_epi16(1));
            const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), half_scales[h]);
            _mm256_store_ps(sums + h * LANES, _mm256_fmadd_ps(value, scale, _mm256_load_ps(sums + h * LANES)));
        }
    }
}

/* sums[t][64 rows] += a block of a panel times n_tokens tokens. */
static inline __attribute__((always_inline)) void multiply(const subtile_weights *weights, panel_scales half_scales,
                                                           const int32_t *x, int32_t ldx, const int n_tokens,
                                                           float *sums)
{
    for (int s = 0; s < SUBTILES; s++, sums += SUBTILE_ROWS) {
        const int32_t *word = x;
        struct sums block;
        sums_begin(x, ldx, n_tokens, &block);
        UNROLL
        for (int i = 0; i < INT8_CODE_WORDS; i++, word += ldx) {
            const __m256i first = weights[s][i][0], second = weights[s][i][1];
            __asm__("" : "+r"(word)); /* one pointer, not one for every word */
            UNROLL
            for (int t = 0; t < n_tokens; t++) {
                block.of[t][0] = multiply_word(block.of[t][0], first, word[t]);
                block.of[t][1] = multiply_word(block.of[t][1], second, word[t]);
            }
        }
        sums_add(&block, x, ldx, half_scales[s], n_tokens, sums);
    }
}

/* The same of all of a tile, from codes. */
static inline __attribute__((always_inline)) void multiply_codes(const uint8_t *codes, struct line_pair ahead,
                                                                 panel_scales half_scales, const int32_t *x,
                                                                 const int n_tokens, float *sums)
{
    for (int s = 0; s < SUBTILES; s++, sums += SUBTILE_ROWS) {
        struct sums block;
        sums_begin(x, n_tokens, n_tokens, &block);
        UNROLL
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            const int32_t *word = x + 2 * line * n_tokens;
            read_pairs(&ahead, line % 2);
            UNROLL
            for (int h = 0; h < HALVES; h++) {
                __m256i first, second;
                decode_half_line(codes + h * LINE_BYTES / HALVES, &first, &second);
                UNROLL
                for (int t = 0; t < n_tokens; t++) {
                    block.of[t][h] = multiply_word(block.of[t][h], first, word[t]);
                    block.of[t][h] = multiply_word(block.of[t][h], second, word[n_tokens + t]);
                }
            }
        }
        sums_add(&block, x, n_tokens, half_scales[s], n_tokens, sums);
    }
}

#define MULTIPLY_FEW(N)                                                                                                \
    APART void multiply_few_##N(const uint8_t *codes, struct line_pair ahead, panel_scales half_scales,                \
                                const int32_t *x, float *sums)                                                         \
    {                                                                                                                  \
        multiply_codes(codes, ahead, half_scales, x, N, sums);                                                         \
    }
MULTIPLY_FEW(1)
MULTIPLY_FEW(2)
MULTIPLY_FEW(3)

static void (*const multiply_few[])(const uint8_t *, struct line_pair, panel_scales, const int32_t *,
                                    float *) = {NULL, multiply_few_1, multiply_few_2, multiply_few_3};

#define MULTIPLY_GROUP(N)                                                                                              \
    APART void multiply_##N(const subtile_weights *weights, panel_scales half_scales, const int32_t *x, int32_t ldx,   \
                            float *sums)                                                                               \
    {                                                                                                                  \
        multiply(weights, half_scales, x, ldx, N, sums);                                                               \
    }
MULTIPLY_GROUP(3)
MULTIPLY_GROUP(4)
MULTIPLY_GROUP(5)
MULTIPLY_GROUP(6)

static void (*const multiply_group[])(const subtile_weights *, panel_scales, const int32_t *, int32_t,
                                      float *) = {NULL, NULL, NULL, multiply_3, multiply_4, multiply_5, multiply_6};

static void multiply_block(const uint8_t *codes, struct line_pair ahead, panel_scales half_scales, const int32_t *x,
                           int32_t n_tokens, float *sums)
{
    subtile_weights weights[SUBTILES];
    const int32_t n_groups = (n_tokens + GROUP_TOKENS - 1) / GROUP_TOKENS; /* of nearly equal size */
    decode_block(codes, ahead, weights);
    for (int32_t g = 0; g < n_groups; g++) {
        const int32_t first = n_tokens * g / n_groups, last = n_tokens * (g + 1) / n_groups;
        multiply_group[last - first]((const subtile_weights *)weights, half_scales, x + first, n_tokens,
                                     sums + first * PANEL_ROWS);
    }
}

static void gemm_tile_int8_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                float *sums, struct read_ahead *ahead)
{
    const int32_t *words = (const int32_t *)(const void *)x;
    panel_scales half_scales;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, words += INT8_BLOCK_WORDS * n_tokens) {
        const uint8_t *codes = panel + CODES_OFFSET;
        const struct line_pair pair = read_block(ahead, b);
        decode_scales(panel, half_scales);
        if (n_tokens <= FEW_TOKENS)
            multiply_few[n_tokens](codes, pair, half_scales, words, sums);
        else
            multiply_block(codes, pair, half_scales, words, n_tokens, sums);
    }
}

const struct kernel kernel_int8_avx2 = {.name = "gemm_int8_avx2",
                                        .order = "exact blocks of int8, scaled by fma",
                                        .isa = MOE4_ISA_AVX2,
                                        .tile_tokens = LARGE_TILE_TOKENS,
                                        .run = PAIR,
                                        .gemm_tile = gemm_tile_int8_avx2};
