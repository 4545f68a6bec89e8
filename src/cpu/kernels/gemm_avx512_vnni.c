/* AVX-512 with VNNI.  Activations are integers with a power of two a block (integers.h), those of the intermediate long
 * ones; weights are integers as well, twice what they are.  A block's sum is exact; it is scaled twice, the second time
 * where it is added to those of the blocks before.  What is no such integer is multiplied in f32.  Lanes are output
 * rows.
 *
 * A few tokens come by digits of 8 bits: vpdpbusd multiplies four of them by weights as they are looked up, 2w + 12,
 * which must not be negative, in registers.  Sums begin without what is 12 times the digits too much.
 *
 * More come by pairs of k, for vpdpwssd, whose weights have signs and are decoded to memory once a block; a group of
 * tokens meets all 64 rows of them.  Of long integers vpdpbusd multiplies what pairs do not hold, in fours. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/integers.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"
#include "cpu/layout.h"

enum {
    SUBTILES = PANEL_ROWS / SUBTILE_ROWS,
    LINES = 4, /* code lines of a subtile in a block, each of */
    LINE_FOURS = 2,
    LINE_PAIRS = 4,
    FEW_TOKENS = 4,
    GROUP_TOKENS = 6,
    FEW_SUMS = 24 /* of a block, in registers */
};

#define INLINE static inline __attribute__((always_inline))
#define APART  static __attribute__((noinline))

/* sum += w . x over fours of bytes, w unsigned.  In assembler for the broadcast operand, which needs no register. */
INLINE __m512i dot_digits(__m512i sum, __m512i w, const int32_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*x));
    return sum;
}

/* The same over fours of bytes, x unsigned, and over pairs of 16 bits.  Left to itself, gcc would load weights again
 * for every token. */
INLINE __m512i dot_fours(__m512i sum, __m512i w, __m512i x)
{
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}

INLINE __m512i dot_pairs(__m512i sum, __m512i w, __m512i x)
{
    __asm__("vpdpwssd %1, %2, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}

/* sums[16 rows] += a block's sum, scaled. */
INLINE void add_block(__m512i block, __m512 x_scale, __m512 scale, float *sums)
{
    const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(block), x_scale);
    _mm512_store_ps(sums, _mm512_fmadd_ps(value, scale, _mm512_load_ps(sums)));
}

INLINE __m512 load_x_scale(const int32_t *row, int words)
{
    float scale;
    memcpy(&scale, row + words - 1, sizeof scale);
    return _mm512_set1_ps(scale);
}

/* ---- A few tokens, by digits ---- */

INLINE __m512i add_digits(const __m512i sums[LONG_DIGITS], const int n_digits)
{
    __m512i sum = sums[n_digits - 1];
    for (int d = n_digits - 2; d >= 0; d--) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), sums[d]);
    return sum;
}

/* sums[n_tokens][16 n_sub rows] += a block of n_sub subtiles times tokens. */
INLINE void multiply_subtiles(const uint8_t *codes, struct line_pair ahead, const __m512 *scales, const int32_t *rows,
                              const int n_tokens, const int n_digits, const int n_sub, float *sums)
{
    const int words = DIGIT_ROW_WORDS(n_digits);
    const __m512i table = unsigned_byte_table();
    __m512i block[SUBTILES][FEW_TOKENS][LONG_DIGITS];
    UNROLL
    for (int t = 0; t < n_tokens; t++)
        for (int d = 0; d < n_digits; d++) {
            const __m512i halves = _mm512_set1_epi32(rows[t * words + n_digits * BLOCK_FOURS + d]);
            const __m512i start = _mm512_madd_epi16(halves, _mm512_set1_epi16(1));
            for (int s = 0; s < n_sub; s++) block[s][t][d] = start;
        }
    const int32_t *x = rows;
#pragma GCC unroll 1
    for (int line = 0; line < LINES; line++, codes += LINE_BYTES, x += LINE_FOURS) {
        __m512i packed[SUBTILES];
        read_pairs(&ahead, n_sub / 2);
        for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES);
        UNROLL
        for (int j = 0; j < LINE_FOURS; j++)
            for (int s = 0; s < n_sub; s++) {
                const __m512i w = decode_half(packed[s], j, table);
                UNROLL
                for (int t = 0; t < n_tokens; t++)
                    for (int d = 0; d < n_digits; d++)
                        block[s][t][d] = dot_digits(block[s][t][d], w, x + t * words + d * BLOCK_FOURS + j);
            }
    }
    UNROLL
    for (int t = 0; t < n_tokens; t++) {
        const __m512 x_scale = load_x_scale(rows + t * words, words);
        for (int s = 0; s < n_sub; s++)
            add_block(add_digits(block[s][t], n_digits), x_scale, scales[s], sums + t * PANEL_ROWS + s * SUBTILE_ROWS);
    }
}

