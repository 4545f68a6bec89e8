/* The oracle's activations against values computed elsewhere, and its ranges against dense sampling. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>

#include "ref.h"

static moe4_param same(float value)
{
    return (moe4_param){MOE4_SAME, value, NULL};
}

static moe4_layer_config config_of(moe4_activation activation)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.activation = activation;
    config.gate_up = activation == MOE4_ACTIVATION_RELU2 || activation == MOE4_ACTIVATION_IDENTITY
                         ? MOE4_GATE_UP_NONE
                         : MOE4_GATE_UP_INTERLEAVED;
    return config;
}

static void expect_near(double got, double expected)
{
    if (isnan(expected) ? isnan(got) : got == expected || fabs(got - expected) <= 1e-14 * fabs(expected)) return;
    fail_msg("got %.17g, expected %.17g", got, expected);
}

/* ---- Points ---- */

static void known_values(void **state)
{
    (void)state;
    moe4_layer_config c = config_of(MOE4_ACTIVATION_SILU);
    expect_near(ref_activation(&c, 0, 1, 3), 3 * 0.7310585786300048793);
    expect_near(ref_activation(&c, 0, -2, 1), -0.2384058440442351119);
    expect_near(ref_activation(&c, 0, -200, 1), -200 * exp(-200));
    c = config_of(MOE4_ACTIVATION_SWIGLU_OAI);
    expect_near(ref_activation(&c, 0, 1, 3), 3 * 0.7310585786300048793);
    c.alpha = same(1.702f), c.beta = same(1);
    expect_near(ref_activation(&c, 0, 2, 3), 2 / (1 + exp(-2 * (double)1.702f)) * 4);
    c.beta = same(0);
    expect_near(ref_activation(&c, 0, 2, 3), 2 / (1 + exp(-2 * (double)1.702f)) * 3);
    c.alpha = same(0);
    expect_near(ref_activation(&c, 0, 2, 3), 3);
    c.alpha = same(-1);
    expect_near(ref_activation(&c, 0, 1, 1), 1 - 0.7310585786300048793);
    c = config_of(MOE4_ACTIVATION_GEGLU);
    expect_near(ref_activation(&c, 0, 1, 2), 2 * 0.8413447460685429486);
    expect_near(ref_activation(&c, 0, -3, 1), -0.004049694094890287);
    c = config_of(MOE4_ACTIVATION_GEGLU_TANH);
    expect_near(ref_activation(&c, 0, 1, 2), 2 * 0.8411919906082767170);
    expect_near(ref_activation(&c, 0, -3, 1), -0.0036373920817730178);
    c = config_of(MOE4_ACTIVATION_RELU2);
    expect_near(ref_activation(&c, 0, 0, 3), 9);
    expect_near(ref_activation(&c, 0, 0, -3), 0);
    c = config_of(MOE4_ACTIVATION_IDENTITY);
    expect_near(ref_activation(&c, 0, 0, -3), -3);
}

static void situ(void **state)
{
    (void)state;
    moe4_layer_config c = config_of(MOE4_ACTIVATION_SITU);
    c.alpha = same(4);
    expect_near(ref_activation(&c, 0, 1, 2), 1.4323991137345408825); /* no beta: up passes */
    c.beta = same(25);
    expect_near(ref_activation(&c, 0, 1, 2), 1.4293511315552198772);
    expect_near(ref_activation(&c, 0, -3, 100), -3.0102290500422968194);
    c.limit = same(2); /* both inputs first */
    expect_near(ref_activation(&c, 0, 5, 7), ref_activation(&c, 0, 2, 2));
    expect_near(ref_activation(&c, 0, -3, -7), ref_activation(&c, 0, -3, -2));
}

