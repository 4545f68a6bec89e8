#include <immintrin.h>

#include "cpu/kernels/pack.h"

/* Eight codes, as a checkpoint has them, to the order of a word of a code line, by two swaps of neighbours:
 * k = 01234567 -> 02134657 -> 02461357. */
static inline __m512i load_arranged(const uint8_t *codes)
{
    const __m512i middle = _mm512_set1_epi32(0x00F000F0);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    __m512i x = _mm512_loadu_si512(codes);
    __m512i t = _mm512_and_si512(_mm512_xor_si512(x, _mm512_srli_epi32(x, 4)), middle);
    x = _mm512_xor_si512(x, _mm512_xor_si512(t, _mm512_slli_epi32(t, 4)));
    return _mm512_shuffle_epi8(x, bytes);
}

/* Four blocks of four rows, one a quarter of each vector: transpositions of 4 x 4 words. */
static inline void transpose_quad(const uint8_t *const codes[4], __m512i lines[4])
{
    __m512i a = load_arranged(codes[0]), b = load_arranged(codes[1]);
    __m512i c = load_arranged(codes[2]), d = load_arranged(codes[3]);
    __m512i even = _mm512_unpacklo_epi32(a, c), odd = _mm512_unpacklo_epi32(b, d);
    lines[0] = _mm512_unpacklo_epi32(even, odd);
    lines[1] = _mm512_unpackhi_epi32(even, odd);
    even = _mm512_unpackhi_epi32(a, c);
    odd = _mm512_unpackhi_epi32(b, d);
    lines[2] = _mm512_unpacklo_epi32(even, odd);
    lines[3] = _mm512_unpackhi_epi32(even, odd);
}

/* A line of each block from its four quarters: a transposition of 4 x 4 quarters. */
static inline void store_line(__m512i a, __m512i b, __m512i c, __m512i d, int line, uint32_t (*lines)[4][SUBTILE_ROWS])
{
    __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
    _mm512_store_si512(lines[0][line], _mm512_shuffle_i32x4(ab, cd, 0x88));
    _mm512_store_si512(lines[1][line], _mm512_shuffle_i32x4(ab, cd, 0xDD));
    ab = _mm512_shuffle_i32x4(a, b, 0xEE);
    cd = _mm512_shuffle_i32x4(c, d, 0xEE);
    _mm512_store_si512(lines[2][line], _mm512_shuffle_i32x4(ab, cd, 0x88));
    _mm512_store_si512(lines[3][line], _mm512_shuffle_i32x4(ab, cd, 0xDD));
}

static inline void pack_subtile(const uint8_t *const codes[SUBTILE_ROWS], uint32_t (*lines)[4][SUBTILE_ROWS])
{
    __m512i quads[4][4];
    for (int i = 0; i < 4; i++) transpose_quad(codes + 4 * i, quads[i]);
    for (int line = 0; line < 4; line++)
        store_line(quads[0][line], quads[1][line], quads[2][line], quads[3][line], line, lines);
}

static inline void stream_line(void *out, const void *line)
{
    _mm512_stream_si512(out, _mm512_load_si512(line));
}

static inline void stream_end(void)
{
    _mm_sfence();
}

#define PACK_ROWS  pack_rows_avx512
#define PACK_RUN   GROUP_BLOCKS
#define PACK_AHEAD (2 * LINE_BYTES)
#include "cpu/kernels/pack_template.h"
