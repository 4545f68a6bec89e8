/* The oracle's routing against small examples worked out by hand, and an independent DeepSeek-V3 router. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "ref.h"

static moe4_routing routing_of(moe4_routing_method method, int32_t top_k)
{
    moe4_routing routing = MOE4_ROUTING_INIT;
    routing.method = method;
    routing.top_k = top_k;
    return routing;
}

static moe4_routing biased(moe4_routing_method method, int32_t top_k, const float *bias)
{
    moe4_routing routing = routing_of(method, top_k);
    routing.correction_bias = bias;
    routing.correction_bias_dtype = MOE4_DTYPE_F32;
    return routing;
}

/* Routes one token; weights are expected to be bf16 of the given numbers, to the bit. */
static void expect(const moe4_routing *routing, int32_t E, const double *logits, const int32_t *ids,
                   const double *weights)
{
    int32_t got_ids[128];
    double got_weights[128];
    ref_route(routing, E, logits, 0, got_ids, got_weights);
    for (int32_t a = 0; a < routing->top_k; a++) {
        if (got_ids[a] != ids[a]) fail_msg("slot %d: expert %d, expected %d", a, got_ids[a], ids[a]);
        double expected = ref_round_bf16(weights[a]);
        if (isnan(expected) ? !isnan(got_weights[a]) : got_weights[a] != expected)
            fail_msg("slot %d: weight %.17g, expected %.17g", a, got_weights[a], expected);
    }
}

#define EXPECT(routing, logits, ids, ...)                                                                              \
    expect(&(routing), (int32_t)(sizeof(logits) / sizeof *(logits)), (logits), (ids), (const double[]){__VA_ARGS__})

/* ---- Methods ---- */

static void every_method_by_hand(void **state)
{
    (void)state;
    const double tenths[4] = {log(1), log(2), log(3), log(4)}; /* softmax 0.1 0.2 0.3 0.4 */
    const double odds[4] = {log(3), log(1), -log(3), log(4)};  /* sigmoid 3/4 1/2 1/4 4/5 */
    const int32_t last_two[2] = {3, 2}, sigmoid_two[2] = {3, 0};
    moe4_routing r = routing_of(MOE4_ROUTING_DEFAULT, 2);
    EXPECT(r, tenths, last_two, 0.4, 0.3);
    r.method = MOE4_ROUTING_RENORMALIZE;
    EXPECT(r, tenths, last_two, 4.0 / 7, 3.0 / 7);
    r.method = MOE4_ROUTING_RENORMALIZE_NAIVE;
    EXPECT(r, tenths, last_two, 4.0 / 7, 3.0 / 7);
    r.method = MOE4_ROUTING_TOPK;
    EXPECT(r, odds, sigmoid_two, log(4), log(3));
    r.method = MOE4_ROUTING_TOPK_SIGMOID;
    EXPECT(r, odds, sigmoid_two, 0.8, 0.75);
    r.method = MOE4_ROUTING_SIGMOID;
    EXPECT(r, odds, sigmoid_two, 0.8, 0.75);
    r.method = MOE4_ROUTING_SIGMOID_RENORM;
    EXPECT(r, odds, sigmoid_two, 0.8 / 1.55, 0.75 / 1.55);
    r.renormalize = MOE4_RENORMALIZE_NO;
    EXPECT(r, odds, sigmoid_two, 0.8, 0.75);
    r = routing_of(MOE4_ROUTING_LLAMA4, 1);
    EXPECT(r, odds, sigmoid_two, 0.8);
    r = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2);
    EXPECT(r, odds, sigmoid_two, 0.8 / 1.55, 0.75 / 1.55);
    r.method = MOE4_ROUTING_MINIMAX2;
    EXPECT(r, odds, sigmoid_two, 0.8 / 1.55, 0.75 / 1.55);
}

static void negative_logits_are_topk_weights(void **state)
{
    (void)state;
    const double logits[3] = {-3, -1, -2};
    moe4_routing r = routing_of(MOE4_ROUTING_TOPK, 2);
    EXPECT(r, logits, ((const int32_t[]){1, 2}), -1, -2);
}