static void limits_cap_the_gate_above_and_the_up_on_both_sides(void **state)
{
    (void)state;
    static const moe4_activation inputs_capped[] = {MOE4_ACTIVATION_SILU, MOE4_ACTIVATION_SWIGLU_OAI,
                                                    MOE4_ACTIVATION_GEGLU, MOE4_ACTIVATION_GEGLU_TANH};
    for (size_t i = 0; i < sizeof inputs_capped / sizeof *inputs_capped; i++) {
        moe4_layer_config c = config_of(inputs_capped[i]), free = c;
        c.limit = same(10);
        expect_near(ref_activation(&c, 0, 12, -15), ref_activation(&free, 0, 10, -10));
        expect_near(ref_activation(&c, 0, -12, 15), ref_activation(&free, 0, -12, 10));
        c.limit = same(INFINITY);
        expect_near(ref_activation(&c, 0, 12, -15), ref_activation(&free, 0, 12, -15));
    }
    moe4_layer_config c = config_of(MOE4_ACTIVATION_SWIGLU_STEP); /* the gate's factor, not the gate */
    expect_near(ref_activation(&c, 0, 12, -15), 12 / (1 + exp(-12)) * -15);
    c.limit = same(7);
    expect_near(ref_activation(&c, 0, 7, 1), 7 / (1 + exp(-7)));
    expect_near(ref_activation(&c, 0, 12, -15), -49);
    expect_near(ref_activation(&c, 0, -2, 9), 7 * -0.2384058440442351119);
}

static void parameters_per_expert(void **state)
{
    (void)state;
    const float alpha[3] = {1, 2, 0}, beta[3] = {0, 1, -1}, limit[3] = {7, INFINITY, 0.5f};
    moe4_layer_config c = config_of(MOE4_ACTIVATION_SWIGLU_OAI);
    c.alpha = (moe4_param){MOE4_PER_EXPERT, 0, alpha};
    c.beta = (moe4_param){MOE4_PER_EXPERT, 0, beta};
    c.limit = (moe4_param){MOE4_PER_EXPERT, 0, limit};
    expect_near(ref_activation(&c, 0, 8, 9), 7 / (1 + exp(-7)) * 7);
    expect_near(ref_activation(&c, 1, 8, 9), 8 / (1 + exp(-16)) * 10);
    expect_near(ref_activation(&c, 2, 8, -9), 0.25 * -1.5);
}

static void nan_passes_through_clamps(void **state)
{
    (void)state;
    for (int a = MOE4_ACTIVATION_SILU; a <= MOE4_ACTIVATION_IDENTITY; a++) {
        moe4_layer_config c = config_of((moe4_activation)a);
        for (int limited = 0; limited < 2; limited++) {
            c.limit = limited ? same(7) : c.limit;
            expect_near(ref_activation(&c, 0, 1, NAN), NAN);
            if (c.gate_up != MOE4_GATE_UP_NONE) expect_near(ref_activation(&c, 0, NAN, 1), NAN);
        }
    }
}

static void weighted_input_rounds_twice(void **state)
{
    (void)state;
    assert_true(ref_weighted_input(3, 0.5) == 1.5);
    /* 1.0078125 * 1.0000001: in f32, then to bf16. */
    assert_true(ref_weighted_input(1.0078125, (double)1.0000001f) == 1.0078125);
    /* The exact product is just above a bf16 tie, its f32 on it: down to even. */
    double x = 1 + 0x1p-7, w = 1 - 0x1p-7 + 0x1p-8; /* 1 + 2^-8 - 2^-15 */
    assert_true(ref_weighted_input(x, w) == 1);
    w = (1 + 0x1p-8) / x; /* rounded to f32: product within 2^-25 of the tie */
    float w32 = (float)w;
    if ((double)w32 * x <= 1 + 0x1p-8) w32 = nextafterf(w32, 2);
    assert_true((double)w32 * x > 1 + 0x1p-8 && (float)((double)w32 * x) == 1 + 0x1p-8f);
    assert_true(ref_weighted_input(x, w32) == 1);
}

/* ---- Ranges ---- */

static ref_range range_of(double low, double high)
{
    return (ref_range){low, high, REF_NAN_NEVER};
}

