/* x with AVX2.  Activations are integers of 16 bits with a power of two a block (integers.h), weights integers as well,
 * twice what they are: vpmaddwd multiplies them and adds pairs of k, twice as many products as an fma makes, on two
 * ports, and the additions go wherever one is free.  A block's sum is exact; it is scaled twice, the second time where
 * it is added to those of the blocks before.  What is no such integer is multiplied in f32.
 *
 * One or two tokens meet weights decoded in registers.  More take a block decoded to memory, one after the other: with
 * all 64 rows at once a broadcast serves eight products, whose weights need no instructions of their own.
 *
 * One token comes as digits of 8 bits: vpmaddubsw multiplies 32 of them by weights as they are looked up, 2w + 12,
 * which must not be negative, and adds pairs of products to 16 bits, where all of a block's are added up, modulo 2^16.
 * Sums begin without what is 12 times the digits too much: 16 weights of -12 to 12 times 128 are at most 24576, so they
 * are right in the end.  Two digits put together are the same sum as that of the integers. */
#include <immintrin.h>
#include <string.h>

#include "base/convert.h"
#include "cpu/kernels/decode_avx2.h"
#include "cpu/kernels/integers.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/unroll.h"
#include "cpu/layout.h"

enum { LINE_PAIRS = 4, FEW_TOKENS = 2 };

typedef __m256i pair_weights[HALVES]; /* 2w of 16 rows, two k a lane */
typedef pair_weights subtile_weights[BLOCK_PAIRS];

/* The four pairs of 8 rows. */
static inline void decode_pairs(const uint8_t *codes, __m256i w[LINE_PAIRS])
{
    const __m256i low_byte = _mm256_set1_epi16(1), high_byte = _mm256_set1_epi16(1 << 8);
    __m256i a, b;
    look_up_half_line(codes, twice_weights(), &a, &b);
    w[0] = _mm256_maddubs_epi16(low_byte, a);
    w[1] = _mm256_maddubs_epi16(low_byte, b);
    w[2] = _mm256_maddubs_epi16(high_byte, a);
    w[3] = _mm256_maddubs_epi16(high_byte, b);
}

/* Meanwhile asks for as much of what comes: a pair of lines at a time, since the codes come from the second level, and
 * would wait behind requests for all of it. */
APART void decode_block(const uint8_t *codes, struct line_pair ahead, subtile_weights weights[SUBTILES])
{
    for (int s = 0; s < SUBTILES; s++)
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            read_pairs(&ahead, line % 2);
            for (int h = 0; h < HALVES; h++) {
                __m256i w[LINE_PAIRS];
                decode_pairs(codes + h * LINE_BYTES / HALVES, w);
                for (int i = 0; i < LINE_PAIRS; i++) weights[s][line * LINE_PAIRS + i][h] = w[i];
            }
        }
}

/* E8M0 bytes 1..254. */
static inline void decode_scales(const uint8_t *scales, panel_scales out)
{
    for (int i = 0; i < SUBTILES * HALVES; i++) {
        __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(scales + i * LANES)));
        out[i / HALVES][i % HALVES] = _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
    }
}

/* sum += w * x, or, if it is the first, = w * x.  Left to itself, gcc would add up products first, and run out of
 * registers. */
static inline __attribute__((always_inline)) void multiply_pair(__m256i *sum, __m256i w, __m256i x, const int is_first)
{
    const __m256i product = _mm256_madd_epi16(w, x);
    if (is_first)
        *sum = product;
    else
        __asm__("vpaddd %1, %0, %0" : "+x"(*sum) : "x"(product));
}

/* sums[8 rows] += a block's sum, scaled. */
static inline void add_block(__m256i block, __m256 x_scale, __m256 scale, float *sums)
{
    const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(block), x_scale);
    _mm256_store_ps(sums, _mm256_fmadd_ps(value, scale, _mm256_load_ps(sums)));
}

/* sums[64 rows] += a block of a panel times a token. */
APART void multiply(const subtile_weights *weights, panel_scales scales, const struct integer_row *x, float *sums)
{
    __m256i block[SUBTILES * HALVES];
    UNROLL
    for (int i = 0; i < BLOCK_PAIRS; i++) {
        const __m256i pair = _mm256_set1_epi32(x->pairs[i]);
        UNROLL
        for (int j = 0; j < SUBTILES * HALVES; j++)
            multiply_pair(&block[j], weights[j / HALVES][i][j % HALVES], pair, i == 0);
    }
    const __m256 x_scale = _mm256_broadcast_ss(&x->scale);
    UNROLL
    for (int j = 0; j < SUBTILES * HALVES; j++)
        add_block(block[j], x_scale, scales[j / HALVES][j % HALVES], sums + j * LANES);
}

