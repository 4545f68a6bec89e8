/* Routing: rows worked out by hand. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "ref.h"
#include "route_calls.h"

/* One row of f32 logits. */
static void route_one(const moe4_routing *routing, int32_t n_experts, const float *logits, int32_t *ids, float *weights)
{
    struct route_call call = {
        .logits = logits, .dtype = MOE4_DTYPE_F32, .ld = n_experts, .ids = ids, .weights = weights};
    route(routing, n_experts, &call, 0, 1);
}

#define assert_ids(ids, ...)                                                                                           \
    do {                                                                                                               \
        const int32_t expected_ids[] = {__VA_ARGS__};                                                                  \
        assert_memory_equal(ids, expected_ids, sizeof expected_ids);                                                   \
    } while (0)
#define assert_weights(weights, ...)                                                                                   \
    do {                                                                                                               \
        const float expected_weights[] = {__VA_ARGS__};                                                                \
        assert_memory_equal(weights, expected_weights, sizeof expected_weights);                                       \
    } while (0)

static void ties_go_to_the_lower_index(void **state)
{
    (void)state;
    int32_t ids[6];
    float weights[6];
    const float logits[6] = {0.0f, 1.0f, 0.0f, 1.0f, -1.0f, 1.0f};
    moe4_routing routing = routing_of(MOE4_ROUTING_TOPK, 6);
    route_one(&routing, 6, logits, ids, weights);
    assert_ids(ids, 1, 3, 5, 0, 2, 4);
    assert_weights(weights, 1.0f, 1.0f, 1.0f, 0.0f, 0.0f, -1.0f);
    routing.top_k = 2;
    route_one(&routing, 6, logits, ids, weights);
    assert_ids(ids, 1, 3);
}

static void signed_zeros_are_equal(void **state)
{
    (void)state;
    int32_t ids[4];
    float weights[4];
    const float logits[4] = {-1e-45f, -0.0f, 0.0f, 1e-45f};
    moe4_routing routing = routing_of(MOE4_ROUTING_RENORMALIZE, 4);
    route_one(&routing, 4, logits, ids, weights);
    assert_ids(ids, 3, 1, 2, 0);
}

/* Wherever in the row: scans go by batches. */
static void neighbouring_floats_are_told_apart(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2], logits[100];
    for (int best = 0; best < 100; best++)
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int e = 0; e < 100; e++) logits[e] = (float)sign;
            logits[best] = nextafterf((float)sign, 2.0f);
            moe4_routing routing = routing_of(MOE4_ROUTING_TOPK, 2);
            route_one(&routing, 100, logits, ids, weights);
            assert_ids(ids, best, best == 0);
        }
}

static void nan_of_any_sign_comes_first(void **state)
{
    (void)state;
    int32_t ids[5];
    float weights[5];
    const float logits[5] = {3.0f, -NAN, INFINITY, NAN, -INFINITY};
    moe4_routing routing = routing_of(MOE4_ROUTING_TOPK, 5);
    route_one(&routing, 5, logits, ids, weights);
    assert_ids(ids, 1, 3, 2, 0, 4);
    assert_true(isnan(weights[0]) && isnan(weights[1]) && weights[2] == INFINITY && weights[4] == -INFINITY);
    routing.method = MOE4_ROUTING_RENORMALIZE;
    route_one(&routing, 5, logits, ids, weights);
    assert_ids(ids, 1, 3, 2, 0, 4);
    for (int a = 0; a < 5; a++) assert_true(isnan(weights[a]));
    routing = routing_of(MOE4_ROUTING_MINIMAX2, 3);
    route_one(&routing, 5, logits, ids, weights);
    assert_ids(ids, 1, 3, 2);
}

