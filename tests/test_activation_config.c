/* Activations: what a config may say. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "context.h"
#include "cpu/activation.h"

/* clang-format off */
#define ABSENT {MOE4_ABSENT, 0.0f, 0}
#define SAME(x) {MOE4_SAME, x, 0}
#define EACH(x) {MOE4_PER_EXPERT, 0.0f, x}
#define GATED MOE4_GATE_UP_GATE_FIRST
#define UNGATED MOE4_GATE_UP_NONE
/* clang-format on */

static void configs_are_judged(void **state)
{
    (void)state;
    static const struct {
        moe4_activation activation;
        moe4_gate_up gate_up;
        moe4_param alpha, beta, limit;
        const char *complaint; /* part of the message; NULL: fine */
    } cases[] = {
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, ABSENT, ABSENT, NULL},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, ABSENT, SAME(INFINITY), NULL},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, ABSENT, SAME(0.0f), "limit is 0, expected a number above 0"},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, ABSENT, SAME(-7.0f), "limit is -7, expected a number above 0"},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, ABSENT, SAME(NAN), "limit is nan, expected a number above 0"},
        {MOE4_ACTIVATION_SILU, GATED, SAME(1.0f), ABSENT, ABSENT, "alpha is given, but activation silu"},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, SAME(0.0f), ABSENT, "beta is given, but activation silu"},
        {MOE4_ACTIVATION_SILU, GATED, ABSENT, EACH(NULL), ABSENT, "beta is given, but activation silu"},
        {MOE4_ACTIVATION_SILU, UNGATED, ABSENT, ABSENT, ABSENT, "gate_up is none, but activation silu has a gate"},
        {MOE4_ACTIVATION_SILU, 4, ABSENT, ABSENT, ABSENT, "gate_up 4"},
        {MOE4_ACTIVATION_SWIGLU_OAI, GATED, SAME(-1.0f), SAME(-1.0f), SAME(7.0f), NULL},
        {MOE4_ACTIVATION_SWIGLU_OAI, GATED, EACH(NULL), EACH(NULL), EACH(NULL), NULL},
        {MOE4_ACTIVATION_SWIGLU_OAI, GATED, SAME(INFINITY), ABSENT, ABSENT, "alpha is inf, expected a finite"},
        {MOE4_ACTIVATION_SWIGLU_OAI, GATED, ABSENT, SAME(NAN), ABSENT, "beta is nan, expected a finite"},
        {MOE4_ACTIVATION_SWIGLU_OAI, GATED, ABSENT, {3, 0.0f, 0}, ABSENT, "beta: presence 3"},
        {MOE4_ACTIVATION_SITU, GATED, SAME(4.0f), SAME(25.0f), SAME(3.0f), NULL},
        {MOE4_ACTIVATION_SITU, GATED, SAME(4.0f), ABSENT, ABSENT, NULL},
        {MOE4_ACTIVATION_SITU, GATED, ABSENT, SAME(25.0f), ABSENT, "alpha is absent"},
        {MOE4_ACTIVATION_SITU, GATED, SAME(0.0f), ABSENT, ABSENT, "alpha is 0, expected a finite number above 0"},
        {MOE4_ACTIVATION_SITU, GATED, SAME(4.0f), SAME(INFINITY), ABSENT, "beta is inf, expected a finite"},
        {MOE4_ACTIVATION_SITU, GATED, SAME(4.0f), SAME(-1.0f), ABSENT, "beta is -1, expected a finite number above"},
        {MOE4_ACTIVATION_GEGLU, GATED, SAME(0.0f), SAME(0.0f), SAME(1.0f), NULL},
        {MOE4_ACTIVATION_GEGLU_TANH, GATED, SAME(1.0f), SAME(1.0f), ABSENT, NULL},
        {MOE4_ACTIVATION_SWIGLU_STEP, GATED, ABSENT, ABSENT, SAME(7.0f), NULL},
        {MOE4_ACTIVATION_SWIGLU_STEP, GATED, SAME(1.0f), ABSENT, ABSENT, "alpha is given, but activation swiglu_step"},
        {MOE4_ACTIVATION_RELU2, UNGATED, ABSENT, ABSENT, ABSENT, NULL},
        {MOE4_ACTIVATION_RELU2, GATED, ABSENT, ABSENT, ABSENT, "gate_up is gate_first, but activation relu2 has no"},
        {MOE4_ACTIVATION_RELU2, UNGATED, ABSENT, ABSENT, SAME(7.0f), "limit is given, but activation relu2"},
        {MOE4_ACTIVATION_IDENTITY, UNGATED, ABSENT, ABSENT, ABSENT, NULL},
        {MOE4_ACTIVATION_IDENTITY, MOE4_GATE_UP_INTERLEAVED, ABSENT, ABSENT, ABSENT, "gate_up is interleaved"},
        {MOE4_ACTIVATION_NONE, UNGATED, ABSENT, ABSENT, ABSENT, "activation is not set"},
        {9, UNGATED, ABSENT, ABSENT, ABSENT, "activation 9 is unknown"},
        {-1, UNGATED, ABSENT, ABSENT, ABSENT, "activation -1 is unknown"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        struct moe4_context context = {0};
        moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
        config.activation = cases[c].activation;
        config.gate_up = cases[c].gate_up;
        config.alpha = cases[c].alpha;
        config.beta = cases[c].beta;
        config.limit = cases[c].limit;
        moe4_status status = activation_validate(&context, &config);
        if (status != (cases[c].complaint ? MOE4_EINVAL : MOE4_OK) ||
            (cases[c].complaint && !strstr(context.message, cases[c].complaint)))
            fail_msg("case %zu: %s, \"%s\"", c, moe4_status_name(status), context.message);
    }
}

