/* Every GEMM kernel this CPU can run against the oracle: per element, bit for bit where sums are exact, whatever the
 * number of tokens; and the row loops, whose bits are the same on every level. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mxfp8.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/rows.h"
#include "cpu/layout.h"
#include "fixture.h"
#include "panel.h"
#include "ref.h"

static const struct kernel *kernels[MAX_KERNELS];
static int32_t n_kernels;

/* value and magnitude [n_tokens][64] by the oracle. */
static void solve(const struct problem *p, double *value, double *magnitude)
{
    double *x = calloc((size_t)(p->n_tokens * p->K), sizeof *x);
    for (int64_t i = 0; i < p->n_tokens * p->K; i++) x[i] = ref_bf16(p->x[i]);
    ref_gemm(&p->matrix, PANEL_ROWS, p->K, x, p->n_tokens, value, magnitude);
    free(x);
}

static int32_t most_tokens(const struct kernel *kernel)
{
    return kernel->tile_tokens > TILE_TOKENS ? kernel->tile_tokens : TILE_TOKENS;
}

/* All numbers of tokens up to 32, which kernels have code for; the tiles above are made of those, so some will do. */
static int32_t next_count(int32_t n)
{
    return n + (n < 32 ? 1 : 8);
}

static const int64_t lengths[] = {32, 64, 96, 160, 544, 2880};

static void test_bounds(void **state)
{
    (void)state;
    double value[LARGE_TILE_TOKENS * PANEL_ROWS], magnitude[LARGE_TILE_TOKENS * PANEL_ROWS];
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n = 1; n <= LARGE_TILE_TOKENS; n = next_count(n)) {
            struct problem p = problem_create(WEIGHTS_ORDINARY, lengths[i], n);
            solve(&p, value, magnitude);
            for (int32_t k = 0; k < n_kernels; k++) {
                if (n > most_tokens(kernels[k])) continue;
                const double unit = ref_arithmetic_of(kernels[k]->isa).unit;
                const float *sums = problem_run(kernels[k], &p, 0, n);
                for (int32_t j = 0; j < n * PANEL_ROWS; j++) {
                    double bound = ref_gemm_bound(p.K, 1, unit, magnitude[j], 0);
                    if (!(fabs((double)sums[j] - value[j]) <= bound))
                        fail_msg("%s, K %lld, %d tokens: sum %d is %.9g, expected %.9g +- %g", kernels[k]->name,
                                 (long long)p.K, n, j, (double)sums[j], value[j], bound);
                }
            }
            problem_release(&p);
        }
}

static void test_exact_sums(void **state)
{
    (void)state;
    double value[LARGE_TILE_TOKENS * PANEL_ROWS], magnitude[LARGE_TILE_TOKENS * PANEL_ROWS];
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n = 1; n <= LARGE_TILE_TOKENS; n = next_count(n)) {
            struct problem p = problem_create(WEIGHTS_EXACT, lengths[i], n);
            solve(&p, value, magnitude);
            for (int32_t k = 0; k < n_kernels; k++) {
                if (n > most_tokens(kernels[k])) continue;
                const float *sums = problem_run(kernels[k], &p, 0, n);
                for (int32_t j = 0; j < n * PANEL_ROWS; j++) {
                    assert_true(magnitude[j] < 0x1p22); /* multiples of 1/4: exact in f32 */
                    if ((double)sums[j] != value[j])
                        fail_msg("%s, K %lld, %d tokens: sum %d is %.9g, exactly %.9g", kernels[k]->name,
                                 (long long)p.K, n, j, (double)sums[j], value[j]);
                }
            }
            problem_release(&p);
        }
}

/* A token's sums do not depend on the tile it is in. */
static void test_same_bits_in_any_tile(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t k = 0; k < n_kernels; k++) {
            const int32_t most = most_tokens(kernels[k]);
            struct problem p = problem_create(WEIGHTS_ORDINARY, lengths[i], most);
            const float *all = problem_run(kernels[k], &p, 0, most);
            for (int32_t n = 1; n < most; n = next_count(n))
                for (int32_t first = 0; first + n <= most; first += n) {
                    const float *sums = problem_run(kernels[k], &p, first, n);
                    assert_memory_equal(sums, all + first * PANEL_ROWS, (size_t)n * PANEL_ROWS * sizeof *sums);
                }
            problem_release(&p);
        }
}

