/* AVX2 with FMA.  A block's codes are looked up once as bytes, twice the weights, in the order in which they are
 * wanted: [k][8 rows].  Where they are multiplied, 8 rows are widened to f32, two instructions, for up to 6 tokens: 12
 * sums of 16 rows, two weights and a broadcast fill the registers.  Activations are halved to make up for the weights:
 * exact, since f32 holds half of any bf16. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/unroll.h"
#include "cpu/kernels/widen.h"
#include "cpu/layout.h"

enum { LINES = 4, HALVES = 2, LANES = 8, SUBTILES = PANEL_ROWS / SUBTILE_ROWS, GROUP_TOKENS = 6 };

/* Twice the weights of 8 rows and a line's 8 k, 8 bytes a k; which k, says byte_of. */
typedef int8_t half_line[LANES * 8] __attribute__((aligned(32)));

/* Where the rows of a line's k begin in its half_line: k = 0, 1, 4, 5 come from the low halves of the codes' bytes. */
static const int byte_of[8] = {0, 8, 32, 40, 16, 24, 48, 56};

/* 8 rows of a line, a lane each, to bytes. */
static inline void decode_half_line(const uint8_t *codes, half_line weights)
{
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m256i turn =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    const __m256i low_half = _mm256_set1_epi8(15);
    /* [4 rows][4 bytes] in each half to [4 bytes][8 rows] */
    __m256i packed = _mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)codes), turn);
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    __m256i low = _mm256_and_si256(packed, low_half);
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low_half);
    _mm256_store_si256((__m256i *)weights, _mm256_shuffle_epi8(values, low));
    _mm256_store_si256((__m256i *)weights + 1, _mm256_shuffle_epi8(values, high));
}

static void decode_block(const uint8_t *codes, half_line weights[SUBTILES][LINES][HALVES])
{
    for (int subtile = 0; subtile < SUBTILES; subtile++)
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES)
            for (int half = 0; half < HALVES; half++)
                decode_half_line(codes + half * LANES * 4, weights[subtile][line][half]);
}

static inline __m256 load_weights(const int8_t *bytes)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
}

/* The scales of eight rows, E8M0 bytes 1..254. */
static inline __m256 load_scales(const uint8_t *scales)
{
    __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
}

/* sums[t][16 N_SUB rows] += scales * (weights . x) for N_TOKENS tokens, of ldx in x.  Always inlined with constants: a
 * block's sums stay in registers, 2 * N_SUB * N_TOKENS <= 12. */
static inline __attribute__((always_inline)) void multiply(half_line weights[][LINES][HALVES], const uint8_t *scales,
                                                           const struct wide_block *x, int32_t first_token, int32_t ldx,
                                                           const int n_sub, const int n_tokens, float *sums)
{
    const float *even = x->even + first_token, *odd = x->odd + first_token;
    __m256 block[GROUP_TOKENS][2 * HALVES];
    UNROLL
    for (int t = 0; t < n_tokens; t++) {
        UNROLL
        for (int h = 0; h < n_sub * HALVES; h++) block[t][h] = _mm256_setzero_ps();
    }
#pragma GCC unroll 1
    for (int line = 0; line < LINES; line++) {
        UNROLL
        for (int k = 0; k < 8; k++) {
            const float *value = k % 2 ? odd : even;
            __m256 w[2 * HALVES];
            UNROLL
            for (int h = 0; h < n_sub * HALVES; h++)
                w[h] = load_weights(weights[h / HALVES][line][h % HALVES] + byte_of[k]);
            UNROLL
            for (int t = 0; t < n_tokens; t++) {
                __m256 v = _mm256_broadcast_ss(value + t);
                UNROLL
                for (int h = 0; h < n_sub * HALVES; h++) block[t][h] = _mm256_fmadd_ps(w[h], v, block[t][h]);
            }
            if (k % 2) even += ldx, odd += ldx;
        }
    }
    UNROLL
    for (int h = 0; h < n_sub * HALVES; h++) {
        const __m256 scale = load_scales(scales + h * LANES);
        UNROLL
        for (int t = 0; t < n_tokens; t++) {
            float *sum = sums + t * PANEL_ROWS + h * LANES;
            _mm256_store_ps(sum, _mm256_fmadd_ps(block[t][h], scale, _mm256_load_ps(sum)));
        }
    }
}

/* A panel's block for n_tokens tokens, at most GROUP_TOKENS, from `first` on.  One or two take two subtiles at
 * once: fmas that add to one sum wait for each other. */
static void multiply_group(half_line weights[SUBTILES][LINES][HALVES], const uint8_t *scales,
                           const struct wide_block *x, int32_t first, int32_t ldx, int32_t n_tokens, float *sums)
{
    sums += first * PANEL_ROWS;
    for (int s = 0; s < SUBTILES; s += n_tokens <= 2 ? 2 : 1) {
        half_line(*subtile)[LINES][HALVES] = weights + s;
        const uint8_t *scale = scales + s * SUBTILE_ROWS;
        float *sum = sums + s * SUBTILE_ROWS;
        switch (n_tokens) {
        case 1: multiply(subtile, scale, x, first, ldx, 2, 1, sum); break;
        case 2: multiply(subtile, scale, x, first, ldx, 2, 2, sum); break;
        case 3: multiply(subtile, scale, x, first, ldx, 1, 3, sum); break;
        case 4: multiply(subtile, scale, x, first, ldx, 1, 4, sum); break;
        case 5: multiply(subtile, scale, x, first, ldx, 1, 5, sum); break;
        default: multiply(subtile, scale, x, first, ldx, 1, 6, sum); break;
        }
    }
}

static void gemm_tile_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                           struct read_ahead *ahead)
{
    half_line weights[SUBTILES][LINES][HALVES];
    struct wide_block wide;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        read_block(ahead);
        widen_block(x, n_tokens, 0.5f, &wide);
        decode_block(panel + CODES_OFFSET, weights);
        for (int32_t t = 0, group; t < n_tokens; t += group) { /* of nearly equal size */
            const int32_t n_groups = (n_tokens - t + GROUP_TOKENS - 1) / GROUP_TOKENS;
            group = (n_tokens - t + n_groups - 1) / n_groups;
            multiply_group(weights, panel, &wide, t, n_tokens, group, sums);
        }
    }
}

const struct kernel kernel_avx2 = {.name = "gemm_avx2",
                                   .order = "blocks of fma over k, scaled by fma",
                                   .isa = MOE4_ISA_AVX2,
                                   .tile_tokens = TILE_TOKENS,
                                   .gemm_tile = gemm_tile_avx2};