static void values_of_experts_are_judged(void **state)
{
    (void)state;
    const float good[3] = {1.0f, 2.0f, 3.0f}, bad[3] = {1.0f, 2.0f, NAN};
    struct moe4_context context = {0};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.activation = MOE4_ACTIVATION_SITU;
    config.alpha = (moe4_param)EACH(good);
    config.limit = (moe4_param)EACH(bad);
    assert_int_equal(activation_validate_values(&context, &config, 2), MOE4_OK);
    assert_int_equal(activation_validate_values(&context, &config, 3), MOE4_EINVAL);
    assert_string_equal(context.message,
                        "limit of local expert 2 is nan, expected a number above 0 (absent or +inf: no "
                        "clamp) for activation situ");
    config.limit.values = NULL;
    assert_int_equal(activation_validate_values(&context, &config, 3), MOE4_EINVAL);
    assert_string_equal(context.message, "limit is per expert, but its values are NULL");
}

static void parameters_are_resolved(void **state)
{
    (void)state;
    const float alphas[2] = {1.5f, 2.5f};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.activation = MOE4_ACTIVATION_SWIGLU_OAI;
    config.alpha = (moe4_param)EACH(alphas);
    config.limit = (moe4_param)SAME(7.0f);
    struct activation_params params = activation_resolve(&config, 1);
    assert_float_equal(params.alpha, 2.5f, 0.0f);
    assert_float_equal(params.beta, 0.0f, 0.0f);
    assert_float_equal(params.limit, 7.0f, 0.0f);
    config.activation = MOE4_ACTIVATION_SITU;
    config.limit.presence = MOE4_ABSENT;
    params = activation_resolve(&config, 0);
    assert_float_equal(params.alpha, 1.5f, 0.0f);
    assert_true(isinf(params.beta) && isinf(params.limit));
}

static void names(void **state)
{
    (void)state;
    assert_string_equal(activation_name(MOE4_ACTIVATION_SWIGLU_OAI), "swiglu_oai");
    assert_null(activation_name(MOE4_ACTIVATION_NONE));
    assert_null(activation_name((moe4_activation)N_ACTIVATIONS));
    for (int a = 1; a < N_ACTIVATIONS; a++) assert_non_null(activation_name((moe4_activation)a));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(configs_are_judged),
        cmocka_unit_test(values_of_experts_are_judged),
        cmocka_unit_test(parameters_are_resolved),
        cmocka_unit_test(names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