static void infinite_rows_keep_their_nan(void **state)
{
    (void)state;
    int32_t ids[3];
    float weights[3];
    const float lowest[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, high[4] = {0.0f, INFINITY, 1.0f, 2.0f};
    static const moe4_routing_method softmaxes[] = {MOE4_ROUTING_DEFAULT, MOE4_ROUTING_RENORMALIZE,
                                                    MOE4_ROUTING_RENORMALIZE_NAIVE};
    for (int m = 0; m < 3; m++) {
        moe4_routing routing = routing_of(softmaxes[m], 3);
        route_one(&routing, 4, lowest, ids, weights);
        assert_ids(ids, 0, 1, 2);
        for (int a = 0; a < 3; a++) assert_true(isnan(weights[a]));
        route_one(&routing, 4, high, ids, weights);
        assert_ids(ids, 1, 3, 2);
        assert_true(isnan(weights[0]));
    }
}

static void softmax_over_all_or_over_the_chosen(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    const float logits[4] = {(float)log(2.0), 0.0f, (float)log(5.0), -INFINITY}; /* 2 : 1 : 5 : 0 */
    moe4_routing routing = routing_of(MOE4_ROUTING_DEFAULT, 2);
    route_one(&routing, 4, logits, ids, weights);
    assert_ids(ids, 2, 0);
    assert_weights(weights, 0.625f, 0.25f);
    routing.method = MOE4_ROUTING_RENORMALIZE;
    route_one(&routing, 4, logits, ids, weights);
    assert_ids(ids, 2, 0);
    assert_weights(weights, (float)ref_round_bf16(5.0 / 7.0), (float)ref_round_bf16(2.0 / 7.0));
    routing.method = MOE4_ROUTING_RENORMALIZE_NAIVE;
    route_one(&routing, 4, logits, ids, weights);
    assert_weights(weights, (float)ref_round_bf16(5.0 / 7.0), (float)ref_round_bf16(2.0 / 7.0));
}

/* sigmoid(log(p/(1-p))) = p */
static float logit_of(double p)
{
    return (float)log(p / (1.0 - p));
}

static void sigmoids(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    const float logits[3] = {logit_of(0.25), logit_of(0.75), 0.0f};
    moe4_routing routing = routing_of(MOE4_ROUTING_SIGMOID, 2);
    route_one(&routing, 3, logits, ids, weights);
    assert_ids(ids, 1, 2);
    assert_weights(weights, 0.75f, 0.5f);
    routing.method = MOE4_ROUTING_TOPK_SIGMOID;
    route_one(&routing, 3, logits, ids, weights);
    assert_weights(weights, 0.75f, 0.5f);
    routing.method = MOE4_ROUTING_SIGMOID_RENORM;
    route_one(&routing, 3, logits, ids, weights);
    assert_weights(weights, (float)ref_round_bf16(0.6), (float)ref_round_bf16(0.4));
    routing.renormalize = MOE4_RENORMALIZE_NO;
    route_one(&routing, 3, logits, ids, weights);
    assert_weights(weights, 0.75f, 0.5f);
    routing = routing_of(MOE4_ROUTING_LLAMA4, 1);
    route_one(&routing, 3, logits, ids, weights);
    assert_ids(ids, 1);
    assert_weights(weights, 0.75f);
}

/* Sigmoids that are 1 in double are still told apart by their logits. */
static void monotone_methods_select_by_the_logit(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    const float logits[3] = {100.0f, 102.0f, 101.0f};
    static const moe4_routing_method by_logit[] = {MOE4_ROUTING_SIGMOID_RENORM, MOE4_ROUTING_SIGMOID,
                                                   MOE4_ROUTING_TOPK_SIGMOID};
    for (int m = 0; m < 3; m++) {
        moe4_routing routing = routing_of(by_logit[m], 2);
        route_one(&routing, 3, logits, ids, weights);
        assert_ids(ids, 1, 2);
    }
    moe4_routing routing = routing_of(MOE4_ROUTING_MINIMAX2, 2); /* whose keys are all 1 */
    route_one(&routing, 3, logits, ids, weights);
    assert_ids(ids, 0, 1);
}

static void bias_selects_but_never_weighs(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    /* Expert 0 has sigmoid 2e-7 and bias 12: key - bias would leave nothing of it. */
    const float logits[3] = {-15.4f, 0.0f, 5.0f}, bias[3] = {12.0f, 1.0f, -3.0f};
    for (int m = 0; m < 2; m++) {
        moe4_routing routing = routing_of(m ? MOE4_ROUTING_MINIMAX2 : MOE4_ROUTING_DEEPSEEK_V3, 2);
        routing.correction_bias = bias;
        routing.correction_bias_dtype = MOE4_DTYPE_F32;
        route_one(&routing, 3, logits, ids, weights);
        assert_ids(ids, 0, 1);
        double s = 1.0 / (1.0 + exp(15.4f));
        assert_weights(weights, (float)ref_round_bf16(s / (s + 0.5)), (float)ref_round_bf16(0.5 / (s + 0.5)));
    }
    moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2); /* no bias is zero bias */
    route_one(&routing, 3, logits, ids, weights);
    assert_ids(ids, 2, 1);
}

