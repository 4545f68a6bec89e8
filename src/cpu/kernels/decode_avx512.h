/* Packed codes to exact bf16 weights, 32 at a time (AVX-512 BW). */
#ifndef MOE4_CPU_KERNELS_DECODE_AVX512_H
#define MOE4_CPU_KERNELS_DECODE_AVX512_H

#include <immintrin.h>

#include "cpu/layout.h"

/* bf16 bits of each code with an exponent 126 too large; zeros (both signs) are 0 so that saturation keeps them.
 * Entries 16..31 repeat: vpermw looks at 5 bits, the fifth being the next code's lowest. */
static inline __m512i decode_table(void)
{
    enum { H = 252 << 7 }; /* 0.5, its exponent 126 raised by 126 */
    const short p1 = H, p2 = H + 0x80, p3 = H + 0xC0, p4 = H + 0x100, p5 = H + 0x140, p6 = H + 0x180, p7 = H + 0x1C0;
    const short sign = (short)0x8000;
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, p1, p2, p3, p4, p5, p6, p7, 0, p1 | sign, p2 | sign, p3 | sign,
                                                    p4 | sign, p5 | sign, p6 | sign, p7 | sign));
}

/* Stored scales of 16 rows, each shifted to the exponent field of both halves of its lane. */
static inline __m512i decode_scales(const uint8_t *scales)
{
    const __m512i spread = _mm512_setr_epi32((int)0x00800080, (int)0x01800180, (int)0x02800280, (int)0x03800380,
                                             (int)0x04800480, (int)0x05800580, (int)0x06800680, (int)0x07800780,
                                             (int)0x08800880, (int)0x09800980, (int)0x0A800A80, (int)0x0B800B80,
                                             (int)0x0C800C80, (int)0x0D800D80, (int)0x0E800E80, (int)0x0F800F80);
    __m512i rows = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)scales));
    return _mm512_srli_epi16(_mm512_shuffle_epi8(rows, spread), 1);
}

/* The pair j (k = 2j, 2j+1 of the line's eight) of 16 rows. */
static inline __m512i decode_pair(__m512i codes, int j, __m512i table, __m512i scales)
{
    __m512i index = j ? _mm512_srli_epi16(codes, (unsigned)(4 * j)) : codes;
    return _mm512_subs_epu16(_mm512_permutexvar_epi16(index, table), scales);
}

#endif
