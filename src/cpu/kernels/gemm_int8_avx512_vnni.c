/* int8 compute with AVX-512 VNNI.  Lanes are output rows; a lane holds four k, as vpdpbusd wants them.  On 16 rows a
 * block of 32 k costs 24 decoding instructions, 8 dot products a token, and four more a token to convert the sum and
 * scale it twice: by the weights' power of two, and in the fma that adds it by the activations' scale.
 *
 * Zen 4 runs dot product and fma on the same two ports, vscalefps and the conversion elsewhere: 9 cycles for 8 dot
 * products is its limit.  Tried and lost: multiplying the two scales first, which takes a third slot of those ports;
 * sums in memory, whose stores take slots there as well (10 cycles for 8). */
#include <immintrin.h>

#include "cpu/int8.h"
#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"

enum { LINES = 4 }; /* code lines of a subtile in a block */

/* acc += w . x over fours of bytes.  Written in assembler for the broadcast operand, which spares a register a
 * token. */
static inline __m512i dot_broadcast(__m512i acc, __m512i w, const int32_t *x)
{
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
}

/* E of each row's scale / 2 = 2^E. */
static inline __m512 load_exponents(const uint8_t *scales)
{
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(bytes, _mm512_set1_epi32(128)));
}

/* Prefetching, as it was fastest on Zen 4; not by what the others ask for (prefetch.h), which is up to 10 % slower
 * here.  A single pass reads memory as fast as it multiplies: one token into the first level, a few lines at a time
 * (all of a block at once, whichever the level, 25 % slower), two and three a block at once into the second.  Where a
 * panel takes several passes, each brings its own lines of the next panel: were they brought by the first, or closer
 * ahead, so that the hardware brings the other lines beside them, it would wait for memory and the others not use it (n
 * = 4: 41 GB/s instead of 30). */
enum { BLOCKS_AHEAD = 16, MOST_BLOCKS_AHEAD = 256 };

static inline __attribute__((always_inline)) void prefetch_subtiles(const uint8_t *block, const int first,
                                                                    const int n_sub)
{
    const char *lines = (const char *)block + CODES_OFFSET + first * SUBTILE_BYTES;
    if (first == 0) _mm_prefetch(lines - CODES_OFFSET, _MM_HINT_T1);
    for (int i = 0; i < n_sub * SUBTILE_BYTES; i += LINE_BYTES) _mm_prefetch(lines + i, _MM_HINT_T1);
}

static inline __attribute__((always_inline)) void prefetch_quarter(const uint8_t *block, int line)
{
    const char *lines = (const char *)block + CODES_OFFSET + line * SUBTILE_BYTES;
    if (line == 0) _mm_prefetch(lines - CODES_OFFSET, _MM_HINT_T0);
    for (int i = 0; i < SUBTILE_BYTES; i += LINE_BYTES) _mm_prefetch(lines + i, _MM_HINT_T0);
}

/* One pass over a panel: N_SUB of its subtiles from `first` on, for N_TOKENS tokens.  Always inlined with constants, so
 * that sums and those of a block live in registers: N_SUB * N_TOKENS <= 12. */
static inline __attribute__((always_inline)) void pass(const uint8_t *panel, int64_t n_blocks, const int32_t *x,
                                                       const int n_tokens, const int first, const int n_sub,
                                                       float *sums, struct read_ahead *reading)
{
    (void)reading; /* see above */
    const __m512i table = unsigned_byte_table();
    const int64_t most_ahead = n_blocks < MOST_BLOCKS_AHEAD ? n_blocks : MOST_BLOCKS_AHEAD;
    const int64_t ahead = (n_sub == 4 ? BLOCKS_AHEAD : most_ahead) * PANEL_BLOCK_BYTES;
    __m512 sum[4][TILE_TOKENS];
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++) sum[s][t] = _mm512_setzero_ps();
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += INT8_BLOCK_WORDS * n_tokens) {
        if (n_tokens > 1) prefetch_subtiles(panel + ahead, first, n_sub);
        const uint8_t *codes = panel + CODES_OFFSET + first * SUBTILE_BYTES;
        const int32_t *start = x + INT8_CODE_WORDS * n_tokens, *word = x;
        const float *scales = (const float *)(const void *)(start + n_tokens);
        __m512i block[4][TILE_TOKENS];
        for (int s = 0; s < n_sub; s++)
            for (int t = 0; t < n_tokens; t++) block[s][t] = _mm512_set1_epi32(start[t]);
#pragma GCC unroll 1
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES, word += 2 * n_tokens) {
            __m512i packed[4];
            if (n_tokens == 1) prefetch_quarter(panel + ahead, line);
            for (int s = 0; s < n_sub; s++) packed[s] = load_line(codes + s * SUBTILE_BYTES);
            UNROLL
            for (int j = 0; j < 2; j++) {
                UNROLL
                for (int s = 0; s < n_sub; s++) {
                    __m512i w = decode_half(packed[s], j, table);
                    UNROLL
                    for (int t = 0; t < n_tokens; t++)
                        block[s][t] = dot_broadcast(block[s][t], w, word + j * n_tokens + t);
                }
            }
        }
        for (int s = 0; s < n_sub; s++) {
            const __m512 exponents = load_exponents(panel + (first + s) * SUBTILE_ROWS);
            for (int t = 0; t < n_tokens; t++) {
                __m512 value = _mm512_scalef_ps(_mm512_cvtepi32_ps(block[s][t]), exponents);
                sum[s][t] = _mm512_fmadd_ps(value, _mm512_set1_ps(scales[t]), sum[s][t]);
            }
        }
    }
    for (int s = 0; s < n_sub; s++)
        for (int t = 0; t < n_tokens; t++)
            _mm512_store_ps(sums + t * PANEL_ROWS + (first + s) * SUBTILE_ROWS, sum[s][t]);
}

#define TILE_X int32_t
#include "cpu/kernels/tiles_template.h"

static void gemm_tile_int8_avx512_vnni(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens,
                                       float *sums, struct read_ahead *ahead)
{
    tiles[n_tokens](panel, n_blocks, (const int32_t *)(const void *)x, sums, ahead);
}

const struct kernel kernel_int8_avx512_vnni = {.name = "gemm_int8_avx512_vnni",
                                               .order = "exact blocks of int8, scaled by fma",
                                               .isa = MOE4_ISA_AVX512_VNNI,
                                               .tile_tokens = TILE_TOKENS,
                                               .run = PAIR,
                                               .gemm_tile = gemm_tile_int8_avx512_vnni};