typedef void few_fn(const uint8_t *codes, struct line_pair ahead, const __m512 *scales, const int32_t *rows,
                    float *sums);

#define FEW(N, N_DIGITS)                                                                                               \
    APART void few_##N##_##N_DIGITS(const uint8_t *codes, struct line_pair ahead, const __m512 *scales,                \
                                    const int32_t *rows, float *sums)                                                  \
    {                                                                                                                  \
        enum { N_SUB = 4 * N * N_DIGITS <= FEW_SUMS ? 4 : 2 };                                                         \
        for (int s = 0; s < SUBTILES; s += N_SUB, ahead.at += N_SUB * SUBTILE_BYTES / 2)                               \
            multiply_subtiles(codes + s * SUBTILE_BYTES, ahead, scales + s, rows, N, N_DIGITS, N_SUB,                  \
                              sums + s * SUBTILE_ROWS);                                                                \
    }
FEW(1, 2)
FEW(2, 2)
FEW(3, 2)
FEW(4, 2)
FEW(1, 3)
FEW(2, 3)
FEW(3, 3)
FEW(4, 3)

static few_fn *const few[][FEW_TOKENS + 1] = {
    [DIGITS] = {NULL, few_1_2, few_2_2, few_3_2, few_4_2}, [LONG_DIGITS] = {NULL, few_1_3, few_2_3, few_3_3, few_4_3}};

/* ---- More, by pairs ---- */

/* A block's, 2w. */
struct weights {
    __m512i pairs[BLOCK_PAIRS][SUBTILES]; /* of 16 bits, two k a lane */
    __m512i fours[BLOCK_FOURS][SUBTILES]; /* of 8 bits */
};

/* Meanwhile asks for as much of what comes. */
INLINE void decode_block(const uint8_t *codes, struct line_pair ahead, const int n_digits, struct weights *weights)
{
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m512i low_byte = _mm512_set1_epi16(1), high_byte = _mm512_set1_epi16(1 << 8);
    for (int s = 0; s < SUBTILES; s++)
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            const __m512i packed = load_line(codes);
            read_pairs(&ahead, line % 2);
            for (int j = 0; j < LINE_FOURS; j++) {
                const __m512i w = decode_half(packed, j, table);
                weights->pairs[line * LINE_PAIRS + j][s] = _mm512_maddubs_epi16(low_byte, w);
                weights->pairs[line * LINE_PAIRS + 2 + j][s] = _mm512_maddubs_epi16(high_byte, w);
                if (n_digits == LONG_DIGITS) weights->fours[line * LINE_FOURS + j][s] = w;
            }
        }
}

/* block[n_tokens][64 rows] += n products of weights [n] with x [n_tokens, words apart][n]. */
INLINE void multiply_words(__m512i block[GROUP_TOKENS][SUBTILES], const __m512i (*weights)[SUBTILES], const int32_t *x,
                           const int words, const int n, const int n_tokens,
                           __m512i (*dot)(__m512i sum, __m512i w, __m512i x))
{
#pragma GCC unroll 2
    for (int i = 0; i < n; i++) {
        __m512i w[SUBTILES];
        for (int s = 0; s < SUBTILES; s++) w[s] = weights[i][s];
        UNROLL
        for (int t = 0; t < n_tokens; t++) {
            const __m512i word = _mm512_set1_epi32(x[t * words + i]);
            for (int s = 0; s < SUBTILES; s++) block[t][s] = dot(block[t][s], w[s], word);
        }
    }
}

