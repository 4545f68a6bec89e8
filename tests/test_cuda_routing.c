/* Routing and grouping as only large batches have them on a GPU: slots sorted by a cluster of blocks, experts chosen
 * from candidates.  Every token and slot is judged by the oracle, a few rows' GEMMs too. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "call.h"

enum { H = 32, I = 32 };

static const struct many {
    moe4_routing_method method;
    int32_t E, A, T;
    double spread; /* of the bias; 0 = none */
} cases[] = {
    {MOE4_ROUTING_RENORMALIZE, 300, 4, 2000, 0},     {MOE4_ROUTING_DEEPSEEK_V3, 300, 8, 1100, 0.1},
    {MOE4_ROUTING_DEEPSEEK_V3, 1100, 16, 300, 0},    {MOE4_ROUTING_SQRT_SOFTPLUS, 256, 6, 1401, 0},
    {MOE4_ROUTING_SQRT_SOFTPLUS, 70, 32, 500, 12.0}, {MOE4_ROUTING_MINIMAX2, 2500, 1, 1600, 3.0},
};

/* Of every eight tokens one has logits that are mostly the same, one wild ones, one only the lowest. */
static float logit_of(int64_t t, struct random *random)
{
    static const float wild[] = {INFINITY, -INFINITY, 0.0f, -0.0f, 3e38f, -3e38f, 1e-45f, 100.0f, -100.0f};
    const uint64_t bits = random_bits(random);
    switch (t % 8) {
    case 0: return (float)(bits % 3);
    case 1: return bits % 32 < 9 ? wild[bits % 32] : (float)(20.0 * random_normal(random));
    case 2: return -INFINITY;
    case 3: return 20.0f + (float)random_normal(random); /* sigmoids of 1 */
    default: return (float)(2.0 * random_normal(random));
    }
}

static void check_case(const struct many *many)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct random random = {(uint64_t)many->E};
    moe4_layer_config config = layer_config(H, I, many->E, many->A);
    config.routing.method = many->method;
    float *bias = buffers_allocate(&buffers, (size_t)many->E * sizeof *bias);
    for (int32_t e = 0; e < many->E; e++) bias[e] = (float)(many->spread * random_normal(&random));
    bias[many->E / 2] = NAN; /* chosen first */
    if (many->spread > 0) {
        config.routing.correction_bias = bias;
        config.routing.correction_bias_dtype = MOE4_DTYPE_F32;
    }
    const struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 60};
    const struct call_plan plan = {.n_tokens = many->T, .routing = ROUTE_LOGITS_F32, .seed = 61};
    const moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call call = call_create(&buffers, &config, &plan);
    float *logits = (float *)call.logits.logits;
    const int64_t ld = call.logits.ld ? call.logits.ld : many->E;
    for (int64_t t = 0; t < many->T; t++)
        for (int32_t e = 0; e < many->E; e++) logits[t * ld + e] = logit_of(t, &random);
    call_must_run(&buffers, context, layer, &call);
    call_check(&call, experts, MOE4_ISA_AUTO, 6);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_large_batches(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_case(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_large_batches)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