/* The same for several tokens, from codes.  Always inlined with their number. */
static inline __attribute__((always_inline)) void multiply_codes(const uint8_t *codes, struct line_pair ahead,
                                                                 panel_scales scales, const struct integer_row *x,
                                                                 const int n_tokens, float *sums)
{
    for (int s = 0; s < SUBTILES; s++, sums += SUBTILE_ROWS) {
        __m256i block[FEW_TOKENS][HALVES];
        UNROLL
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            __m256i w[HALVES][LINE_PAIRS];
            read_pairs(&ahead, line % 2);
            __asm__ volatile("" ::: "memory"); /* else gcc asks for all of a subtile's lines at once */
            for (int h = 0; h < HALVES; h++) decode_pairs(codes + h * LINE_BYTES / HALVES, w[h]);
            UNROLL
            for (int i = 0; i < LINE_PAIRS; i++)
                for (int t = 0; t < n_tokens; t++) {
                    const __m256i pair = _mm256_set1_epi32(x[t].pairs[line * LINE_PAIRS + i]);
                    for (int h = 0; h < HALVES; h++) multiply_pair(&block[t][h], w[h][i], pair, line + i == 0);
                }
        }
        UNROLL
        for (int t = 0; t < n_tokens; t++)
            for (int h = 0; h < HALVES; h++)
                add_block(block[t][h], _mm256_broadcast_ss(&x[t].scale), scales[s][h],
                          sums + t * PANEL_ROWS + h * LANES);
    }
}

APART void multiply_two(const uint8_t *codes, struct line_pair ahead, panel_scales scales, const struct integer_row *x,
                        float *sums)
{
    multiply_codes(codes, ahead, scales, x, 2, sums);
}

/* sum[digit] += four k of 8 rows times those of a token. */
static inline __attribute__((always_inline)) void multiply_four(__m256i sum[DIGITS], __m256i weights,
                                                                const struct digit_row *x, int four)
{
    UNROLL
    for (int d = 0; d < DIGITS; d++) {
        const __m256i product = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(x->fours[d][four]));
        if (four == 0)
            sum[d] = _mm256_add_epi16(product, _mm256_set1_epi32(x->starts[d]));
        else
            __asm__("vpaddw %1, %0, %0" : "+x"(sum[d]) : "x"(product));
    }
}

/* sums[64 rows] += a block times one token: 32 rows at a time, whose sums stay in registers. */
APART void multiply_one(const uint8_t *codes, struct line_pair ahead, panel_scales scales, const struct digit_row *x,
                        float *sums)
{
    enum { TWO_SUBTILES = 2 * HALVES };
    for (int s = 0; s < SUBTILES; s += 2, codes += 2 * SUBTILE_BYTES, sums += 2 * SUBTILE_ROWS) {
        __m256i block[TWO_SUBTILES][DIGITS];
        UNROLL
        for (int line = 0; line < LINES; line++) {
            read_pairs(&ahead, 1);
            __asm__ volatile("" ::: "memory"); /* else gcc asks for all lines at once */
            UNROLL
            for (int j = 0; j < TWO_SUBTILES; j++) {
                __m256i first, second;
                decode_half_line(codes + j / HALVES * SUBTILE_BYTES + line * LINE_BYTES + j % HALVES * LANES * 4,
                                 &first, &second);
                multiply_four(block[j], first, x, 2 * line);
                multiply_four(block[j], second, x, 2 * line + 1);
            }
        }
        const __m256 x_scale = _mm256_broadcast_ss(&x->scale);
        UNROLL
        for (int j = 0; j < TWO_SUBTILES; j++) {
            const __m256i low = _mm256_madd_epi16(block[j][0], _mm256_set1_epi16(1));
            const __m256i high = _mm256_madd_epi16(block[j][1], _mm256_set1_epi16(1 << 8));
            add_block(_mm256_add_epi32(low, high), x_scale, scales[s + j / HALVES][j % HALVES], sums + j * LANES);
        }
    }
}

/* Leftovers of a block.  A k that several tokens share is made f32 once. */
APART void multiply_leftovers(const subtile_weights *weights, panel_scales scales, const int32_t *list, int32_t n,
                              float *sums)
{
    const int32_t *end = list + n;
    while (list < end) {
        const int k = leftover_k((uint32_t)*list);
        const __m256i of_pair = _mm256_set1_epi32(k % 2 ? 1 << 16 : 1);
        __m256 w[SUBTILES * HALVES]; /* 2w, scaled */
        UNROLL
        for (int j = 0; j < SUBTILES * HALVES; j++)
            w[j] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_madd_epi16(of_pair, weights[j / HALVES][k / 2][j % HALVES])),
                                 scales[j / HALVES][j % HALVES]);
        do {
            const uint32_t item = (uint32_t)*list++;
            const __m256 half_x = _mm256_set1_ps(0.5f * f32_from_bits(item & 0xFFFF0000u));
            float *sum = sums + leftover_row(item) * PANEL_ROWS;
            UNROLL
            for (int j = 0; j < SUBTILES * HALVES; j++, sum += LANES)
                _mm256_store_ps(sum, _mm256_fmadd_ps(half_x, w[j], _mm256_load_ps(sum)));
        } while (list < end && leftover_k((uint32_t)*list) == k);
    }
}

