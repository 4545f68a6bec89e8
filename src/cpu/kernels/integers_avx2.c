#include "cpu/kernels/integers.h"

#include <immintrin.h>
#include <string.h>

#include "base/convert.h"
#include "cpu/layout.h"

enum {
    VECTORS = 4, /* of a block: its even k, then its odd k */
    LANES = 8,
    TOP_BIT = 14,        /* of the largest integer, */
    LONG_TOP_BIT = 21,   /* and of the largest long one */
    LEAST_EXPONENT = 40, /* smaller blocks are leftovers altogether, as their scale could be subnormal */
    FEW = 1              /* leftovers, with which a scale is good enough */
};

struct block {
    __m256 x[VECTORS];
};

struct integers {
    __m256i of[VECTORS];
    uint32_t leftovers; /* a bit a lane */
};

/* Biased exponent of the largest finite element among those whose bit is set; 0 if there is none. */
static uint32_t largest_exponent(const struct block *b, uint32_t among)
{
    const __m256i mask = _mm256_set1_epi32(0x7F800000), bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i most = _mm256_setzero_si256();
    for (int v = 0; v < VECTORS; v++, among >>= LANES) {
        __m256i exponent = _mm256_and_si256(_mm256_castps_si256(b->x[v]), mask);
        __m256i counts =
            _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_set1_epi32((int)among), bits), _mm256_setzero_si256());
        counts = _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, mask), counts);
        most = _mm256_max_epi32(most, _mm256_and_si256(exponent, counts));
    }
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(half) >> 23;
}

/* What an integer 1 is worth under a largest exponent, which stands for bit `top`, times 2^shift.  0 where leftovers
 * are all that is not 0. */
static float unit(uint32_t exponent, int32_t top, int32_t shift)
{
    return exponent < LEAST_EXPONENT ? 0 : f32_from_bits((uint32_t)((int32_t)exponent - top + shift) << 23);
}

/* The elements over the unit of an exponent, where that is exact and not too large.  255 * 2^(top-7) is: digits from
 * -128 to 127 do not make it. */
static struct integers divide(const struct block *b, uint32_t exponent, int32_t top)
{
    const uint32_t inverse = exponent < LEAST_EXPONENT ? 0 : (2 * 127 + (uint32_t)top - exponent) << 23;
    const __m256 one = _mm256_set1_ps(unit(exponent, top, 0)), factor = _mm256_set1_ps(f32_from_bits(inverse));
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX)),
                 limit = _mm256_set1_ps((float)(255 << (top - 7)));
    struct integers q = {.leftovers = 0};
    for (int v = 0; v < VECTORS; v++) {
        const __m256 y = _mm256_mul_ps(b->x[v], factor);
        const __m256i rounded = _mm256_cvtps_epi32(y);
        const __m256 is_same = _mm256_cmp_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(rounded), one), b->x[v], _CMP_EQ_OQ);
        const __m256 fits = _mm256_and_ps(is_same, _mm256_cmp_ps(_mm256_and_ps(y, magnitude), limit, _CMP_LT_OQ));
        q.of[v] = _mm256_and_si256(rounded, _mm256_castps_si256(fits));
        q.leftovers |= (uint32_t)(~_mm256_movemask_ps(fits) & 0xFF) << LANES * v;
    }
    return q;
}

/* Low bytes of four k a word, as code lines have them: k = 0 4 1 5, then 2 6 3 7 of each. */
static __m256i pack_fours(const __m256i of[VECTORS])
{
    const __m256i low = _mm256_set1_epi32(0xFF);
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, -1, -1, -1, -1, -1, -1, -1, -1));
    __m256i words[VECTORS / 2]; /* of two lines */
    for (int v = 0; v < VECTORS / 2; v++) {
        const __m256i odd = _mm256_slli_epi32(_mm256_and_si256(of[v + VECTORS / 2], low), 16);
        words[v] = _mm256_shuffle_epi8(_mm256_or_si256(_mm256_and_si256(of[v], low), odd), order);
    }
    return _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(words[0], words[1]), 0xD8);
}

static int32_t add_words(__m256i v)
{
    __m128i half = _mm_add_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi16(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi16(half, _mm_shuffle_epi32(half, 0xB1)));
}

static void store_words(int32_t *words, __m256i v)
{
    _mm256_storeu_si256((__m256i *)(void *)words, v);
}