/* The range holds every sampled value, and is no wider than them but for the slack of rounding. */
static void expect_range(const moe4_layer_config *c, ref_range gate, ref_range up)
{
    ref_range range = ref_activation_range(c, 0, gate, up);
    double low = INFINITY, high = -INFINITY;
    enum { STEPS = 400 };
    for (int i = 0; i <= STEPS; i++)
        for (int j = 0; j <= STEPS; j += STEPS / 8) {
            double v = ref_activation(c, 0, gate.low + (gate.high - gate.low) * i / STEPS,
                                      up.low + (up.high - up.low) * j / STEPS);
            low = fmin(low, v);
            high = fmax(high, v);
        }
    double slack_low = fmax(0x1p-22 * fabs(low), 0x1p-148), slack_high = fmax(0x1p-22 * fabs(high), 0x1p-148);
    double width = 1e-3 * (high - low) + 1e-9 * (slack_low + slack_high); /* what sampling may miss */
    if (!(range.low <= low - slack_low * (1 - 1e-9) && range.low >= low - slack_low - width))
        fail_msg("activation %d gate %g..%g up %g..%g: low %.17g, sampled %.17g", c->activation, gate.low, gate.high,
                 up.low, up.high, range.low, low);
    if (!(range.high >= high + slack_high * (1 - 1e-9) && range.high <= high + slack_high + width))
        fail_msg("activation %d gate %g..%g up %g..%g: high %.17g, sampled %.17g", c->activation, gate.low, gate.high,
                 up.low, up.high, range.high, high);
}

static void expect_ranges(const moe4_layer_config *c)
{
    static const double gates[][2] = {{1, 2},         {-0.5, 0.5}, {-2, -1},     {-1.28, -1.27}, {-1, -0.5},
                                      {-0.76, -0.74}, {-30, -20},  {-5, 5},      {6.5, 9},       {3, 3},
                                      {-1.3, 8},      {0.7, 1.5},  {-0.01, 0.02}};
    static const double ups[][2] = {{1, 2}, {-3, -2}, {-1, 2}, {-9, 9}, {6.9, 7.1}, {2, 2}, {-0.001, 0.001}};
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++)
        for (size_t j = 0; j < sizeof ups / sizeof *ups; j++)
            expect_range(c, range_of(gates[i][0], gates[i][1]), range_of(ups[j][0], ups[j][1]));
}

static void ranges_are_tight(void **state)
{
    (void)state;
    for (int a = MOE4_ACTIVATION_SILU; a <= MOE4_ACTIVATION_IDENTITY; a++) {
        moe4_layer_config c = config_of((moe4_activation)a);
        expect_ranges(&c);
        if (c.gate_up == MOE4_GATE_UP_NONE) continue;
        c.limit = same(7);
        expect_ranges(&c);
    }
    static const float alphas[] = {1.702f, 0.1f, 0, -1, -1.702f};
    for (size_t i = 0; i < sizeof alphas / sizeof *alphas; i++)
        for (int a = MOE4_ACTIVATION_SWIGLU_OAI; a <= MOE4_ACTIVATION_GEGLU_TANH; a++) {
            if (a == MOE4_ACTIVATION_SITU && alphas[i] <= 0) continue;
            moe4_layer_config c = config_of((moe4_activation)a);
            c.alpha = same(alphas[i]);
            c.beta = same(a == MOE4_ACTIVATION_SITU ? 25 : 1);
            expect_ranges(&c);
        }
    moe4_layer_config kimi = config_of(MOE4_ACTIVATION_SITU);
    kimi.alpha = same(4), kimi.beta = same(25);
    expect_ranges(&kimi);
}

static void ranges_of_subnormals_have_absolute_slack(void **state)
{
    (void)state;
    moe4_layer_config c = config_of(MOE4_ACTIVATION_IDENTITY);
    ref_range range = ref_activation_range(&c, 0, range_of(0, 0), range_of(0x1p-140, 0x1p-140));
    assert_true(range.low == 0x1p-140 - 0x1p-148 && range.high == 0x1p-140 + 0x1p-148);
}

static void assert_range(ref_range got, double low, double high, ref_nan nan)
{
    if (got.nan == nan && (nan == REF_NAN_ALWAYS || (got.low == low && got.high == high))) return;
    fail_msg("range %g..%g nan %d, expected %g..%g nan %d", got.low, got.high, got.nan, low, high, nan);
}

