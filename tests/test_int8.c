/* int8 compute: the quantiser and every kernel bit for bit what the oracle says, whole layers the same bits on every
 * level, and how far they are from a layer without rounding. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "cpu/int8.h"
#include "cpu/kernels/rows.h"
#include "panel.h"

static moe4_isa levels[MAX_LEVELS];
static int32_t n_levels;

static int same_bits(float a, float b)
{
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

/* ---- The quantiser ---- */

/* Blocks of bf16 by the loops of every level and by the oracle. */
static void check_quantiser(const uint16_t *x, int64_t n_blocks)
{
    const int64_t n = n_blocks * BLOCK_SIZE;
    double *values = calloc((size_t)n, sizeof *values);
    int8_t *codes = calloc((size_t)n, 1), *wanted = calloc((size_t)n, 1);
    float *scales = calloc((size_t)n_blocks, sizeof *scales), *wanted_scales = calloc((size_t)n_blocks, sizeof *scales);
    for (int64_t i = 0; i < n; i++) values[i] = ref_bf16(x[i]);
    ref_quantize_int8(values, n, wanted, wanted_scales);
    for (int32_t level = 0; level < n_levels; level++) {
        row_kernels_for(levels[level])->quantize_int8(x, n, codes, scales);
        for (int64_t b = 0; b < n_blocks; b++)
            if (!same_bits(scales[b], wanted_scales[b]))
                fail_msg("block %lld: scale %a, expected %a", (long long)b, (double)scales[b],
                         (double)wanted_scales[b]);
        for (int64_t i = 0; i < n; i++)
            if (codes[i] != wanted[i])
                fail_msg("%a under scale %a: code %d, expected %d", values[i], (double)scales[i / BLOCK_SIZE], codes[i],
                         wanted[i]);
    }
    free(wanted_scales);
    free(scales);
    free(wanted);
    free(codes);
    free(values);
}

/* Every bf16, NaN and infinities included, as the largest of its block, beside fractions of it. */
static void test_every_largest(void **state)
{
    (void)state;
    uint16_t *x = calloc(65536 * BLOCK_SIZE, sizeof *x);
    for (int64_t bits = 0; bits < 65536; bits++)
        for (int64_t k = 0; k < BLOCK_SIZE; k++) {
            double part = (double)(k - 16) / 16 * ref_bf16((uint16_t)bits);
            x[bits * BLOCK_SIZE + k] = k == 0 ? (uint16_t)bits : ref_to_bf16(isfinite(part) ? part : 0);
        }
    check_quantiser(x, 65536);
    free(x);
}

/* Every finite bf16 up to the largest of its block, for largest values that make ties (127 and 254 halves and odd
 * multiples) and ones that do not. */
static void test_every_element(void **state)
{
    (void)state;
    static const double largest[] = {127, 254, 63.5, 100, 1, 0x1.FEp127, 0x1p-133, 0x1.fcp-120};
    uint16_t *x = calloc(65536 * BLOCK_SIZE, sizeof *x);
    for (size_t i = 0; i < sizeof largest / sizeof *largest; i++) {
        int64_t n = 0;
        for (int bits = 0; bits < 65536; bits++) {
            if (!(fabs(ref_bf16((uint16_t)bits)) <= largest[i])) continue;
            if (n % BLOCK_SIZE == 0) x[n++] = ref_to_bf16(largest[i]);
            x[n++] = (uint16_t)bits;
        }
        while (n % BLOCK_SIZE) x[n++] = 0;
        check_quantiser(x, n / BLOCK_SIZE);
    }
    free(x);
}

/* ---- Kernels ---- */

/* A problem's x in int8: codes [n_tokens, K] and scales. */
struct quantised {
    int8_t *codes;
    float *scales;
};

static struct quantised quantise(struct problem *p)
{
    const int64_t n = p->n_tokens * p->K;
    double *values = buffers_allocate(&p->buffers, (size_t)n * sizeof *values);
    struct quantised q = {buffers_allocate(&p->buffers, (size_t)n),
                          buffers_allocate(&p->buffers, (size_t)(n / BLOCK_SIZE) * sizeof *q.scales)};
    for (int64_t i = 0; i < n; i++) values[i] = ref_bf16(p->x[i]);
    ref_quantize_int8(values, n, q.codes, q.scales);
    return q;
}

