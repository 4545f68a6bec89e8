/* Activations so large that a block of unscaled products overflows: kernels divide such a row first (cpu/tame.h). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/convert.h"
#include "call.h"

enum { H = 128, I = 96, E = 4, A = 2, T = 9 };

/* A call with row 3 of x multiplied by 2^huge; scales small enough that the layer's values stay finite. */
static void run_and_check(moe4_isa isa, int huge, moe4_activation activation)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, E, A);
    struct weight_plan weights = {.seed = 21};
    config.activation = activation;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    if (activation == MOE4_ACTIVATION_IDENTITY) config.gate_up = MOE4_GATE_UP_NONE;
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(isa, 1);
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call_plan plan = {.n_tokens = T, .top_k = A, .y_dtype = MOE4_DTYPE_F32, .seed = 22};
    struct call plain = call_create(&buffers, &config, &plan), call = call_create(&buffers, &config, &plan);
    uint16_t *x = (uint16_t *)call.batch.x + 3 * H;
    for (int64_t h = 0; h < H; h++) x[h] = bf16_from_f32(ldexpf(bf16_to_f32(x[h]), huge));
    call_must_run(&buffers, context, layer, &plain);
    call_must_run(&buffers, context, layer, &call);
    call.label = "huge x";
    call_check(&call, experts, isa, T * A);
    for (int64_t t = 0; t < T; t++)
        if (t != 3) call_compare_tokens(&plain, t, &call, t); /* a row decides alone */
    const float *y = (const float *)call.result.y + 3 * H;
    int n_finite = 0;
    for (int64_t h = 0; h < H; h++) n_finite += isfinite(y[h]) && y[h] != 0;
    if (activation == MOE4_ACTIVATION_IDENTITY && huge < 124) assert_true(n_finite > H / 2);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_huge_rows(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    for (int32_t i = 0; i < n; i++)
        for (int huge = 116; huge <= 125; huge += 3) {
            run_and_check(levels[i], huge, MOE4_ACTIVATION_IDENTITY);
            run_and_check(levels[i], huge, MOE4_ACTIVATION_SILU);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