static void infinities_and_nan_in_ranges(void **state)
{
    (void)state;
    const ref_range one = range_of(1, 1), around_zero = range_of(-1, 1), lost = {NAN, NAN, REF_NAN_ALWAYS};
    const ref_range plus = range_of(INFINITY, INFINITY), minus = range_of(-INFINITY, -INFINITY);
    const ref_range any = {-INFINITY, INFINITY, REF_NAN_MAYBE};
    moe4_layer_config c = config_of(MOE4_ACTIVATION_SILU);
    assert_range(ref_activation_range(&c, 0, lost, one), 0, 0, REF_NAN_ALWAYS);
    assert_range(ref_activation_range(&c, 0, one, lost), 0, 0, REF_NAN_ALWAYS);
    assert_range(ref_activation_range(&c, 0, plus, one), INFINITY, INFINITY, REF_NAN_NEVER);
    assert_range(ref_activation_range(&c, 0, one, minus), -INFINITY, -INFINITY, REF_NAN_NEVER);
    assert_range(ref_activation_range(&c, 0, minus, one), 0, 0, REF_NAN_ALWAYS); /* -inf * 0 */
    assert_range(ref_activation_range(&c, 0, range_of(0, 0), plus), 0, 0, REF_NAN_ALWAYS);
    assert_range(ref_activation_range(&c, 0, around_zero, plus), -INFINITY, INFINITY, REF_NAN_MAYBE);
    assert_range(ref_activation_range(&c, 0, any, one), -INFINITY, INFINITY, REF_NAN_MAYBE);
    assert_range(ref_activation_range(&c, 0, range_of(1e39, 2e39), one), INFINITY, INFINITY, REF_NAN_NEVER);
    c.limit = same(7);
    ref_range capped = ref_activation_range(&c, 0, plus, minus), same_point = ref_activation_range(&c, 0, one, any);
    assert_true(capped.nan == REF_NAN_NEVER && capped.high > -49 && capped.low < -48.9 && capped.high < -48.9);
    assert_true(same_point.nan == REF_NAN_MAYBE && same_point.low > -7 && same_point.high < 7);
    c = config_of(MOE4_ACTIVATION_IDENTITY);
    assert_range(ref_activation_range(&c, 0, lost, plus), INFINITY, INFINITY, REF_NAN_NEVER); /* there is no gate */
}

static void sums_of_fp32(void **state)
{
    (void)state;
    const double n = 64 + 4 + 1 + 2, u = 0x1p-24;
    assert_true(ref_gemm_bound(64, 1, u, 3, 0.5) == n * u / (1 - n * u) * 3 + 0.5);
    assert_true(ref_gemm_bound(1 << 13, 1, 0x1p-13, 1, 0) == INFINITY);
    assert_range(ref_sum_range(1, 3, 0.25), 0.75, 1.25, REF_NAN_NEVER);
    assert_range(ref_sum_range(NAN, NAN, 1), 0, 0, REF_NAN_ALWAYS);
    assert_range(ref_sum_range(-INFINITY, INFINITY, INFINITY), -INFINITY, -INFINITY, REF_NAN_NEVER);
    /* Positive terms of 6e38 and negative ones of 5e38: either may overflow on the way; and so on. */
    assert_range(ref_sum_range(1e38, 11e38, 1), -INFINITY, INFINITY, REF_NAN_MAYBE);
    assert_range(ref_sum_range(3e38, 4e38, 0), 3e38, INFINITY, REF_NAN_NEVER);
    assert_range(ref_sum_range(-3e38, 4e38, 0), -INFINITY, -3e38, REF_NAN_NEVER);
    assert_range(ref_sum_range(5e38, 5e38, 1), 5e38, INFINITY, REF_NAN_NEVER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_values),
        cmocka_unit_test(situ),
        cmocka_unit_test(limits_cap_the_gate_above_and_the_up_on_both_sides),
        cmocka_unit_test(parameters_per_expert),
        cmocka_unit_test(nan_passes_through_clamps),
        cmocka_unit_test(weighted_input_rounds_twice),
        cmocka_unit_test(ranges_are_tight),
        cmocka_unit_test(ranges_of_subnormals_have_absolute_slack),
        cmocka_unit_test(infinities_and_nan_in_ranges),
        cmocka_unit_test(sums_of_fp32),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