static void sqrt_softplus(void **state)
{
    (void)state;
    /* softplus 1, 4, 10000 (exp would overflow) and 2^-72 ~ exp(s): roots 1, 2, 100, 2^-36. */
    const double logits[4] = {log(exp(1) - 1), log(exp(4) - 1), 10000, -72 * log(2)};
    moe4_routing r = routing_of(MOE4_ROUTING_SQRT_SOFTPLUS, 4);
    r.scaling_factor = 1.5f;
    EXPECT(r, logits, ((const int32_t[]){2, 1, 0, 3}), 150 / 103.0, 3 / 103.0, 1.5 / 103, 0x1.8p-36 / 103);
    const float bias[4] = {0, 5, 0, -200};
    r = biased(MOE4_ROUTING_SQRT_SOFTPLUS, 2, bias);
    const double small[4] = {log(exp(1) - 1), log(exp(1) - 1), log(exp(4) - 1), 10000};
    EXPECT(r, small, ((const int32_t[]){1, 2}), 1 / 3.0, 2 / 3.0);
}

static void hash_takes_ids_from_the_table(void **state)
{
    (void)state;
    const int32_t table32[6] = {0, 1, 3, 3, 2, 0};
    const int64_t table64[6] = {0, 1, 3, 3, 2, 0};
    const double logits[4] = {log(exp(1) - 1), 0, log(exp(4) - 1), 7};
    moe4_routing r = routing_of(MOE4_ROUTING_HASH, 2);
    r.vocab_size = 3;
    for (int wide = 0; wide < 2; wide++) {
        int32_t ids[2];
        double weights[2];
        r.hash_table = wide ? (const void *)table64 : table32;
        r.hash_table_dtype = wide ? MOE4_DTYPE_I64 : MOE4_DTYPE_I32;
        ref_route(&r, 4, logits, 1, ids, weights); /* the same expert twice: both count */
        assert_true(ids[0] == 3 && ids[1] == 3 && weights[0] == 0.5 && weights[1] == 0.5);
        ref_route(&r, 4, logits, 2, ids, weights);
        assert_true(ids[0] == 2 && ids[1] == 0);
        assert_true(weights[0] == ref_round_bf16(2.0 / 3) && weights[1] == ref_round_bf16(1.0 / 3));
    }
}

static void scaling_factor_multiplies_once(void **state)
{
    (void)state;
    const double equal[4] = {0, 0, 0, 0};
    const int32_t ids[4] = {0, 1, 2, 3};
    static const moe4_routing_method methods[] = {MOE4_ROUTING_DEEPSEEK_V3, MOE4_ROUTING_MINIMAX2,
                                                  MOE4_ROUTING_SQRT_SOFTPLUS, MOE4_ROUTING_RENORMALIZE};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        moe4_routing r = routing_of(methods[i], 4);
        EXPECT(r, equal, ids, 0.25, 0.25, 0.25, 0.25);
        r.scaling_factor = 2.5f;
        EXPECT(r, equal, ids, 0.625, 0.625, 0.625, 0.625);
    }
}

static void tiny_sums_do_not_divide_by_zero(void **state)
{
    (void)state;
    const double logits[2] = {-100, -1000};
    const int32_t ids[2] = {0, 1};
    moe4_routing r = routing_of(MOE4_ROUTING_SIGMOID_RENORM, 2);
    EXPECT(r, logits, ids, exp(-100) / 1e-20, 0);
    r.method = MOE4_ROUTING_DEEPSEEK_V3;
    EXPECT(r, logits, ids, exp(-100) / (exp(-100) + 1e-20), 0);
    r.method = MOE4_ROUTING_SIGMOID_RENORM;
    const double around[2] = {log(1e-20), log(1e-20)}; /* sum 2e-20: above the least, so it divides */
    EXPECT(r, around, ids, 0.5, 0.5);
}

/* ---- Selection ---- */

static void ties_go_to_the_lower_index(void **state)
{
    (void)state;
    const double equal[5] = {1, 1, 1, 1, 1}, zeros[3] = {-0.0, 0.0, -1};
    const float bias[5] = {0.5f, 0.5f, 0.5f, 0.5f, 0.5f};
    for (int m = MOE4_ROUTING_DEFAULT; m < MOE4_ROUTING_HASH; m++) {
        moe4_routing r = biased((moe4_routing_method)m, 3, bias);
        int32_t ids[3];
        double weights[3];
        ref_route(&r, 5, equal, 0, ids, weights);
        assert_true(ids[0] == 0 && ids[1] == 1 && ids[2] == 2);
        r.correction_bias = NULL;
        ref_route(&r, 3, zeros, 0, ids, weights);
        assert_true(ids[0] == 0 && ids[1] == 1 && ids[2] == 2);
    }
}

