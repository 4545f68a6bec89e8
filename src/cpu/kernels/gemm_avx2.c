/* AVX2 with FMA.  A block's 16 rows are decoded once into 2 KiB of f32, then multiplied by up to 6 tokens at a time: 12
 * sums, 2 weights and a broadcast fill the 16 registers. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/widen.h"
#include "cpu/layout.h"

enum { HALVES = 2, LANES = 8, GROUP_TOKENS = 6 };

/* Eight rows' codes at bit `shift` of their lanes: magnitude by look-up of the low 3 bits, sign from the fourth. */
static inline __m256 decode_lanes(__m256i codes, int shift, __m256 magnitudes)
{
    __m256i index = _mm256_srli_epi32(codes, shift);
    __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, index);
    __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(index, 28)), _mm256_set1_ps(-0.0f));
    return _mm256_or_ps(magnitude, sign);
}

/* A subtile of a block to weights [32][16] without their scales. */
static void decode_subtile(const uint8_t *codes, float weights[BLOCK_SIZE][SUBTILE_ROWS])
{
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    for (int line = 0; line < 4; line++)
        for (int half = 0; half < HALVES; half++) {
            int row = half * LANES;
            __m256i packed = _mm256_load_si256((const __m256i *)(codes + line * LINE_BYTES + row * 4));
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                float(*pair)[SUBTILE_ROWS] = weights + line * 8 + 2 * j;
                _mm256_store_ps(pair[0] + row, decode_lanes(packed, 4 * j, magnitudes));
                _mm256_store_ps(pair[1] + row, decode_lanes(packed, 4 * j + 16, magnitudes));
            }
        }
}

/* The scales of eight rows, E8M0 bytes 1..254. */
static inline __m256 load_scales(const uint8_t *scales)
{
    __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
}

/* sums[t][0..15] += scales * (weights . x) for N_TOKENS tokens; a block's sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const float weights[BLOCK_SIZE][SUBTILE_ROWS],
                                                           const uint8_t *scales, const float *x, int32_t ldx,
                                                           const int n_tokens, float *sums)
{
    __m256 block[GROUP_TOKENS][HALVES];
    for (int t = 0; t < n_tokens; t++) block[t][0] = block[t][1] = _mm256_setzero_ps();
    for (int k = 0; k < BLOCK_SIZE; k++, x += ldx) {
        __m256 low = _mm256_load_ps(weights[k]), high = _mm256_load_ps(weights[k] + LANES);
#pragma GCC unroll 6
        for (int t = 0; t < n_tokens; t++) {
            __m256 value = _mm256_broadcast_ss(x + t);
            block[t][0] = _mm256_fmadd_ps(low, value, block[t][0]);
            block[t][1] = _mm256_fmadd_ps(high, value, block[t][1]);
        }
    }
    for (int half = 0; half < HALVES; half++) {
        __m256 scale = load_scales(scales + half * LANES);
        for (int t = 0; t < n_tokens; t++) {
            float *sum = sums + t * PANEL_ROWS + half * LANES;
            _mm256_store_ps(sum, _mm256_fmadd_ps(block[t][half], scale, _mm256_load_ps(sum)));
        }
    }
}

static void multiply_group(const float weights[BLOCK_SIZE][SUBTILE_ROWS], const uint8_t *scales, const float *x,
                           int32_t ldx, int32_t n_tokens, float *sums)
{
    switch (n_tokens) {
    case 1: multiply(weights, scales, x, ldx, 1, sums); break;
    case 2: multiply(weights, scales, x, ldx, 2, sums); break;
    case 3: multiply(weights, scales, x, ldx, 3, sums); break;
    case 4: multiply(weights, scales, x, ldx, 4, sums); break;
    case 5: multiply(weights, scales, x, ldx, 5, sums); break;
    default: multiply(weights, scales, x, ldx, 6, sums); break;
    }
}

static void gemm_tile_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums)
{
    float weights[BLOCK_SIZE][SUBTILE_ROWS] __attribute__((aligned(64)));
    float wide[BLOCK_SIZE * TILE_TOKENS];
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        widen_block(x, n_tokens, wide);
        for (int subtile = 0; subtile < PANEL_ROWS / SUBTILE_ROWS; subtile++) {
            const int row = subtile * SUBTILE_ROWS;
            decode_subtile(panel + CODES_OFFSET + subtile * SUBTILE_BYTES, weights);
            for (int32_t t = 0; t < n_tokens; t += GROUP_TOKENS) {
                int32_t group = n_tokens - t < GROUP_TOKENS ? n_tokens - t : GROUP_TOKENS;
                multiply_group(weights, panel + row, wide + t, n_tokens, group, sums + t * PANEL_ROWS + row);
            }
        }
    }
}

const struct kernel kernel_avx2 = {.name = "gemm_avx2",
                                   .order = "blocks of fma over k, scaled by fma",
                                   .isa = MOE4_ISA_AVX2,
                                   .tile_tokens = TILE_TOKENS,
                                   .gemm_tile = gemm_tile_avx2};