/* Sums [n][64] of tokens first .. first+n-1. */
static const float *run(const struct kernel *kernel, struct problem *p, const struct quantised *q, int32_t first,
                        int32_t n)
{
    const int64_t n_blocks = p->K / BLOCK_SIZE;
    int32_t *tile = buffers_allocate(&p->buffers, (size_t)(n * n_blocks) * INT8_BLOCK_WORDS * sizeof *tile);
    float *sums = buffers_allocate(&p->buffers, (size_t)n * PANEL_ROWS * sizeof *sums);
    for (int32_t t = 0; t < n; t++)
        int8_pack(q->codes + (first + t) * p->K, q->scales + (first + t) * n_blocks, n_blocks, n, t, tile);
    struct read_ahead ahead = {0};
    read_ahead_begin(&ahead, p->panel, n_blocks * PANEL_BLOCK_BYTES);
    kernel->gemm_tile(p->panel, n_blocks, (const uint16_t *)(const void *)tile, n, sums, &ahead);
    return sums;
}

static void check_kernel(const struct kernel *kernel, struct problem *p, const struct quantised *q)
{
    const float *sums = run(kernel, p, q, 0, p->n_tokens);
    for (int32_t t = 0; t < p->n_tokens; t++)
        for (int32_t row = 0; row < PANEL_ROWS; row++) {
            float expected =
                ref_int8_sum(&p->matrix, p->K, row, q->codes + t * p->K, q->scales + t * p->K / BLOCK_SIZE);
            float got = sums[t * PANEL_ROWS + row];
            if (!same_bits(got, expected))
                fail_msg("%s, K %lld, %d tokens: sum (%d, %d) is %a, expected %a", kernel->name, (long long)p->K,
                         p->n_tokens, t, row, (double)got, (double)expected);
        }
}

/* Any length, any number of tokens; x as it is, and so large and so small that scales and sums leave the range of
 * normal numbers. */
static void test_kernels(void **state)
{
    (void)state;
    static const int64_t lengths[] = {32, 64, 96, 544, 2880};
    static const double factors[] = {1, 0x1p119, 0x1p-120, 0x1p-131};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n = 1; n <= LARGE_TILE_TOKENS; n++)
            for (size_t f = 0; f < (lengths[i] > 96 ? 1 : sizeof factors / sizeof *factors); f++) {
                struct problem p = problem_create(WEIGHTS_ORDINARY, lengths[i], n);
                for (int64_t j = 0; j < n * p.K; j++) p.x[j] = ref_to_bf16(ref_bf16(p.x[j]) * factors[f]);
                struct quantised q = quantise(&p);
                for (int32_t level = 0; level < n_levels; level++) {
                    const struct kernel *kernel = kernel_int8_best(levels[level]);
                    if (n <= TILE_TOKENS || n <= kernel->tile_tokens) check_kernel(kernel, &p, &q);
                }
                problem_release(&p);
            }
}