/* Not copied from one that is zero, as gcc would do it: that takes a slot of the dot products. */
INLINE __m512i zero(void)
{
    __m512i v;
    __asm__ volatile("vpxord %x0, %x0, %x0" : "=v"(v));
    return v;
}

/* sums[n_tokens][64 rows] += a block times tokens. */
INLINE void multiply_group(const struct weights *weights, const __m512 *scales, const int32_t *rows, const int n_tokens,
                           const int n_digits, float *sums)
{
    const int words = INTEGER_ROW_WORDS(n_digits);
    __m512i block[GROUP_TOKENS][SUBTILES];
    UNROLL
    for (int t = 0; t < n_tokens; t++)
        for (int s = 0; s < SUBTILES; s++) block[t][s] = zero();
    multiply_words(block, weights->pairs, rows, words, BLOCK_PAIRS, n_tokens, dot_pairs);
    if (n_digits == LONG_DIGITS) {
        UNROLL
        for (int t = 0; t < n_tokens; t++)
            for (int s = 0; s < SUBTILES; s++) block[t][s] = _mm512_slli_epi32(block[t][s], LOW_BITS);
        multiply_words(block, weights->fours, rows + BLOCK_PAIRS, words, BLOCK_FOURS, n_tokens, dot_fours);
    }
    UNROLL
    for (int t = 0; t < n_tokens; t++) {
        const __m512 x_scale = load_x_scale(rows + t * words, words);
        for (int s = 0; s < SUBTILES; s++)
            add_block(block[t][s], x_scale, scales[s], sums + t * PANEL_ROWS + s * SUBTILE_ROWS);
    }
}

typedef void group_fn(const struct weights *weights, const __m512 *scales, const int32_t *rows, float *sums);

#define GROUP(N, N_DIGITS)                                                                                             \
    APART void group_##N##_##N_DIGITS(const struct weights *weights, const __m512 *scales, const int32_t *rows,        \
                                      float *sums)                                                                     \
    {                                                                                                                  \
        multiply_group(weights, scales, rows, N, N_DIGITS, sums);                                                      \
    }
GROUP(3, 2)
GROUP(4, 2)
GROUP(5, 2)
GROUP(6, 2)
GROUP(3, 3)
GROUP(4, 3)
GROUP(5, 3)
GROUP(6, 3)

static group_fn *const groups[][GROUP_TOKENS + 1] = {
    [DIGITS] = {NULL, NULL, NULL, group_3_2, group_4_2, group_5_2, group_6_2},
    [LONG_DIGITS] = {NULL, NULL, NULL, group_3_3, group_4_3, group_5_3, group_6_3}};

/* Of more than a few: no group is of one or two, whose dot products would wait for each other. */
static int32_t group_of(int32_t n_tokens)
{
    return n_tokens <= GROUP_TOKENS ? n_tokens : n_tokens < 2 * GROUP_TOKENS ? (n_tokens + 1) / 2 : GROUP_TOKENS;
}

INLINE void multiply_block(const uint8_t *codes, struct line_pair ahead, const __m512 *scales, const int32_t *rows,
                           int32_t n_tokens, const int n_digits, float *sums)
{
    struct weights weights;
    decode_block(codes, ahead, n_digits, &weights);
    for (int32_t first = 0, n; first < n_tokens; first += n) {
        n = group_of(n_tokens - first);
        groups[n_digits][n](&weights, scales, rows + first * INTEGER_ROW_WORDS(n_digits), sums + first * PANEL_ROWS);
    }
}

/* ---- Both ---- */