static void monotone_methods_select_on_the_logit(void **state)
{
    (void)state;
    /* Scores that saturate or underflow to ties. */
    const double high[3] = {800, 801, 802}, low[3] = {-801, 0, -800};
    static const moe4_routing_method methods[] = {
        MOE4_ROUTING_DEFAULT, MOE4_ROUTING_RENORMALIZE,    MOE4_ROUTING_LLAMA4,  MOE4_ROUTING_RENORMALIZE_NAIVE,
        MOE4_ROUTING_TOPK,    MOE4_ROUTING_SIGMOID_RENORM, MOE4_ROUTING_SIGMOID, MOE4_ROUTING_TOPK_SIGMOID};
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        moe4_routing r = routing_of(methods[i], 2);
        int32_t ids[2];
        double weights[2];
        ref_route(&r, 3, high, 0, ids, weights);
        assert_true(ids[0] == 2 && ids[1] == 1);
        ref_route(&r, 3, low, 0, ids, weights);
        assert_true(ids[0] == 1 && ids[1] == 2);
    }
}

static void biased_keys_are_f32(void **state)
{
    (void)state;
    /* At 1024 f32 steps by 2^-13: scores 1/2 and 1/2 + 2^-16 fall together, so the lower index wins. */
    const double logits[2] = {0, log((0.5 + 0x1p-16) / (0.5 - 0x1p-16))};
    const float bias[2] = {1024, 1024};
    moe4_routing r = biased(MOE4_ROUTING_MINIMAX2, 1, bias);
    EXPECT(r, logits, ((const int32_t[]){0}), 1);
    r.correction_bias = NULL;
    EXPECT(r, logits, ((const int32_t[]){1}), 1);
    /* So is the score before the bias is added: 1/2 + 2^-26 is 1/2, and less 1/2 nothing. */
    const double close[2] = {0, 0x1p-24};
    const float minus_half[2] = {-0.5f, -0.5f};
    r = biased(MOE4_ROUTING_MINIMAX2, 1, minus_half);
    EXPECT(r, close, ((const int32_t[]){0}), 1);
}

static void nan_is_the_largest_key(void **state)
{
    (void)state;
    const double nans[5] = {INFINITY, -NAN, 3, NAN, -INFINITY};
    const int32_t ids[4] = {1, 3, 0, 2};
    moe4_routing r = routing_of(MOE4_ROUTING_RENORMALIZE, 4);
    EXPECT(r, nans, ids, NAN, NAN, NAN, NAN);
    r.method = MOE4_ROUTING_DEFAULT;
    EXPECT(r, nans, ids, NAN, NAN, NAN, NAN);
    r.method = MOE4_ROUTING_SIGMOID_RENORM;
    EXPECT(r, nans, ids, NAN, NAN, NAN, NAN);
    r.method = MOE4_ROUTING_DEEPSEEK_V3;
    EXPECT(r, nans, ids, NAN, NAN, NAN, NAN);
    r.method = MOE4_ROUTING_SIGMOID;
    EXPECT(r, nans, ids, NAN, NAN, 1, 1 / (1 + exp(-3)));
    r.method = MOE4_ROUTING_TOPK;
    EXPECT(r, nans, ids, NAN, NAN, INFINITY, 3);
    r = routing_of(MOE4_ROUTING_LLAMA4, 1);
    EXPECT(r, nans, ids, NAN);
}

