/* Packed codes to weights that are integers, 2w or 2w + 12, without their scale (AVX2). */
#ifndef MOE4_CPU_KERNELS_DECODE_AVX2_H
#define MOE4_CPU_KERNELS_DECODE_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/layout.h"

enum { LINES = 4, HALVES = 2, LANES = 8, SUBTILES = PANEL_ROWS / SUBTILE_ROWS };

/* Compiled by themselves: inlined into a loop over blocks, their constants take registers from the sums. */
#define APART static __attribute__((noinline))

/* Of 16 rows at a time. */
typedef __m256 panel_scales[SUBTILES][HALVES];

/* What the values of codes are doubled, one a byte. */
static inline __m256i twice_weights(void)
{
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

/* Half a code line, 8 rows, as bytes of a table: k = 0 4 1 5 of each row first, 2 6 3 7 second. */
static inline void look_up_half_line(const uint8_t *codes, __m256i table, __m256i *first, __m256i *second)
{
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i packed = _mm256_load_si256((const __m256i *)codes);
    *first = _mm256_shuffle_epi8(table, _mm256_and_si256(packed, low));
    *second = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), low));
}

/* 2w + 12. */
static inline void decode_half_line(const uint8_t *codes, __m256i *first, __m256i *second)
{
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    look_up_half_line(codes, table, first, second);
}

#endif
