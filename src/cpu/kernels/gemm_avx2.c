/* AVX2 with FMA and F16C.  A weight is the high byte of an f16, so a block's codes are looked up once as bytes, which a
 * shift and a mask make f16, in the order in which they are wanted: [k][16 rows].  Where they are multiplied, 8 rows
 * are widened to f32 as they are loaded, one instruction, for up to 6 tokens: 12 sums of 16 rows, two weights and a
 * broadcast fill the registers. */
#include <immintrin.h>
#include <string.h>

#include "cpu/kernels/kernel.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/unroll.h"
#include "cpu/kernels/widen.h"
#include "cpu/layout.h"

enum { LINES = 4, LINE_K = 8, HALVES = 2, LANES = 8, SUBTILES = PANEL_ROWS / SUBTILE_ROWS, GROUP_TOKENS = 6 };

/* Compiled by themselves: inlined into a loop over blocks, their constants take registers from the sums. */
#define APART static __attribute__((noinline))

/* Unscaled weights of 16 rows and one k.  Two rows that lie 8 apart are neighbours, since that takes no more than a
 * shift and a blend: 0 8 1 9 2 10 3 11 in one half, 4 12 5 13 6 14 7 15 in the other.  Scales and sums follow, until
 * the end. */
typedef uint16_t k_weights[HALVES][LANES] __attribute__((aligned(32)));
typedef k_weights subtile_weights[BLOCK_SIZE];

/* The low halves of 32 bytes, codes of 16 rows of two k in turn. */
static inline void decode_two(__m256i codes, k_weights *first, k_weights *second)
{
    const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, -0x80, -0x48, -0x44, -0x42, -0x40, -0x3E, -0x3C, -0x3A));
    const __m256i index = _mm256_and_si256(codes, _mm256_set1_epi8(15));
    const __m256i values = _mm256_shuffle_epi8(high_bytes, index);
    _mm256_store_si256((__m256i *)first, _mm256_slli_epi16(values, 8));
    _mm256_store_si256((__m256i *)second, _mm256_and_si256(values, _mm256_set1_epi16(-256)));
}

static inline void decode_line(const __m256i *codes, k_weights *w)
{
    const __m256i a = _mm256_load_si256(codes), b = _mm256_load_si256(codes + 1);
    const __m256i even = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA);
    const __m256i odd = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
    decode_two(even, w, w + 4);
    decode_two(_mm256_srli_epi16(even, 4), w + 2, w + 6);
    decode_two(odd, w + 1, w + 5);
    decode_two(_mm256_srli_epi16(odd, 4), w + 3, w + 7);
}

/* Meanwhile asks for as much of what comes: a pair of lines at a time, since the codes come from the second level, and
 * would wait behind requests for all of it. */
APART void decode_block(const uint8_t *block, struct line_pair ahead, subtile_weights weights[SUBTILES],
                        uint8_t scales[PANEL_ROWS])
{
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const __m256i *vectors = (const __m256i *)block;
    for (int i = 0; i < PANEL_ROWS / 32; i++)
        _mm256_store_si256((__m256i *)scales + i, _mm256_shuffle_epi8(_mm256_load_si256(vectors + i), order));
    vectors += 2;
    for (int s = 0; s < SUBTILES; s++)
        for (int line = 0; line < LINES; line++, vectors += 2) {
            read_pairs(&ahead, line % 2);
            decode_line(vectors, weights[s] + line * LINE_K);
        }
}

static inline __m256 load_weights(const uint16_t w[LANES])
{
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *)w));
}

/* The scales of eight rows, E8M0 bytes 1..254. */
static inline __m256 load_scales(const uint8_t *scales)
{
    __m256i exponents = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponents, 23));
}

/* With three tokens gcc would keep it for the next subtile, in a register that is not there. */
static inline __attribute__((always_inline)) __m256 broadcast(const float *x, const int n_tokens)
{
    __m256 v;
    if (n_tokens != 3) return _mm256_broadcast_ss(x);
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(v) : "m"(*x));
    return v;
}

struct sums {
    __m256 of[SUBTILES][GROUP_TOKENS][HALVES];
};

/* block += weights of one k times x, of which there are n_tokens; the first k has nothing to add to. */
static inline __attribute__((always_inline)) void multiply_k(const subtile_weights *weights, int k, const float *x,
                                                             const int n_sub, const int n_tokens, const int is_first,
                                                             struct sums *block)
{
    UNROLL
    for (int s = 0; s < n_sub; s++) {
        __m256 w[HALVES];
        for (int h = 0; h < HALVES; h++) w[h] = load_weights(weights[s][k][h]);
        UNROLL
        for (int t = 0; t < n_tokens; t++) {
            const __m256 v = broadcast(x + t, n_tokens);
            UNROLL
            for (int h = 0; h < HALVES; h++)
                block->of[s][t][h] = is_first ? _mm256_mul_ps(w[h], v) : _mm256_fmadd_ps(w[h], v, block->of[s][t][h]);
        }
    }
}