/* The key is rounded to float after the score and again after the bias. */
static void biased_keys_are_floats(void **state)
{
    (void)state;
    int32_t ids[1];
    float weights[1];
    const float logits[2] = {-20.0f, -19.0f}, bias[2] = {1.0f, 1.0f}; /* 1 + 2e-9 = 1 + 6e-9 = 1 */
    moe4_routing routing = routing_of(MOE4_ROUTING_MINIMAX2, 1);
    route_one(&routing, 2, logits, ids, weights);
    assert_ids(ids, 1);
    routing.correction_bias = bias;
    routing.correction_bias_dtype = MOE4_DTYPE_F32;
    route_one(&routing, 2, logits, ids, weights);
    assert_ids(ids, 0);
}

static void groups_are_chosen_by_their_two_best(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    /* Groups {0,1,2}, {3,4,5}, {6,7,8}: sums of the two best 0.9 + 0.1, 0.7 + 0.6, 0.8 + 0.3. */
    const float probabilities[9] = {0.9f, 0.1f, 0.05f, 0.7f, 0.6f, 0.01f, 0.3f, 0.8f, 0.2f};
    float logits[9], bias[9];
    for (int e = 0; e < 9; e++) logits[e] = logit_of(probabilities[e]);
    moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2);
    routing.n_group = 3;
    routing.topk_group = 1;
    route_one(&routing, 9, logits, ids, weights);
    assert_ids(ids, 3, 4);
    routing.topk_group = 2;
    route_one(&routing, 9, logits, ids, weights);
    assert_ids(ids, 7, 3);
    /* All keys negative: groups that were not chosen stay out, below everything. */
    for (int e = 0; e < 9; e++) bias[e] = -2.0f;
    routing.correction_bias = bias;
    routing.correction_bias_dtype = MOE4_DTYPE_F32;
    routing.topk_group = 1;
    route_one(&routing, 9, logits, ids, weights);
    assert_ids(ids, 3, 4);
    /* As many experts as the groups have, although the last ones are worse than those outside. */
    int32_t three[3];
    float of_three[3];
    routing.top_k = 3;
    route_one(&routing, 9, logits, three, of_three);
    assert_ids(three, 3, 4, 5);
}

static void group_ties_go_to_the_lower_index(void **state)
{
    (void)state;
    int32_t ids[4];
    float weights[4];
    const float logits[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    const float impossible[8] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, 0.0f, 0.0f, 1.0f, 1.0f};
    moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 4);
    routing.n_group = 4;
    routing.topk_group = 2;
    route_one(&routing, 8, logits, ids, weights);
    assert_ids(ids, 0, 1, 2, 3);
    routing.correction_bias = impossible;
    routing.correction_bias_dtype = MOE4_DTYPE_F32;
    route_one(&routing, 8, logits, ids, weights);
    assert_ids(ids, 6, 7, 4, 5);
    routing.topk_group = 3; /* one of the groups at -inf must come along */
    routing.top_k = 4;
    int32_t six[6];
    float of_six[6];
    routing.top_k = 6;
    route_one(&routing, 8, logits, six, of_six);
    assert_ids(six, 6, 7, 4, 5, 0, 1);
}