static void store_digits(struct integers q, int n_digits, int32_t *row)
{
    for (int d = 0; d < n_digits; d++) {
        const __m256i fours = pack_fours(q.of);
        const __m256i products = _mm256_maddubs_epi16(_mm256_set1_epi8(12), fours);
        store_words(row + d * BLOCK_FOURS, fours);
        row[n_digits * BLOCK_FOURS + d] = add_words(_mm256_sub_epi16(_mm256_setzero_si256(), products));
        for (int v = 0; v < VECTORS; v++) /* of what is more than the digit, which may be negative */
            q.of[v] = _mm256_srai_epi32(_mm256_add_epi32(q.of[v], _mm256_set1_epi32(128)), 8);
    }
}

static void store_pairs(const struct integers *q, int n_digits, int32_t *row)
{
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    const int shift = n_digits == LONG_DIGITS ? LOW_BITS : 0;
    for (int v = 0; v < VECTORS / 2; v++) {
        const __m256i even = _mm256_srai_epi32(q->of[v], shift), odd = _mm256_srai_epi32(q->of[v + VECTORS / 2], shift);
        store_words(row + v * LANES, _mm256_or_si256(_mm256_and_si256(even, low), _mm256_slli_epi32(odd, 16)));
    }
    if (n_digits == LONG_DIGITS)
        store_words(row + BLOCK_PAIRS, _mm256_and_si256(pack_fours(q->of), _mm256_set1_epi8((1 << LOW_BITS) - 1)));
}

/* A row's block.  Returns a bit for every leftover: those of the even k, then those of the odd ones. */
static uint32_t convert_block(const uint16_t x[BLOCK_SIZE], int n_digits, int by_digits, int32_t *row)
{
    const int32_t top = n_digits == LONG_DIGITS ? LONG_TOP_BIT : TOP_BIT;
    struct block b;
    for (int v = 0; v < VECTORS / 2; v++) {
        __m256i pairs = _mm256_loadu_si256((const __m256i *)(const void *)(x + v * PAIR * LANES));
        b.x[v] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        b.x[v + VECTORS / 2] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000u)));
    }
    uint32_t exponent = largest_exponent(&b, UINT32_MAX);
    struct integers q = divide(&b, exponent, top);
    if (__builtin_popcount(q.leftovers) > FEW) { /* perhaps it is the largest that stand apart */
        const uint32_t next = largest_exponent(&b, q.leftovers);
        const struct integers other = divide(&b, next, top);
        if (__builtin_popcount(other.leftovers) < __builtin_popcount(q.leftovers)) q = other, exponent = next;
    }
    if (by_digits)
        store_digits(q, n_digits, row);
    else
        store_pairs(&q, n_digits, row);
    const float scale = unit(exponent, top, -1);
    memcpy(row + (by_digits ? DIGIT_ROW_WORDS(n_digits) : INTEGER_ROW_WORDS(n_digits)) - 1, &scale, sizeof scale);
    return q.leftovers;
}

/* Returns where the list ends. */
static int32_t *list_leftovers(const uint16_t *x, int32_t n_rows, const uint32_t *leftovers, int32_t *list)
{
    uint32_t any = 0;
    for (int32_t row = 0; row < n_rows; row++) any |= leftovers[row];
    for (; any; any &= any - 1) {
        const int bit = __builtin_ctz(any), k = bit % BLOCK_PAIRS * 2 + bit / BLOCK_PAIRS;
        for (int32_t row = 0; row < n_rows; row++)
            if (leftovers[row] >> bit & 1) *list++ = (int32_t)leftover(x[row * BLOCK_SIZE + k], row, k);
    }
    return list;
}

void integers_avx2(const uint16_t *x, int64_t n_blocks, int32_t n_rows, int n_digits, int by_digits, int32_t *tile)
{
    const int32_t row_words = by_digits ? DIGIT_ROW_WORDS(n_digits) : INTEGER_ROW_WORDS(n_digits);
    int32_t *list = tile + row_words * n_rows * n_blocks;
    for (int64_t b = 0; b < n_blocks; b++, x += BLOCK_SIZE * n_rows) {
        uint32_t leftovers[LARGE_TILE_TOKENS];
        for (int32_t row = 0; row < n_rows; row++, tile += row_words)
            leftovers[row] = convert_block(x + row * BLOCK_SIZE, n_digits, by_digits, tile);
        int32_t *end = list_leftovers(x, n_rows, leftovers, list + 1);
        *list = (int32_t)(end - list) - 1;
        list = end;
    }
}
