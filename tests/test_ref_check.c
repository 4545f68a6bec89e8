/* The oracle's bounds to their last bit, its checks of routing and output, and its summaries. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "verdicts.h"

static const ref_arithmetic fp32 = REF_ARITHMETIC_FP32, exact = {0, 1, 0, 0, 0}, flushing = {0x1p-24, 1, 1, 0, 0};

/* ---- One sum, to the last bit of its bound ---- */

/* The verdict on `got` for 1 * 1 + bias over K = 32. */
static ref_verdict judge(float bias, double got, const ref_arithmetic *arithmetic)
{
    uint8_t codes[32 * 16] = {0}, scales[32];
    float biases[32] = {0};
    uint16_t bits[32] = {0};
    double v[32] = {1};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = 32;
    config.output_size = 1;
    memset(scales, 127, sizeof scales);
    codes[0] = 0x02;
    biases[0] = bias;
    bits[0] = ref_to_bf16(got);
    const moe4_expert expert = {.down = {codes, scales, 0, 0, biases, MOE4_DTYPE_F32}};
    ref_verdict verdict;
    ref_check_gemm2(&config, &expert, v, bits, 1, arithmetic, &verdict);
    return verdict;
}

static void ratio_is_needed_over_allowed(void **state)
{
    (void)state;
    const double above = 1 + 0x1p-7, tie = 0x1p-8, nu = 37 * 0x1p-24;
    double bound = nu / (1 - nu) * (1 + tie);                  /* to a part in 1000 also for the biases below */
    assert_true(judge((float)tie, 1, &fp32).worst_ratio == 0); /* a tie is explained either way */
    assert_true(judge((float)tie, above, &fp32).worst_ratio == 0);
    ref_verdict verdict = judge((float)(tie - 0x1p-20), above, &fp32);
    passes(&verdict, 1);
    assert_true(fabs(verdict.worst_ratio - 0x1p-20 / bound) < 1e-3);
    verdict = judge((float)(tie - 0x1p-18), above, &fp32);
    fails_at(&verdict, 0, 0);
    assert_true(fabs(verdict.worst_ratio - 0x1p-18 / bound) < 1e-2);
    verdict = judge((float)(tie + 0x1p-20), 1, &fp32);
    assert_true(fabs(verdict.worst_ratio - 0x1p-20 / bound) < 1e-3);
    assert_true(judge((float)(tie + 0x1p-18), 1, &fp32).n_outside == 1);
    assert_true(judge((float)(tie - 0x1p-18), 1, &fp32).worst_ratio == 0);
    bound = nu / (1 - nu) * (3 + tie); /* 1 - (2 + tie - 2^-20) */
    assert_true(fabs(judge((float)(0x1p-20 - tie - 2), -above, &fp32).worst_ratio - 0x1p-20 / bound) < 1e-3);
    bound = nu / (1 - nu) * 0x1.FFp127; /* below where bf16 becomes infinite by 2^104 */
    assert_true(fabs(judge(0x1.FEFFFEp127f, INFINITY, &fp32).worst_ratio - 0x1p104 / bound) < 1e-3);
}

/* Error bounds that reach a tie exactly, and a tie that goes the other way: outside, though no error is too large. */
static void bounds_that_end_at_a_tie(void **state)
{
    (void)state;
    uint8_t codes[32 * 16] = {0}, scales[32] = {0};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = 32;
    config.output_size = 1;
    const float bias = 0x1p-114f - 0x1p-122f; /* and 32 * 2^-126 of flushed products */
    const moe4_expert expert = {.down = {codes, scales, 0, 0, &bias, MOE4_DTYPE_F32}};
    const ref_arithmetic only_flushing = {0, 1, 1, 0, 0};
    const double v[32] = {0};
    uint16_t bits = ref_to_bf16(0x1p-114 + 0x1p-121);
    ref_verdict verdict;
    ref_check_gemm2(&config, &expert, v, &bits, 1, &only_flushing, &verdict);
    fails_at(&verdict, 0, 0);
    assert_true(verdict.worst_ratio == nextafter(1, 2));
    bits = ref_to_bf16(0x1p-114);
    ref_check_gemm2(&config, &expert, v, &bits, 1, &only_flushing, &verdict);
    passes(&verdict, 1);
}