/* One weight that is not zero, at every place: it meets its own x and reaches its own sum. */
static void test_one_hot_weights(void **state)
{
    (void)state;
    enum { K = 64, N = 3 };
    uint8_t codes[PANEL_ROWS * K / 2], scales[PANEL_ROWS * K / 32];
    struct problem p = {.buffers = {BUFFERS_PLAIN, NULL}, .K = K, .n_tokens = N};
    p.matrix = (moe4_matrix){codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    p.x = buffers_allocate(&p.buffers, N * K * sizeof *p.x);
    for (int i = 0; i < N * K; i++) p.x[i] = ref_to_bf16(i + 1); /* distinct, exact */
    for (int i = 0; i < PANEL_ROWS * K / 32; i++) scales[i] = (uint8_t)(120 + i % 16);
    memset(codes, 0, sizeof codes);
    struct buffers kept = p.buffers;
    for (int row = 0; row < PANEL_ROWS; row++)
        for (int k = 0; k < K; k++) {
            set_code(codes + row * K / 2, k, (unsigned)(1 + (row + k) % 7));
            p.buffers = (struct buffers){BUFFERS_PLAIN, NULL};
            p.panel = panel_pack(&p.buffers, &p.matrix, K);
            for (int32_t j = 0; j < n_kernels; j++) {
                const float *sums = problem_run(kernels[j], &p, 0, N);
                for (int t = 0; t < N; t++)
                    for (int r = 0; r < PANEL_ROWS; r++) {
                        double expected = r == row ? ref_weight(&p.matrix, K, row, k) * ref_bf16(p.x[t * K + k]) : 0;
                        if ((double)sums[t * PANEL_ROWS + r] != expected)
                            fail_msg("%s: weight (%d, %d): sum (%d, %d) is %g, expected %g", kernels[j]->name, row, k,
                                     t, r, (double)sums[t * PANEL_ROWS + r], expected);
                    }
            }
            buffers_release(&p.buffers);
            set_code(codes + row * K / 2, k, 0);
        }
    buffers_release(&kept);
}

static int same_bits(float a, float b)
{
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

/* Each of the 16 codes under each scale byte, at every k, among zeros and times 1: the weight itself, bit for bit. */
static void test_all_scales_and_codes(void **state)
{
    (void)state;
    uint8_t codes[PANEL_ROWS * BLOCK_BYTES], scales[PANEL_ROWS];
    struct problem p = {.K = BLOCK_SIZE, .n_tokens = 1, .matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    uint16_t ones[BLOCK_SIZE];
    for (int k = 0; k < BLOCK_SIZE; k++) ones[k] = 0x3F80;
    p.x = ones;
    for (int i = 0; i < 256 * 8; i++) {
        int scale = i / 8, is_fast = scale >= SCALE_FAST_MIN && scale <= SCALE_FAST_MAX;
        memset(codes, 0, sizeof codes);
        memset(scales, scale, sizeof scales);
        for (int row = 0; row < PANEL_ROWS; row++)
            set_code(codes + row * BLOCK_BYTES, row / 16 * 8 + i % 8, (unsigned)row % 16);
        p.buffers = (struct buffers){BUFFERS_PLAIN, NULL};
        p.panel = panel_pack(&p.buffers, &p.matrix, p.K);
        for (int32_t j = 0; j < n_kernels; j++) {
            if (!is_fast && kernels[j] != kernel_exact()) continue;
            const float *sums = problem_run(kernels[j], &p, 0, 1);
            for (int row = 0; row < PANEL_ROWS; row++) {
                float expected = (float)ref_weight(&p.matrix, p.K, row, row / 16 * 8 + i % 8) + 0.0f; /* no -0 */
                if (!same_bits(sums[row], expected))
                    fail_msg("%s: scale %d, code %d: %g, expected %g", kernels[j]->name, scale, row % 16,
                             (double)sums[row], (double)expected);
            }
        }
        buffers_release(&p.buffers);
    }
}

/* A NaN or an infinity in x: what it meets becomes NaN or infinite, zero weights included; other tokens do not. */
static void test_nonfinite_x(void **state)
{
    (void)state;
    static const uint16_t values[] = {0x7FC0, 0x7F80, 0xFF80};
    for (size_t v = 0; v < sizeof values / sizeof *values; v++)
        for (int32_t j = 0; j < n_kernels; j++) {
            struct problem p = problem_create(WEIGHTS_ORDINARY, 96, 3);
            double value[3 * PANEL_ROWS];
            p.x[p.K + 37] = values[v];
            solve(&p, value, NULL);
            const float *sums = problem_run(kernels[j], &p, 0, 3);
            for (int i = 0; i < 3 * PANEL_ROWS; i++)
                if (isnan(value[i])   ? !isnan(sums[i])
                    : isinf(value[i]) ? sums[i] != (float)value[i]
                                      : !isfinite(sums[i]))
                    fail_msg("%s: sum %d is %g, expected %g", kernels[j]->name, i, (double)sums[i], value[i]);
            problem_release(&p);
        }
}

static void test_table(void **state)
{
    (void)state;
    assert_ptr_equal(kernel_exact(), &kernel_c);
    assert_ptr_equal(kernel_best(MOE4_ISA_C), &kernel_c);
#if defined(__x86_64__)
    assert_ptr_equal(kernel_best(MOE4_ISA_AVX2), &kernel_avx2);
    assert_ptr_equal(kernel_best(MOE4_ISA_AVX512), &kernel_avx512);
    assert_ptr_equal(kernel_best(MOE4_ISA_AVX512_VNNI), &kernel_avx512_vnni);
    assert_ptr_equal(kernel_best(MOE4_ISA_AVX512_BF16), &kernel_avx512_bf16);
    assert_ptr_equal(kernel_best(MOE4_ISA_AMX), &kernel_amx);
    assert_ptr_equal(kernel_best(MOE4_ISA_NEON_BF16), &kernel_c); /* of another family */
#elif defined(__aarch64__)
    assert_ptr_equal(kernel_best(MOE4_ISA_NEON), &kernel_neon);
    assert_ptr_equal(kernel_best(MOE4_ISA_NEON_BF16), &kernel_neon_bf16);
    assert_ptr_equal(kernel_best(MOE4_ISA_AMX), &kernel_c); /* of another family */
#endif
}

/* ---- Row loops ---- */

/* Several rows at once have the bits of each alone in portable C, and those are near the exact sum. */
static void check_dot(const struct row_kernels *loops, const float *x, int64_t ldx, const float *w, int64_t n)
{
    enum { ROWS = 7 };
    for (int32_t n_rows = 1; n_rows <= ROWS; n_rows++) {
        float dot[ROWS], alone;
        loops->dot(x, ldx, n_rows, w, n, dot);
        for (int32_t row = 0; row < n_rows; row++) {
            double value = 0, magnitude = 0;
            for (int64_t i = 0; i < n; i++) {
                value += (double)x[row * ldx + i] * w[i];
                magnitude += fabs((double)x[row * ldx + i] * w[i]);
            }
            rows_c.dot(x + row * ldx, 0, 1, w, n, &alone);
            assert_true(same_bits(dot[row], alone));
            assert_true(fabs((double)alone - value) <= ref_gemm_bound(n, 1, 0x1p-24, magnitude, 0));
        }
    }
}

static void check_row_loops(const struct row_kernels *loops, int64_t n)
{
    struct random random = {(uint64_t)n};
    struct buffers buffers = {BUFFERS_GUARD_AFTER, NULL};
    const size_t bytes = (size_t)n * sizeof(float);
    float *x = buffers_allocate(&buffers, 7 * bytes), *w = buffers_allocate(&buffers, bytes);
    uint16_t *z = buffers_allocate(&buffers, (size_t)n * sizeof *z);
    for (int64_t i = 0; i < 7 * n; i++) x[i] = (float)random_normal(&random);
    for (int64_t i = 0; i < n; i++) {
        w[i] = (float)random_normal(&random);
        z[i] = ref_to_bf16(random_normal(&random));
    }
    check_dot(loops, x, n, w, n);
    float *sum = buffers_copy(&buffers, x, bytes);
    loops->combine(sum, z, w[0], n);
    for (int64_t i = 0; i < n; i++) assert_true(same_bits(sum[i], fmaf(w[0], (float)ref_bf16(z[i]), x[i])));
    buffers_release(&buffers);
}

static void test_row_loops(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n_levels = isa_levels(levels);
    for (int32_t i = 0; i < n_levels; i++)
        for (int64_t n = 1; n < 300; n += 1 + n / 40) check_row_loops(row_kernels_for(levels[i]), n);
}

/* Equal bits, or both NaN. */
static int same_values(const uint16_t a[BLOCK_SIZE], const uint16_t b[BLOCK_SIZE])
{
    int same = 1;
    for (int i = 0; i < BLOCK_SIZE; i++) same &= a[i] == b[i] || ((a[i] & 0x7FFF) > 0x7F80 && (b[i] & 0x7FFF) > 0x7F80);
    return same;
}

/* MXFP8: whatever the scale and the elements, the loops say what the block functions of base/mxfp8.h say. */
static void check_mxfp8_block(const struct row_kernels *loops, const uint16_t x[BLOCK_SIZE])
{
    uint16_t value[BLOCK_SIZE], expected[BLOCK_SIZE];
    uint8_t codes[BLOCK_SIZE], wanted[BLOCK_SIZE], scale, wanted_scale = mxfp8_quantize_block(x, wanted);
    memcpy(value, x, sizeof value);
    loops->quantize_mxfp8(value, BLOCK_SIZE, codes, &scale);
    mxfp8_dequantize_block(wanted, wanted_scale, expected);
    assert_int_equal(scale, wanted_scale);
    if (memcmp(codes, wanted, sizeof codes) || !same_values(value, expected))
        fail_msg("a block that begins with 0x%04x 0x%04x, scale %d", x[0], x[1], scale);
}

static void check_mxfp8_loops(const struct row_kernels *loops)
{
    uint16_t x[BLOCK_SIZE] = {0};
    for (unsigned amax = 0x60; amax < 0x8000; amax += 0x80) { /* a mantissa of 448's: every scale, from below */
        unsigned step = amax % 0x1000 == 0x60 || amax > 0x7F00 ? 1 : 29;
        for (unsigned bits = 0; bits <= amax; bits += step) {
            unsigned at = 1 + bits / step % (BLOCK_SIZE - 1);
            x[0] = (uint16_t)(amax | (bits & 1) << 15);
            x[at] = (uint16_t)(bits | (bits & 4) << 13);
            if (at == BLOCK_SIZE - 1) check_mxfp8_block(loops, x);
        }
        x[0]++; /* just too large for that scale */
        check_mxfp8_block(loops, x);
    }
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned first = 0; first < 256; first += BLOCK_SIZE) {
            uint16_t value[BLOCK_SIZE], expected[BLOCK_SIZE];
            uint8_t codes[BLOCK_SIZE], byte = (uint8_t)scale;
            for (unsigned i = 0; i < BLOCK_SIZE; i++) codes[i] = (uint8_t)(first + i);
            loops->dequantize_mxfp8(codes, &byte, BLOCK_SIZE, value);
            mxfp8_dequantize_block(codes, byte, expected);
            assert_true(same_values(value, expected));
        }
}

static void test_mxfp8_loops(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n_levels = isa_levels(levels);
    for (int32_t i = 0; i < n_levels; i++) check_mxfp8_loops(row_kernels_for(levels[i]));
}

int main(void)
{
    n_kernels = runnable_kernels(kernels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_exact_sums),
        cmocka_unit_test(test_same_bits_in_any_tile),
        cmocka_unit_test(test_one_hot_weights),
        cmocka_unit_test(test_all_scales_and_codes),
        cmocka_unit_test(test_nonfinite_x),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_row_loops),
        cmocka_unit_test(test_mxfp8_loops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