/* A group of +inf and -inf has a NaN score: the largest. */
static void group_scores_may_be_nan(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    const float logits[6] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    const float bias[6] = {INFINITY, INFINITY, -INFINITY, INFINITY, 1.0f, NAN};
    moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2);
    routing.n_group = 3;
    routing.topk_group = 1;
    routing.correction_bias = bias;
    routing.correction_bias_dtype = MOE4_DTYPE_F32;
    route_one(&routing, 6, logits, ids, weights);
    assert_ids(ids, 3, 2);
    routing.topk_group = 2;
    route_one(&routing, 6, logits, ids, weights);
    assert_ids(ids, 5, 3);
}

static void scaling_factor_is_applied_once(void **state)
{
    (void)state;
    int32_t ids[2];
    float plain[2], scaled[2];
    const float logits[4] = {0.25f, 1.5f, -0.5f, 2.0f};
    const int32_t table[2] = {2, 1}, token = 0;
    for (int m = MOE4_ROUTING_DEFAULT; m <= MOE4_ROUTING_HASH; m++) {
        moe4_routing routing = routing_of((moe4_routing_method)m, m == MOE4_ROUTING_LLAMA4 ? 1 : 2);
        if (m == MOE4_ROUTING_HASH) {
            routing.hash_table = table;
            routing.hash_table_dtype = MOE4_DTYPE_I32;
            routing.vocab_size = 1;
        }
        struct route_call call = {.logits = logits, .dtype = MOE4_DTYPE_F32, .ld = 4, .token_ids = &token, .ids = ids};
        call.weights = plain;
        route(&routing, 4, &call, 0, 1);
        routing.scaling_factor = 4.0f; /* exact in bf16 */
        call.weights = scaled;
        route(&routing, 4, &call, 0, 1);
        for (int a = 0; a < routing.top_k; a++) assert_float_equal(scaled[a], 4.0f * plain[a], 0.0f);
    }
}

/* 2.5 * 0.3 is rounded once: bf16(2.5 * w), not bf16(2.5 * bf16(w)). */
static void scaling_comes_before_rounding(void **state)
{
    (void)state;
    int differ = 0;
    for (int i = 0; i < 64; i++) {
        int32_t ids[2];
        float weights[2];
        const float logits[2] = {0.0f, (float)i / 64.0f};
        double w = 1.0 / (1.0 + exp(-(double)logits[1])), other = 0.5;
        moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2);
        routing.scaling_factor = 2.5f;
        route_one(&routing, 2, logits, ids, weights);
        double once = ref_round_bf16(w * 2.5 / (w + other));
        assert_float_equal(weights[i ? 0 : 1], (float)once, 0.0f);
        differ += once != ref_round_bf16(2.5 * ref_round_bf16(w / (w + other)));
    }
    assert_true(differ > 0);
}

/* (1 + 2^-18)(1 + 2^-8 - 2^-18) is above the midpoint 1 + 2^-8 by less than float can hold. */
static void weights_round_once_from_double(void **state)
{
    (void)state;
    int32_t id;
    float weight;
    const float logit = 1.0f + 0x1p-18f;
    moe4_routing routing = routing_of(MOE4_ROUTING_TOPK, 1);
    routing.scaling_factor = 1.0f + 0x1p-8f - 0x1p-18f;
    route_one(&routing, 1, &logit, &id, &weight);
    assert_float_equal(weight, 1.0f + 0x1p-7f, 0.0f);
    const float negative = -logit;
    route_one(&routing, 1, &negative, &id, &weight);
    assert_float_equal(weight, -1.0f - 0x1p-7f, 0.0f);
    const float largest = 3.4028234663852886e38f, smallest = 0x1p-134f; /* beyond bf16; half its smallest */
    routing.scaling_factor = 1.0f;
    route_one(&routing, 1, &largest, &id, &weight);
    assert_true(isinf(weight));
    route_one(&routing, 1, &smallest, &id, &weight);
    assert_float_equal(weight, 0.0f, 0.0f);
    routing.scaling_factor = 1.5f;
    route_one(&routing, 1, &smallest, &id, &weight);
    assert_float_equal(weight, 0x1p-133f, 0.0f);
}