static void exact_sums_allow_no_error(void **state)
{
    (void)state;
    assert_true(judge(0.5f, 1.5, &exact).worst_ratio == 0);
    assert_true(judge(0.5f, 1.5 + 0x1p-7, &exact).worst_ratio == DBL_MAX);
    assert_true(judge(0x1p-8f, 1, &exact).worst_ratio == 0); /* to even, and not up */
    assert_true(judge(0x1p-8f, 1 + 0x1p-7, &exact).n_outside == 1);
    assert_true(judge(-1, -0.0, &exact).worst_ratio == 0);
    assert_true(judge(-1, 0x1p-133, &exact).worst_ratio == DBL_MAX);
    assert_true(judge(-1, NAN, &exact).worst_ratio == DBL_MAX);
}

static void sums_beyond_fp32_are_infinite(void **state)
{
    (void)state;
    assert_true(judge(FLT_MAX, INFINITY, &fp32).n_outside == 0);
    assert_true(judge(FLT_MAX, -INFINITY, &fp32).n_outside == 1);
    assert_true(judge(FLT_MAX, 1e38, &fp32).n_outside == 1);
    assert_true(judge(1e38f, INFINITY, &fp32).n_outside == 1);
    assert_true(judge(NAN, NAN, &fp32).n_outside == 0 && judge(NAN, 1, &fp32).n_outside == 1);
    assert_true(judge(-INFINITY, -INFINITY, &fp32).n_outside == 0 && judge(-INFINITY, NAN, &fp32).n_outside == 1);
}