/* The same from codes: every row's weight of one k is looked up among the products. */
APART void multiply_leftover_codes(const uint8_t *codes, panel_scales scales, const int32_t *list, int32_t n,
                                   float *sums)
{
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    for (int32_t i = 0; i < n; i++) {
        const uint32_t item = (uint32_t)list[i];
        const int k = leftover_k(item), bit = k % 2 * 16 + k / 4 % 2 * 8 + k / 2 % 2 * 4; /* layout.h */
        const __m256i right = _mm256_set1_epi32(bit), left = _mm256_set1_epi32(28 - bit);
        const __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32((int)(item & 0xFFFF0000u)));
        const __m256 products = _mm256_mul_ps(magnitudes, x);
        const uint8_t *lines = codes + k / (2 * LINE_PAIRS) * LINE_BYTES;
        float *sum = sums + leftover_row(item) * PANEL_ROWS;
        UNROLL
        for (int s = 0; s < SUBTILES; s++)
            for (int h = 0; h < HALVES; h++, sum += LANES) {
                const __m256i words = _mm256_load_si256((const __m256i *)(lines + s * SUBTILE_BYTES) + h);
                const __m256i signs = _mm256_and_si256(_mm256_sllv_epi32(words, left), sign);
                __m256 value = _mm256_permutevar8x32_ps(products, _mm256_srlv_epi32(words, right));
                value = _mm256_xor_ps(value, _mm256_castsi256_ps(signs));
                _mm256_store_ps(sum, _mm256_fmadd_ps(value, scales[s][h], _mm256_load_ps(sum)));
            }
    }
}

static void multiply_block(const uint8_t *codes, struct line_pair ahead, panel_scales scales,
                           const struct integer_row *x, int32_t n_tokens, const int32_t *list, int32_t n_left,
                           float *sums)
{
    subtile_weights weights[SUBTILES];
    decode_block(codes, ahead, weights);
    for (int32_t t = 0; t < n_tokens; t++)
        multiply((const subtile_weights *)weights, scales, x + t, sums + t * PANEL_ROWS);
    multiply_leftovers((const subtile_weights *)weights, scales, list, n_left, sums);
}

static void gemm_tile_avx2_integers(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                    float *sums, struct read_ahead *ahead)
{
    const struct integer_row *rows = (const struct integer_row *)(const void *)x;
    const struct digit_row *digits = (const struct digit_row *)(const void *)x;
    const int32_t *list = n_tokens == 1 ? (const int32_t *)(const void *)(digits + n_blocks)
                                        : (const int32_t *)(const void *)(rows + n_blocks * n_tokens);
    panel_scales scales;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, rows += n_tokens) {
        const uint8_t *codes = panel + CODES_OFFSET;
        const struct line_pair pair = read_block(ahead, b);
        const int32_t n_left = *list++;
        decode_scales(panel, scales);
        if (n_tokens == 1)
            multiply_one(codes, pair, scales, &digits[b], sums);
        else if (n_tokens == 2)
            multiply_two(codes, pair, scales, rows, sums);
        else
            multiply_block(codes, pair, scales, rows, n_tokens, list, n_left, sums);
        if (n_tokens <= FEW_TOKENS && n_left) multiply_leftover_codes(codes, scales, list, n_left, sums);
        list += n_left;
    }
}

static void convert_tile(const uint16_t *x, int64_t n_blocks, int32_t n_tokens, int32_t *tile)
{
    integers_avx2(x, n_blocks, n_tokens, DIGITS, n_tokens == 1, tile);
}

const struct kernel kernel_avx2_integers = {
    .name = "gemm_avx2_integers",
    .order = "x: exact blocks of integers, then what is none; intermediate: blocks of fma over k; scaled by fma",
    .isa = MOE4_ISA_AVX2,
    .tile_tokens = LARGE_TILE_TOKENS,
    .run = BLOCK_SIZE,
    .block_words = INTEGER_WORDS(DIGITS),
    .convert = convert_tile,
    .gemm_tile = gemm_tile_avx2_integers};
