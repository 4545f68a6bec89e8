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

/* Codes of 0.5 under a scale of 2^60, x just above the smallest normal number: products that a dot product would flush.
 */
static void test_tiny_rows(void **state)
{
    (void)state;
    enum { SIZE = 64 };
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    uint8_t codes[SIZE * SIZE / 2], scales[SIZE * SIZE / 32];
    memset(codes, 0x11, sizeof codes);
    memset(scales, 187, sizeof scales);
    moe4_layer_config config = layer_config(SIZE, SIZE, 1, 1);
    config.activation = MOE4_ACTIVATION_IDENTITY;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    const moe4_expert expert = {{codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE},
                                {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    for (int32_t i = 0; i < n; i++)
        for (int exponent = -126; exponent <= -60; exponent += 6) {
            struct buffers buffers = {BUFFERS_PLAIN, NULL};
            moe4_context *context = context_open(levels[i], 1);
            moe4_layer *layer = layer_open(context, &config, &expert);
            struct call_plan plan = {.n_tokens = 5, .top_k = 1, .y_dtype = MOE4_DTYPE_F32, .seed = 3};
            struct call call = call_create(&buffers, &config, &plan);
            uint16_t *x = (uint16_t *)call.batch.x;
            for (int64_t k = 0; k < 5 * SIZE; k++) /* row 4 is as usual: a row decides alone */
                if (k < 4 * SIZE) store_value(x, MOE4_DTYPE_BF16, k, ldexp(1 + (double)(k % 64) / 64, exponent));
            call_must_run(&buffers, context, layer, &call);
            call.label = "tiny x";
            call_check(&call, &expert, levels[i], 5);
            moe4_layer_destroy(layer);
            moe4_context_destroy(context);
            buffers_release(&buffers);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_rows), cmocka_unit_test(test_tiny_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