/* Codes of 127 against weights of 6 and -6: the largest sums a block can have, of either sign. */
static void test_largest_sums(void **state)
{
    (void)state;
    enum { K = 64, N = 5 };
    uint8_t codes[PANEL_ROWS * K / 2], scales[PANEL_ROWS * K / BLOCK_SIZE];
    struct problem p = {.K = K, .n_tokens = N, .matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    memset(scales, SCALE_FAST_MAX, sizeof scales);
    for (int row = 0; row < PANEL_ROWS; row++) memset(codes + row * K / 2, row % 2 ? 0x77 : 0xFF, K / 2);
    p.panel = panel_pack(&p.buffers, &p.matrix, K);
    p.x = buffers_allocate(&p.buffers, N * K * sizeof *p.x);
    for (int i = 0; i < N * K; i++) p.x[i] = ref_to_bf16(ldexp(i / K == 1 ? -1 : 1, -16));
    struct quantised q = quantise(&p);
    for (int i = 0; i < N * K; i++) assert_int_equal(abs(q.codes[i]), 127);
    for (int32_t level = 0; level < n_levels; level++) check_kernel(kernel_int8_best(levels[level]), &p, &q);
    buffers_release(&p.buffers);
}

/* Every scale byte, beside x of every size: the exact kernel holds them all, the others those that are theirs. */
static void test_every_scale(void **state)
{
    (void)state;
    static const double sizes[] = {1, 0x1p-100, 0x1p-133, 0x1p100, 0x1.FEp127, 0};
    for (int scale = 0; scale < 256; scale++) {
        struct problem p = problem_create(WEIGHTS_ORDINARY, 64, sizeof sizes / sizeof *sizes);
        memset((uint8_t *)p.matrix.scales, scale, PANEL_ROWS * 2);
        p.panel = panel_pack(&p.buffers, &p.matrix, p.K);
        for (int64_t i = 0; i < p.n_tokens * p.K; i++)
            p.x[i] = ref_to_bf16(fmod((double)(i * 37 % 101) / 50 - 1, 1) * sizes[i / p.K]);
        struct quantised q = quantise(&p);
        check_kernel(kernel_int8_exact(), &p, &q);
        for (int32_t level = 0; level < n_levels && scale >= SCALE_FAST_MIN && scale <= SCALE_FAST_MAX; level++)
            check_kernel(kernel_int8_best(levels[level]), &p, &q);
        problem_release(&p);
    }
}

/* A NaN scale of x spoils its token's sums and no other's. */
static void test_nonfinite_x(void **state)
{
    (void)state;
    struct problem p = problem_create(WEIGHTS_ORDINARY, 96, 5);
    p.x[2 * p.K + 40] = 0x7F80;
    struct quantised q = quantise(&p);
    for (int32_t level = 0; level < n_levels; level++) {
        const float *sums = run(kernel_int8_best(levels[level]), &p, &q, 0, 5);
        for (int i = 0; i < 5 * PANEL_ROWS; i++) assert_int_equal(!isnan(sums[i]), i / PANEL_ROWS != 2);
    }
    problem_release(&p);
}

/* One weight that is not zero, at every place: it meets its own x and reaches its own sum. */
static void test_one_hot_weights(void **state)
{
    (void)state;
    enum { K = 32, N = 5 };
    uint8_t codes[PANEL_ROWS * K / 2], scales[PANEL_ROWS];
    memset(scales, 127, sizeof scales);
    memset(codes, 0, sizeof codes);
    for (int row = 0; row < PANEL_ROWS; row++)
        for (int k = 0; k < K; k++) {
            struct problem p = {.K = K, .n_tokens = N, .matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
            set_code(codes + row * K / 2, k, 2); /* 1 */
            p.panel = panel_pack(&p.buffers, &p.matrix, K);
            p.x = buffers_allocate(&p.buffers, N * K * sizeof *p.x);
            for (int i = 0; i < N * K; i++) p.x[i] = ref_to_bf16(i % K == 31 ? 127 : i % K + 1 + i / K * 19);
            struct quantised q = quantise(&p);
            for (int32_t level = 0; level < n_levels; level++) {
                const float *sums = run(kernel_int8_best(levels[level]), &p, &q, 0, N);
                for (int i = 0; i < N * PANEL_ROWS; i++)
                    assert_true(sums[i] == (i % PANEL_ROWS == row ? ref_bf16(p.x[i / PANEL_ROWS * K + k]) : 0));
            }
            set_code(codes + row * K / 2, k, 0);
            buffers_release(&p.buffers);
        }
}

static void test_table(void **state)
{
    (void)state;
    assert_ptr_equal(kernel_int8_exact(), &kernel_int8_c);
    assert_ptr_equal(kernel_int8_best(MOE4_ISA_C), &kernel_int8_c);
#if defined(__x86_64__)
    assert_ptr_equal(kernel_int8_best(MOE4_ISA_AVX2), &kernel_int8_avx2);
    assert_ptr_equal(kernel_int8_best(MOE4_ISA_AVX512), &kernel_int8_avx2);
    assert_ptr_equal(kernel_int8_best(MOE4_ISA_AVX512_VNNI), &kernel_int8_avx512_vnni);
    assert_ptr_equal(kernel_int8_best(MOE4_ISA_AMX), &kernel_int8_avx512_vnni);
#endif
    for (int32_t i = 0; i < n_levels; i++) assert_string_equal(kernel_int8_best(levels[i])->order, kernel_int8_c.order);
}

/* ---- Whole layers ---- */

enum { H = 544, I = 160, E = 6, A = 3, T = 41 };

/* Weights of which expert 1 needs the exact kernel, and a call in int8 compute on one level. */
struct layer_call {
    moe4_layer_config config;
    moe4_expert *experts;
    struct call call;
};

/* x is normal; channels 17, 117, ... are `outlier` times as large. */
static void layer_call_run(struct buffers *buffers, moe4_isa isa, double outlier, struct layer_call *l)
{
    const struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 3};
    const struct call_plan plan = {.n_tokens = T, .compute = MOE4_COMPUTE_INT8, .seed = 4};
    l->config = layer_config(H, I, E, A);
    l->experts = weights_create(buffers, &l->config, &weights);
    ((uint8_t *)l->experts[1].down.scales)[5] = 0;
    ((uint8_t *)l->experts[1].gate_up.scales)[7] = 0;
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &l->config, l->experts);
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_int_equal(info.n_exact_experts, 1);
    if (isa) assert_string_equal(info.kernel_int8, kernel_int8_best(isa)->name);
    assert_string_equal(info.order_int8, kernel_int8_c.order);
    l->call = call_create(buffers, &l->config, &plan);
    uint16_t *x = (uint16_t *)l->call.batch.x;
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 17; h < H; h += 100) x[t * H + h] = ref_to_bf16(ref_bf16(x[t * H + h]) / 20 * outlier);
    call_must_run(buffers, context, layer, &l->call);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
}