static void sqrt_softplus(void **state)
{
    (void)state;
    int32_t ids[2];
    float weights[2];
    /* softplus(log(e^4 - 1)) = 4, softplus(log(e - 1)) = 1; 1000 must not overflow, -1000 must not vanish beside it */
    const float logits[4] = {(float)log(exp(1.0) - 1.0), -1000.0f, (float)log(exp(4.0) - 1.0), -2.0f};
    moe4_routing routing = routing_of(MOE4_ROUTING_SQRT_SOFTPLUS, 2);
    routing.scaling_factor = 1.5f;
    route_one(&routing, 4, logits, ids, weights);
    assert_ids(ids, 2, 0);
    assert_weights(weights, 1.0f, 0.5f); /* 1.5 * 2/3 */
    const float far[2] = {1e6f, 2.5e5f};
    routing.scaling_factor = 0.0f;
    route_one(&routing, 2, far, ids, weights);
    assert_weights(weights, (float)ref_round_bf16(2.0 / 3.0), (float)ref_round_bf16(1.0 / 3.0));
}

static void hash_takes_ids_from_its_table(void **state)
{
    (void)state;
    const float logits[2][4] = {{0.0f, (float)log(exp(1.0) - 1.0), (float)log(exp(4.0) - 1.0), 9.0f},
                                {0.0f, 0.0f, 0.0f, 0.0f}};
    const int64_t wide[3][3] = {{3, 3, 3}, {2, 1, 2}, {0, 3, 1}}; /* duplicates count twice */
    const int32_t token_ids[2] = {1, 2};
    int32_t narrow[9];
    for (int i = 0; i < 9; i++) narrow[i] = (int32_t)wide[i / 3][i % 3];
    for (int w = 0; w < 2; w++) {
        int32_t ids[6];
        float weights[6];
        moe4_routing routing = routing_of(MOE4_ROUTING_HASH, 3);
        routing.hash_table = w ? (const void *)wide : narrow;
        routing.hash_table_dtype = w ? MOE4_DTYPE_I64 : MOE4_DTYPE_I32;
        routing.vocab_size = 3;
        struct route_call call = {
            .logits = logits, .dtype = MOE4_DTYPE_F32, .ld = 4, .token_ids = token_ids, .ids = ids, .weights = weights};
        route(&routing, 4, &call, 0, 2);
        assert_ids(ids, 2, 1, 2, 0, 3, 1);
        const float third = (float)ref_round_bf16(1.0 / 3.0);
        assert_weights(weights, (float)ref_round_bf16(0.4), (float)ref_round_bf16(0.2), (float)ref_round_bf16(0.4),
                       third, third, third);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ties_go_to_the_lower_index),
        cmocka_unit_test(signed_zeros_are_equal),
        cmocka_unit_test(neighbouring_floats_are_told_apart),
        cmocka_unit_test(nan_of_any_sign_comes_first),
        cmocka_unit_test(infinite_rows_keep_their_nan),
        cmocka_unit_test(softmax_over_all_or_over_the_chosen),
        cmocka_unit_test(sigmoids),
        cmocka_unit_test(monotone_methods_select_by_the_logit),
        cmocka_unit_test(bias_selects_but_never_weighs),
        cmocka_unit_test(biased_keys_are_floats),
        cmocka_unit_test(groups_are_chosen_by_their_two_best),
        cmocka_unit_test(group_ties_go_to_the_lower_index),
        cmocka_unit_test(group_scores_may_be_nan),
        cmocka_unit_test(scaling_factor_is_applied_once),
        cmocka_unit_test(scaling_comes_before_rounding),
        cmocka_unit_test(weights_round_once_from_double),
        cmocka_unit_test(sqrt_softplus),
        cmocka_unit_test(hash_takes_ids_from_its_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
