/* Activations so large that a block of unscaled products overflows, and so small that it vanishes: kernels treat such
 * rows apart (cpu/tame.h). */
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

enum { SIDE = 64, MANY = 60 };

/* Token t of a finished call, all of whose tokens choose one expert, in a call of its own. */
static struct call run_alone(struct buffers *buffers, moe4_context *context, const moe4_layer *layer,
                             const struct call *call, int64_t t)
{
    struct call_plan plan = call->plan;
    plan.n_tokens = 1;
    struct call alone = call_create(buffers, call->config, &plan);
    memcpy((void *)alone.batch.x, (const uint16_t *)call->batch.x + t * SIDE, SIDE * sizeof(uint16_t));
    memcpy((void *)alone.topk.weights, (const float *)call->topk.weights + t, sizeof(float));
    call_must_run(buffers, context, layer, &alone);
    return alone;
}

/* Many rows of an expert meet weights that are scaled already, but for tiles with a row to which that makes a
 * difference: row 17, whose x is given.  Every row's bits are those that it has alone.
 *
 * Weights are 1, times 2^-32 but for the first two rows of up, and -1 in the second of these. */
static void check_many_rows(moe4_isa isa, const double x[SIDE])
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    uint8_t up_codes[SIDE * SIDE / 2], up_scales[SIDE * SIDE / 32], codes[SIDE * SIDE / 2], scales[SIDE * SIDE / 32];
    memset(codes, 0x22, sizeof codes);
    memset(up_codes, 0x22, sizeof up_codes);
    memset(up_codes + SIDE / 2, 0xAA, SIDE / 2);
    memset(scales, 95, sizeof scales);
    memset(up_scales, 95, sizeof up_scales);
    memset(up_scales, 127, 2 * SIDE / 32);
    const moe4_expert expert = {{up_codes, up_scales, 0, 0, NULL, MOE4_DTYPE_NONE},
                                {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    moe4_layer_config config = layer_config(SIDE, SIDE, 1, 1);
    config.activation = MOE4_ACTIVATION_IDENTITY;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    moe4_context *context = context_open(isa, 1);
    moe4_layer *layer = layer_open(context, &config, &expert);
    struct call_plan plan = {
        .n_tokens = MANY, .top_k = 1, .routing = ROUTE_IDS_F32, .ids = IDS_ONE, .y_dtype = MOE4_DTYPE_F32, .seed = 24};
    struct call call = call_create(&buffers, &config, &plan);
    for (int64_t k = 0; k < SIDE; k++) store_value((void *)call.batch.x, MOE4_DTYPE_BF16, 17 * SIDE + k, x[k]);
    call_must_run(&buffers, context, layer, &call);
    call.label = "many rows";
    call_check(&call, &expert, isa, MANY);
    for (int64_t t = 0; t < MANY; t++) {
        struct call alone = run_alone(&buffers, context, layer, &call, t);
        call_compare_tokens(&call, t, &alone, 0);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_many_rows(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    double tiny_x[SIDE] = {0x1p-60, -0x1p-60}, tiny_intermediate[SIDE]; /* once the two large ones have cancelled */
    for (int k = 2; k < SIDE; k++) tiny_x[k] = 0x1p-95;
    for (int k = 0; k < SIDE; k++) tiny_intermediate[k] = 0x1p-69; /* a sum of 2^-63 */
    for (int32_t i = 0; i < n; i++) {
        check_many_rows(levels[i], tiny_x);
        check_many_rows(levels[i], tiny_intermediate);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_rows), cmocka_unit_test(test_tiny_rows),
                                       cmocka_unit_test(test_many_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