/* v', its codes and scales, z' and y. */
static void test_same_bits_on_every_level(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct layer_call first, again;
    layer_call_run(&buffers, MOE4_ISA_C, 20, &first);
    for (int32_t i = 0; i < n_levels; i++) {
        layer_call_run(&buffers, levels[i], 20, &again);
        call_compare(&first.call, &again.call);
    }
    buffers_release(&buffers);
}

/* z' from the codes and scales that the call shows. */
static void test_down_rows(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct layer_call l;
    layer_call_run(&buffers, MOE4_ISA_AUTO, 20, &l);
    const moe4_result *result = &l.call.result;
    for (int64_t p = 0; p < T * A; p++) {
        const int64_t row = result->row_map[p];
        const moe4_matrix *down = &l.experts[ref_local_expert(&l.config, result->ids[p])].down;
        const int8_t *codes = (const int8_t *)result->intermediate + row * I;
        const float *scales = (const float *)result->intermediate_scale + row * (I / BLOCK_SIZE);
        for (int64_t h = 0; h < H; h++) {
            float sum = ref_int8_sum(down, I, h, codes, scales) + (float)ref_load(down->bias, down->bias_dtype, h);
            assert_int_equal(result->gemm2_rows[row * H + h], ref_to_bf16(sum));
        }
    }
    buffers_release(&buffers);
}

/* Against the layer without rounding. */
static double error_of(const struct layer_call *l)
{
    double *got = calloc(T * H, sizeof *got), *expected = calloc(T * H, sizeof *expected), x[H], weights[A];
    for (int64_t t = 0; t < T; t++) {
        const moe4_expert *experts[A];
        int32_t locals[A];
        for (int a = 0; a < A; a++) {
            locals[a] = ref_local_expert(&l->config, l->call.result.ids[t * A + a]);
            experts[a] = &l->experts[locals[a]];
            weights[a] = (double)l->call.result.weights[t * A + a];
        }
        for (int h = 0; h < H; h++) {
            x[h] = ref_load(l->call.batch.x, MOE4_DTYPE_BF16, t * H + h);
            got[t * H + h] = ref_load(l->call.result.y, MOE4_DTYPE_BF16, t * H + h);
        }
        ref_token(&l->config, experts, locals, A, weights, x, REF_MODE_UNROUNDED, expected + t * H);
    }
    ref_frobenius error;
    ref_compare(got, expected, T, H, &error);
    free(expected);
    free(got);
    return error.overall;
}

/* What docs/semantics.md says: 1.2e-2 on normal x, 2.2e-2 where one channel in a hundred is 20 times the others. */
static void test_error(void **state)
{
    (void)state;
    static const double outliers[] = {1, 20}, bounds[] = {1.2e-2, 2.2e-2};
    for (int i = 0; i < 2; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        struct layer_call l;
        layer_call_run(&buffers, MOE4_ISA_AUTO, outliers[i], &l);
        double error = error_of(&l);
        print_message("relative error %.2e\n", error);
        assert_true(error > 3.7e-3 && error < bounds[i]);
        buffers_release(&buffers);
    }
}

int main(void)
{
    n_levels = isa_levels(levels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_largest),
        cmocka_unit_test(test_every_element),
        cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_largest_sums),
        cmocka_unit_test(test_every_scale),
        cmocka_unit_test(test_nonfinite_x),
        cmocka_unit_test(test_one_hot_weights),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_same_bits_on_every_level),
        cmocka_unit_test(test_down_rows),
        cmocka_unit_test(test_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
