/* Packed codes to weights without their scale, bf16 or bytes (AVX-512 BW). */
#ifndef MOE4_CPU_KERNELS_DECODE_AVX512_H
#define MOE4_CPU_KERNELS_DECODE_AVX512_H

#include <immintrin.h>

#include "cpu/kernels/prefetch.h"
#include "cpu/layout.h"

/* bf16 bits of each code.  Entries 16..31 repeat: vpermw looks at 5 bits, the fifth being the next code's lowest. */
static inline __m512i decode_table(void)
{
    const short sign = (short)0x8000;
    const short half = 0x3F00, one = 0x3F80, one_half = 0x3FC0, two = 0x4000, three = 0x4040, four = 0x4080,
                six = 0x40C0;
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, half, one, one_half, two, three, four, six, sign, sign | half,
                                                    sign | one, sign | one_half, sign | two, sign | three, sign | four,
                                                    sign | six));
}

/* A code line, in a register: gcc would otherwise load it again for each shift. */
static inline __m512i load_line(const uint8_t *line)
{
    __m512i codes = _mm512_load_si512(line);
    __asm__("" : "+v"(codes));
    return codes;
}

/* The pair j (k = 2j, 2j+1 of the line's eight) of 16 rows. */
static inline __m512i decode_pair(__m512i codes, int j, __m512i table)
{
    __m512i index = j ? _mm512_srli_epi16(codes, (unsigned)(4 * j)) : codes;
    return _mm512_permutexvar_epi16(index, table);
}

/* 2w + 12 of each code, a byte. */
static inline __m512i unsigned_byte_table(void)
{
    return _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

/* Half j of a code line looked up as bytes: k = 0 4 1 5 of each row, or 2 6 3 7. */
static inline __m512i decode_half(__m512i codes, int j, __m512i table)
{
    __m512i index = j ? _mm512_srli_epi16(codes, 4) : codes;
    return _mm512_shuffle_epi8(table, _mm512_and_si512(index, _mm512_set1_epi8(15)));
}

/* The scales of 16 rows, E8M0 bytes 1..254. */
static inline __m512 load_scales(const uint8_t *scales)
{
    __m512i exponents = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23));
}

/* The exponents of the same, as vscalefps wants them. */
static inline __m512 load_scale_exponents(const uint8_t *scales)
{
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(bytes, _mm512_set1_epi32(127)));
}

#endif