static void flushing_hardware_may_lose_subnormals(void **state)
{
    (void)state;
    uint8_t codes[32 * 16] = {0x02}, scales[32] = {1}; /* 2^-126 */
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = 32;
    config.output_size = 1;
    const moe4_expert expert = {.down = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    double v[32] = {0x1p-3};
    uint16_t bits = 0;
    ref_verdict verdict;
    ref_check_gemm2(&config, &expert, v, &bits, 1, &fp32, &verdict);
    assert_int_equal(verdict.n_outside, 1);
    ref_check_gemm2(&config, &expert, v, &bits, 1, &flushing, &verdict);
    assert_int_equal(verdict.n_outside, 0);
    bits = ref_to_bf16(0x1p-110);
    ref_check_gemm2(&config, &expert, v, &bits, 1, &flushing, &verdict);
    assert_int_equal(verdict.n_outside, 1);
}

/* ---- The other stages ---- */

static void router_logits(void **state)
{
    (void)state;
    golden_layer *layer = golden_layer_open("gptoss_clamped");
    int64_t n = layer->T, width = layer->config.hidden_size, E = layer->config.n_experts;
    double *x = calloc((size_t)(n * width), sizeof *x);
    float got[12 * 4];
    for (int64_t i = 0; i < n * width; i++) x[i] = ref_bf16(layer->hidden_states[i]);
    memcpy(got, layer->router_logits, sizeof got);
    ref_verdict verdict;
    ref_check_router(&layer->config, x, n, got, &fp32, &verdict);
    passes(&verdict, n * E);
    assert_true(verdict.worst_ratio > 0 && verdict.worst_ratio < 0.5);
    got[5 * 4 + 2] += 1e-3f;
    ref_check_router(&layer->config, x, n, got, &fp32, &verdict);
    fails_at(&verdict, 5, 2);
    got[5 * 4 + 2] = NAN;
    ref_check_router(&layer->config, x, n, got, &fp32, &verdict);
    fails_at(&verdict, 5, 2);
    free(x);
    golden_layer_close(layer);
}

static void combined_rows(void **state)
{
    (void)state;
    const uint16_t a[2] = {0x3F81, 0xC000}, b[2] = {0x3E80, 0x8000}, *rows[3] = {a, NULL, b};
    const float weights[3] = {0.7f, 9, 0.3f};
    float acc[2];
    ref_combine(2, 3, rows, weights, acc);
    uint16_t y[2] = {ref_to_bf16(acc[0]), ref_to_bf16(acc[1])};
    ref_verdict verdict;
    ref_check_combine(2, 3, rows, weights, MOE4_WRITE_OVERWRITE, NULL, y, MOE4_DTYPE_BF16, &verdict);
    passes(&verdict, 2);
    y[1]++;
    ref_check_combine(2, 3, rows, weights, MOE4_WRITE_OVERWRITE, NULL, y, MOE4_DTYPE_BF16, &verdict);
    fails_at(&verdict, 0, 1);
    const float before[2] = {1e-3f, -5};
    float sums[2] = {before[0] + acc[0], before[1] + acc[1]};
    ref_check_combine(2, 3, rows, weights, MOE4_WRITE_ADD, before, sums, MOE4_DTYPE_F32, &verdict);
    passes(&verdict, 2);
    sums[0] = nextafterf(sums[0], 0);
    ref_check_combine(2, 3, rows, weights, MOE4_WRITE_ADD, before, sums, MOE4_DTYPE_F32, &verdict);
    fails_at(&verdict, 0, 0);
    const uint16_t lost[2] = {0x7FC0, 0}, *lost_rows[1] = {lost};
    const float lost_y[2] = {-NAN, 0};
    ref_check_combine(2, 1, lost_rows, weights, MOE4_WRITE_OVERWRITE, NULL, lost_y, MOE4_DTYPE_F32, &verdict);
    passes(&verdict, 2);
    const uint16_t *none[1] = {NULL};
    const float minus_zero[2] = {0, -0.0f};
    ref_check_combine(2, 1, none, weights, MOE4_WRITE_OVERWRITE, NULL, minus_zero, MOE4_DTYPE_F32, &verdict);
    fails_at(&verdict, 0, 1); /* a token without local experts gets +0 */
}

static void verdicts_add_up(void **state)
{
    (void)state;
    ref_verdict total = REF_VERDICT_INIT;
    const ref_verdict none = REF_VERDICT_INIT, good = {10, 0, 0.25, 3, 4, 1, 1, 1}, bad = {5, 2, 9, 0, 1, 7, 1, 2};
    ref_verdict_add(&total, &none);
    assert_true(total.n_checked == 0 && total.worst_row == -1);
    ref_verdict_add(&total, &good);
    assert_true(total.n_checked == 10 && total.worst_ratio == 0.25 && total.worst_row == 3);
    ref_verdict_add(&total, &bad);
    ref_verdict_add(&total, &good);
    assert_true(total.n_checked == 25 && total.n_outside == 2 && total.worst_ratio == 9 && total.worst_column == 1);
    assert_true(total.worst_got == 7 && total.worst_low == 1 && total.worst_high == 2);
}

static void whole_layers(void **state)
{
    (void)state;
    const double expected[6] = {3, 4, 0, 12, 0, 0};
    double got[6] = {3, 4, 0, 12, 0, 0};
    ref_frobenius f;
    ref_compare(got, expected, 2, 3, &f);
    assert_true(f.overall == 0 && f.worst_row == 0 && f.worst_column == 0 && ref_close(&f, REF_MODE_BF16));
    got[1] = 4.013;
    ref_compare(got, expected, 2, 3, &f);
    assert_true(fabs(f.overall - 0.001) < 1e-12 && fabs(f.worst_row - 0.0026) < 1e-12);
    assert_true(f.worst_row_index == 0 && f.worst_column_index == 1 && fabs(f.worst_column - 0.00325) < 1e-12);
    assert_true(ref_close(&f, REF_MODE_BF16) && ref_close(&f, REF_MODE_UNROUNDED));
    got[1] = 4.026; /* column 1 is now 6.5e-3 off, though the whole is within 2e-3 */
    ref_compare(got, expected, 2, 3, &f);
    assert_true(!ref_close(&f, REF_MODE_BF16) && ref_close(&f, REF_MODE_UNROUNDED));
    got[1] = 4, got[2] = 1e-9; /* a column of zeros */
    ref_compare(got, expected, 2, 3, &f);
    assert_true(f.worst_column == DBL_MAX && f.worst_column_index == 2 && f.overall < 1e-9);
    got[2] = NAN;
    ref_compare(got, expected, 2, 3, &f);
    assert_true(f.overall == DBL_MAX && f.worst_row_index == 0);
    const double lost[3] = {NAN, INFINITY, 2}, lost_too[3] = {NAN, INFINITY, 3};
    ref_compare(lost, lost, 1, 3, &f);
    assert_true(f.overall == 0 && f.worst_row == 0);
    ref_compare(lost_too, lost, 1, 3, &f); /* what is infinite hides nothing */
    assert_true(f.overall == 0.5 && !ref_close(&f, REF_MODE_UNROUNDED));
    ref_compare(got, expected, 0, 3, &f);
    assert_true(f.overall == 0 && f.worst_row_index == -1 && f.worst_column_index == -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ratio_is_needed_over_allowed),
        cmocka_unit_test(bounds_that_end_at_a_tie),
        cmocka_unit_test(exact_sums_allow_no_error),
        cmocka_unit_test(sums_beyond_fp32_are_infinite),
        cmocka_unit_test(flushing_hardware_may_lose_subnormals),
        cmocka_unit_test(router_logits),
        cmocka_unit_test(combined_rows),
        cmocka_unit_test(verdicts_add_up),
        cmocka_unit_test(whole_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
