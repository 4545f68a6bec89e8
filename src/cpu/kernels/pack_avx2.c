#include <immintrin.h>

#include "cpu/kernels/pack.h"

/* Eight codes, as a checkpoint has them, to the order of a word of a code line, by two swaps of neighbours:
 * k = 01234567 -> 02134657 -> 02461357. */
static inline __m256i load_arranged(const uint8_t *codes)
{
    const __m256i middle = _mm256_set1_epi32(0x00F000F0);
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    __m256i x = _mm256_loadu_si256((const __m256i *)codes);
    __m256i t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 4)), middle);
    x = _mm256_xor_si256(x, _mm256_xor_si256(t, _mm256_slli_epi32(t, 4)));
    return _mm256_shuffle_epi8(x, bytes);
}

/* Two blocks of four rows, one a half of each vector: transpositions of 4 x 4 words. */
static inline void transpose_quad(const uint8_t *const codes[4], int64_t at, __m256i lines[4])
{
    __m256i a = load_arranged(codes[0] + at), b = load_arranged(codes[1] + at);
    __m256i c = load_arranged(codes[2] + at), d = load_arranged(codes[3] + at);
    __m256i even = _mm256_unpacklo_epi32(a, c), odd = _mm256_unpacklo_epi32(b, d);
    lines[0] = _mm256_unpacklo_epi32(even, odd);
    lines[1] = _mm256_unpackhi_epi32(even, odd);
    even = _mm256_unpackhi_epi32(a, c);
    odd = _mm256_unpackhi_epi32(b, d);
    lines[2] = _mm256_unpacklo_epi32(even, odd);
    lines[3] = _mm256_unpackhi_epi32(even, odd);
}

static inline void pack_subtile(const uint8_t *const codes[SUBTILE_ROWS], uint32_t (*lines)[4][SUBTILE_ROWS])
{
    for (int block = 0; block < GROUP_BLOCKS; block += 2)
        for (int row = 0; row < SUBTILE_ROWS; row += 8) {
            __m256i low[4], high[4]; /* rows 0..3 and 4..7 of these 8 */
            transpose_quad(codes + row, block * BLOCK_BYTES, low);
            transpose_quad(codes + row + 4, block * BLOCK_BYTES, high);
            for (int i = 0; i < 4; i++) {
                _mm256_store_si256((__m256i *)&lines[block][i][row], _mm256_permute2x128_si256(low[i], high[i], 0x20));
                _mm256_store_si256((__m256i *)&lines[block + 1][i][row],
                                   _mm256_permute2x128_si256(low[i], high[i], 0x31));
            }
        }
}

static inline void stream_line(void *out, const void *line)
{
    const __m256i *from = line;
    __m256i *to = out;
    _mm256_stream_si256(to, _mm256_load_si256(from));
    _mm256_stream_si256(to + 1, _mm256_load_si256(from + 1));
}

static inline void stream_end(void)
{
    _mm_sfence();
}

#define PACK_ROWS  pack_rows_avx2
#define PACK_RUN   64
#define PACK_AHEAD (4 * LINE_BYTES)
#include "cpu/kernels/pack_template.h"