/* Leftovers of a block: every row's weight of one k is looked up among the products. */
APART void multiply_leftovers(const uint8_t *codes, const __m512 *scales, const int32_t *list, int32_t n, float *sums)
{
    const __m512 weights = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    static const int32_t shifts[] = {0, 16, 4, 20, 8, 24, 12, 28}; /* of a line's eight k: layout.h */
    for (int32_t i = 0; i < n; i++) {
        const int k = leftover_k((uint32_t)list[i]);
        const __m512i shift = _mm512_set1_epi32(shifts[k % (2 * LINE_PAIRS)]);
        const __m512i x = _mm512_and_si512(_mm512_set1_epi32(list[i]), _mm512_set1_epi32((int)0xFFFF0000u));
        const __m512 products = _mm512_mul_ps(weights, _mm512_castsi512_ps(x));
        const uint8_t *line = codes + k / (2 * LINE_PAIRS) * LINE_BYTES;
        float *sum = sums + leftover_row((uint32_t)list[i]) * PANEL_ROWS;
        UNROLL
        for (int s = 0; s < SUBTILES; s++, line += SUBTILE_BYTES, sum += SUBTILE_ROWS) {
            const __m512i index = _mm512_srlv_epi32(load_line(line), shift);
            const __m512 value = _mm512_permutexvar_ps(index, products);
            _mm512_store_ps(sum, _mm512_fmadd_ps(value, scales[s], _mm512_load_ps(sum)));
        }
    }
}

INLINE void gemm_tile(const uint8_t *panel, int64_t n_blocks, const int32_t *rows, int32_t n_tokens, const int n_digits,
                      float *sums, struct read_ahead *ahead)
{
    const int is_few = n_tokens <= FEW_TOKENS;
    const int32_t block_words = n_tokens * (is_few ? DIGIT_ROW_WORDS(n_digits) : INTEGER_ROW_WORDS(n_digits));
    const int32_t *list = rows + n_blocks * block_words;
    __m512 scales[SUBTILES];
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, rows += block_words) {
        const uint8_t *codes = panel + CODES_OFFSET;
        const struct line_pair pair = read_block(ahead, b);
        const int32_t n_left = *list++;
        for (int s = 0; s < SUBTILES; s++) scales[s] = load_scales(panel + s * SUBTILE_ROWS);
        if (is_few)
            few[n_digits][n_tokens](codes, pair, scales, rows, sums);
        else
            multiply_block(codes, pair, scales, rows, n_tokens, n_digits, sums);
        if (n_left) multiply_leftovers(codes, scales, list, n_left, sums);
        list += n_left;
    }
}

static void gemm_tile_x(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                        struct read_ahead *ahead)
{
    gemm_tile(panel, n_blocks, (const int32_t *)(const void *)x, n_tokens, DIGITS, sums, ahead);
}

static void gemm_tile_long(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                           struct read_ahead *ahead)
{
    gemm_tile(panel, n_blocks, (const int32_t *)(const void *)x, n_tokens, LONG_DIGITS, sums, ahead);
}

static void convert_tile_x(const uint16_t *x, int64_t n_blocks, int32_t n_tokens, int32_t *tile)
{
    integers_avx2(x, n_blocks, n_tokens, DIGITS, n_tokens <= FEW_TOKENS, tile);
}

static void convert_tile_long(const uint16_t *x, int64_t n_blocks, int32_t n_tokens, int32_t *tile)
{
    integers_avx2(x, n_blocks, n_tokens, LONG_DIGITS, n_tokens <= FEW_TOKENS, tile);
}

const struct kernel kernel_avx512_vnni_x = {
    .name = "gemm_avx512_vnni_x",
    .order = "exact blocks of integers, of x 15 bits, of the intermediate 22, then what is none; scaled by fma",
    .isa = MOE4_ISA_AVX512_VNNI,
    .tile_tokens = LARGE_TILE_TOKENS,
    .run = BLOCK_SIZE,
    .block_words = INTEGER_WORDS(DIGITS),
    .convert = convert_tile_x,
    .gemm_tile = gemm_tile_x};

const struct kernel kernel_avx512_vnni = {.name = "gemm_avx512_vnni",
                                          .order =
                                              "exact blocks of integers of 22 bits, then what is none; scaled by fma",
                                          .isa = MOE4_ISA_AVX512_VNNI,
                                          .tile_tokens = LARGE_TILE_TOKENS,
                                          .run = BLOCK_SIZE,
                                          .block_words = INTEGER_WORDS(LONG_DIGITS),
                                          .convert = convert_tile_long,
                                          .for_x = &kernel_avx512_vnni_x,
                                          .gemm_tile = gemm_tile_long};