/* sums[t][16 n_sub rows] += scales * (weights . x) for n_tokens tokens, of ldx in x.  Always inlined with constants: a
 * block's sums stay in registers, 2 * n_sub * n_tokens <= 12. */
static inline __attribute__((always_inline)) void multiply(const subtile_weights *weights, const uint8_t *scales,
                                                           const float *even, const float *odd, int32_t ldx,
                                                           const int n_sub, const int n_tokens, float *sums)
{
    enum { PAIRS = 3 }; /* of k in a turn; that many turns make a block, with the first pair */
    struct sums block;
    multiply_k(weights, 0, even, n_sub, n_tokens, 1, &block);
    multiply_k(weights, 1, odd, n_sub, n_tokens, 0, &block);
#pragma GCC unroll 1
    for (int pair = 1; pair < BLOCK_SIZE / 2; pair += PAIRS) {
        UNROLL
        for (int i = 0; i < PAIRS; i++) {
            even += ldx, odd += ldx;
            __asm__("" : "+r"(even), "+r"(odd)); /* two pointers, not one for every use */
            multiply_k(weights, 2 * (pair + i), even, n_sub, n_tokens, 0, &block);
            multiply_k(weights, 2 * (pair + i) + 1, odd, n_sub, n_tokens, 0, &block);
        }
    }
    UNROLL
    for (int i = 0; i < n_sub * HALVES; i++) {
        const __m256 scale = load_scales(scales + i * LANES);
        UNROLL
        for (int t = 0; t < n_tokens; t++) {
            float *sum = sums + t * PANEL_ROWS + i * LANES;
            const __m256 value = block.of[i / HALVES][t][i % HALVES];
            _mm256_store_ps(sum, _mm256_fmadd_ps(value, scale, _mm256_load_ps(sum)));
        }
    }
}

/* A panel's block for N tokens.  Few take several subtiles at once: fmas that add to one sum wait for each other. */
#define MULTIPLY_GROUP(N)                                                                                              \
    APART void multiply_##N(const subtile_weights *weights, const uint8_t *scales, const float *even,                  \
                            const float *odd, int32_t ldx, float *sums)                                                \
    {                                                                                                                  \
        enum { N_SUB = N == 1 ? 4 : N <= 3 ? 2 : 1 };                                                                  \
        for (int s = 0; s < SUBTILES; s += N_SUB)                                                                      \
            multiply(weights + s, scales + s * SUBTILE_ROWS, even, odd, ldx, N_SUB, N, sums + s * SUBTILE_ROWS);       \
    }
MULTIPLY_GROUP(1)
MULTIPLY_GROUP(2)
MULTIPLY_GROUP(3)
MULTIPLY_GROUP(4)
MULTIPLY_GROUP(5)
MULTIPLY_GROUP(6)

static void (*const multiply_group[])(const subtile_weights *, const uint8_t *, const float *, const float *, int32_t,
                                      float *) = {NULL,       multiply_1, multiply_2, multiply_3,
                                                  multiply_4, multiply_5, multiply_6};

/* Rows as they were. */
static void restore_order(float *sums, int32_t n_subtiles)
{
    for (int32_t i = 0; i < n_subtiles; i++, sums += SUBTILE_ROWS) {
        const __m256 first = _mm256_load_ps(sums), second = _mm256_load_ps(sums + LANES);
        const __m256 low = _mm256_permute2f128_ps(first, second, 0x20);
        const __m256 high = _mm256_permute2f128_ps(first, second, 0x31);
        _mm256_store_ps(sums, _mm256_shuffle_ps(low, high, 0x88));
        _mm256_store_ps(sums + LANES, _mm256_shuffle_ps(low, high, 0xDD));
    }
}

/* Fives and sixes, where they add up to it: four's sums are too few for fmas not to wait. */
static int32_t group_of(int32_t n_tokens)
{
    return n_tokens <= GROUP_TOKENS ? n_tokens : n_tokens % 6 == 0 ? 6 : 5;
}

static void gemm_tile_avx2(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                           struct read_ahead *ahead)
{
    subtile_weights weights[SUBTILES];
    uint8_t scales[PANEL_ROWS] __attribute__((aligned(32)));
    struct wide_block wide;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        const struct line_pair pair = read_block(ahead, b);
        widen_block(x, n_tokens, &wide);
        decode_block(panel, pair, weights, scales);
        for (int32_t first = 0, n; first < n_tokens; first += n) {
            n = group_of(n_tokens - first);
            multiply_group[n](weights, scales, wide.even + first, wide.odd + first, n_tokens,
                              sums + first * PANEL_ROWS);
        }
    }
    restore_order(sums, n_tokens * SUBTILES);
}

const struct kernel kernel_avx2 = {.name = "gemm_avx2",
                                   .order = "blocks of fma over k, scaled by fma",
                                   .isa = MOE4_ISA_AVX2,
                                   .tile_tokens = LARGE_TILE_TOKENS,
                                   .run = PAIR,
                                   .for_x = &kernel_avx2_integers,
                                   .gemm_tile = gemm_tile_avx2};