static void rows_of_minus_infinity(void **state)
{
    (void)state;
    const double lost[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, one[4] = {-INFINITY, 1, -INFINITY, -INFINITY};
    const int32_t ids[3] = {0, 1, 2}, one_first[3] = {1, 0, 2};
    moe4_routing r = routing_of(MOE4_ROUTING_RENORMALIZE, 3);
    EXPECT(r, lost, ids, NAN, NAN, NAN);
    EXPECT(r, one, one_first, 1, 0, 0);
    r.method = MOE4_ROUTING_DEFAULT;
    EXPECT(r, lost, ids, NAN, NAN, NAN);
    EXPECT(r, one, one_first, 1, 0, 0);
    r.method = MOE4_ROUTING_SIGMOID_RENORM;
    EXPECT(r, lost, ids, 0, 0, 0);
    r.method = MOE4_ROUTING_SQRT_SOFTPLUS;
    EXPECT(r, lost, ids, 0, 0, 0);
}

static void infinite_logits_make_softmax_nan(void **state)
{
    (void)state;
    const double logits[3] = {1, INFINITY, 2};
    moe4_routing r = routing_of(MOE4_ROUTING_RENORMALIZE, 2);
    EXPECT(r, logits, ((const int32_t[]){1, 2}), NAN, NAN);
}

/* ---- Selection bias and groups ---- */

static void bias_selects_but_does_not_weigh(void **state)
{
    (void)state;
    const double logits[3] = {log(3), -log(3), -15.4};
    const float bias[3] = {0, 0, 12};
    moe4_routing r = biased(MOE4_ROUTING_MINIMAX2, 2, bias);
    double tiny = 1 / (1 + exp(15.4));
    EXPECT(r, logits, ((const int32_t[]){2, 0}), tiny / (tiny + 0.75), 0.75 / (tiny + 0.75));
}

static void bias_dtypes(void **state)
{
    (void)state;
    const double logits[3] = {0, 0, 0};
    const int32_t ids[3] = {1, 2, 0};
    const float f32[3] = {-1, 2, 0.5f};
    const uint16_t bf16[3] = {0xBF80, 0x4000, 0x3F00}, f16[3] = {0xBC00, 0x4000, 0x3800};
    moe4_routing r = biased(MOE4_ROUTING_DEEPSEEK_V3, 3, f32);
    EXPECT(r, logits, ids, 1 / 3.0, 1 / 3.0, 1 / 3.0);
    r.correction_bias = bf16, r.correction_bias_dtype = MOE4_DTYPE_BF16;
    EXPECT(r, logits, ids, 1 / 3.0, 1 / 3.0, 1 / 3.0);
    r.correction_bias = f16, r.correction_bias_dtype = MOE4_DTYPE_F16;
    EXPECT(r, logits, ids, 1 / 3.0, 1 / 3.0, 1 / 3.0);
}

static moe4_routing grouped(int32_t top_k, int32_t n_group, int32_t topk_group, const float *bias)
{
    moe4_routing r = biased(MOE4_ROUTING_DEEPSEEK_V3, top_k, bias);
    r.n_group = n_group;
    r.topk_group = topk_group;
    return r;
}

static void groups_score_by_their_two_best(void **state)
{
    (void)state;
    const double logits[8] = {0, 0, 0, 0, log(3), 0, 0, 0};
    /* Keys: 1.4 .6 .6 .5 | 1.05 1.1 .5 .5: the best expert is in the group that loses, 2.0 to 2.15. */
    const float bias[8] = {0.9f, 0.1f, 0.1f, 0, 0.3f, 0.6f, 0, 0};
    moe4_routing r = grouped(3, 2, 1, bias);
    EXPECT(r, logits, ((const int32_t[]){5, 4, 6}), 0.5 / 1.75, 0.75 / 1.75, 0.5 / 1.75);
    r.n_group = 1, r.topk_group = 0;
    EXPECT(r, logits, ((const int32_t[]){0, 5, 4}), 0.5 / 1.75, 0.5 / 1.75, 0.75 / 1.75);
    r.n_group = 0;
    EXPECT(r, logits, ((const int32_t[]){0, 5, 4}), 0.5 / 1.75, 0.5 / 1.75, 0.75 / 1.75);
}

static void lost_groups_lose_to_negative_keys(void **state)
{
    (void)state;
    const double logits[6] = {0, 0, 0, 0, 0, 0};
    const float bias[6] = {-9, -8, -7, -6, -1, -9};
    moe4_routing r = grouped(4, 3, 2, bias); /* sums of keys -16, -12, -9; top_k is all that two groups hold */
    EXPECT(r, logits, ((const int32_t[]){4, 3, 2, 5}), 0.25, 0.25, 0.25, 0.25);
    const float at_minus_infinity[6] = {0, 0, 0, 5, 5, -INFINITY};
    r = grouped(3, 2, 1, at_minus_infinity); /* no key is low enough to fall behind another group's */
    EXPECT(r, logits, ((const int32_t[]){3, 4, 5}), 1 / 3.0, 1 / 3.0, 1 / 3.0);
}

static void group_ties_go_to_the_lower_group(void **state)
{
    (void)state;
    const double logits[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    const float bias[8] = {0, 0, 1, 3, 2, 2, 3, 1};
    moe4_routing r = grouped(2, 4, 1, bias); /* groups 1, 2 and 3 all score 4 + 2 halves */
    EXPECT(r, logits, ((const int32_t[]){3, 2}), 0.5, 0.5);
    const double with_nan[8] = {0, NAN, 9, 9, 9, 9, 9, 9};
    EXPECT(r, with_nan, ((const int32_t[]){1, 0}), NAN, NAN); /* a group with a NaN is the largest */
}

static void golden_deepseek_v3(void **state)
{
    (void)state;
    golden_router *golden = golden_router_open();
    int32_t A = golden->routing.top_k, E = golden->E;
    double *logits = calloc((size_t)E, sizeof *logits), weights[8];
    int32_t ids[8];
    for (int64_t t = 0; t < golden->T; t++) {
        for (int32_t e = 0; e < E; e++) logits[e] = golden->logits[t * E + e];
        ref_route(&golden->routing, E, logits, 0, ids, weights);
        for (int32_t a = 0; a < A; a++) { /* slot order is not part of the golden data */
            int32_t b = 0;
            while (b < A && golden->ids[t * A + b] != ids[a]) b++;
            if (b == A) fail_msg("token %d: expert %d is not in the golden set", (int)t, ids[a]);
            double expected = golden->weights[t * A + b];
            if (fabs(weights[a] - expected) > 0x1p-8 * expected)
                fail_msg("token %d slot %d: weight %g, expected %g", (int)t, a, weights[a], expected);
        }
    }
    free(logits);
    golden_router_close(golden);
}

/* ---- Ranges, maps, and the check itself ---- */

static void local_experts(void **state)
{
    (void)state;
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.n_experts = 8;
    config.first_expert = 3;
    config.n_local_experts = 4;
    static const int32_t in_range[10] = {-1, -1, -1, -1, 0, 1, 2, 3, -1, -1}; /* ids -1..8 */
    for (int id = -1; id <= 8; id++) assert_int_equal(ref_local_expert(&config, id), in_range[id + 1]);
    config.n_local_experts = 0; /* all from the first */
    assert_int_equal(ref_local_expert(&config, 7), 4);
    assert_int_equal(ref_local_expert(&config, 8), -1);
    assert_int_equal(ref_local_expert(&config, INT32_MIN), -1);
    const int32_t map[8] = {2, -1, 0, -1, -1, 1, -1, -1};
    config.expert_map = map;
    for (int id = 0; id < 8; id++) assert_int_equal(ref_local_expert(&config, id), map[id]);
    assert_int_equal(ref_local_expert(&config, -1), -1);
    assert_int_equal(ref_local_expert(&config, 8), -1);
}

static void check_finds_one_wrong_slot(void **state)
{
    (void)state;
    const moe4_routing r = routing_of(MOE4_ROUTING_RENORMALIZE, 2);
    const float logits[6] = {0, 1, 2, 5, 4, 5};
    int32_t ids[4] = {2, 1, 0, 2};
    float weights[4] = {0, 0, 0.5f, 0.5f};
    weights[0] = (float)ref_round_bf16(1 / (1 + exp(-1)));
    weights[1] = (float)ref_round_bf16(1 / (1 + exp(1)));
    ref_verdict verdict;
    ref_check_routing(&r, 3, logits, NULL, 2, ids, weights, &verdict);
    assert_true(verdict.n_checked == 4 && verdict.n_outside == 0 && verdict.worst_ratio == 0);
    weights[1] = nextafterf(weights[1], 1);
    ref_check_routing(&r, 3, logits, NULL, 2, ids, weights, &verdict);
    assert_true(verdict.n_outside == 1 && verdict.worst_ratio > 1);
    assert_true(verdict.worst_row == 0 && verdict.worst_column == 1 && verdict.worst_got == (double)weights[1]);
    ids[3] = 1;
    ids[2] = 2;
    ref_check_routing(&r, 3, logits, NULL, 2, ids, weights, &verdict);
    assert_int_equal(verdict.n_outside, 3);
    ref_check_routing(&r, 3, logits, NULL, 0, NULL, NULL, &verdict);
    assert_true(verdict.n_checked == 0 && verdict.n_outside == 0 && verdict.worst_row == -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_method_by_hand),
        cmocka_unit_test(negative_logits_are_topk_weights),
        cmocka_unit_test(sqrt_softplus),
        cmocka_unit_test(hash_takes_ids_from_the_table),
        cmocka_unit_test(scaling_factor_multiplies_once),
        cmocka_unit_test(tiny_sums_do_not_divide_by_zero),
        cmocka_unit_test(ties_go_to_the_lower_index),
        cmocka_unit_test(monotone_methods_select_on_the_logit),
        cmocka_unit_test(biased_keys_are_f32),
        cmocka_unit_test(nan_is_the_largest_key),
        cmocka_unit_test(rows_of_minus_infinity),
        cmocka_unit_test(infinite_logits_make_softmax_nan),
        cmocka_unit_test(bias_selects_but_does_not_weigh),
        cmocka_unit_test(bias_dtypes),
        cmocka_unit_test(groups_score_by_their_two_best),
        cmocka_unit_test(lost_groups_lose_to_negative_keys),
        cmocka_unit_test(group_ties_go_to_the_lower_group),
        cmocka_unit_test(golden_deepseek_v3),
        cmocka_unit_test(local_experts),
        cmocka_unit_test(check_finds_one_wrong_slot),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
