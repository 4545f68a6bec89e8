/* Routing: an independent program's golden rows, and the oracle on everything. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "base/convert.h"
#include "base/dims.h"
#include "fixture.h"
#include "golden.h"
#include "ref.h"
#include "route_calls.h"

/* 64 rows of the transformers library's DeepSeek-V3 router, weights in f32. */
static void golden_deepseek_v3(void **state)
{
    (void)state;
    golden_router *golden = golden_router_open();
    const int32_t A = golden->routing.top_k;
    const int64_t n = golden->T * A;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    int32_t *ids = buffers_allocate(&buffers, (size_t)n * sizeof *ids);
    float *weights = buffers_allocate(&buffers, (size_t)n * sizeof *weights);
    struct route_call call = {
        .logits = golden->logits, .dtype = MOE4_DTYPE_F32, .ld = golden->E, .ids = ids, .weights = weights};
    route(&golden->routing, golden->E, &call, 0, golden->T);
    for (int64_t i = 0; i < n; i++) {
        int64_t match = i / A * A; /* slots of equal score may be in another order */
        while (match < i / A * A + A && golden->ids[match] != ids[i]) match++;
        if (match == i / A * A + A) fail_msg("token %d: expert %d is not among the golden ones", (int)(i / A), ids[i]);
        double expected = golden->weights[match];
        if (!(fabs(weights[i] - expected) <= (0x1p-8 + 1e-5) * expected))
            fail_msg("token %d, expert %d: weight %g, golden %g", (int)(i / A), ids[i], (double)weights[i], expected);
    }
    buffers_release(&buffers);
    golden_router_close(golden);
}

static struct random rng = {1};

enum logit_kind { ORDINARY, TIED, EXTREME, ALL_LOWEST, RISING, FALLING, N_KINDS };

static float extreme_logit(void)
{
    static const float values[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 3e38f, -3e38f, 1e-45f, 800.0f, -800.0f};
    uint64_t choice = random_bits(&rng) % 64;
    return choice < sizeof values / sizeof *values ? values[choice] : (float)(20.0 * random_normal(&rng));
}

static float random_logit(enum logit_kind kind, int32_t e, int32_t n_experts)
{
    switch (kind) {
    case TIED: return (float)((int)(random_bits(&rng) % 5) - 2) * 0.5f;
    case EXTREME: return extreme_logit();
    case ALL_LOWEST: return -INFINITY;
    case RISING: return (float)e / 64.0f;
    case FALLING: return (float)(n_experts - e) / 64.0f;
    default: return (float)(2.0 * random_normal(&rng));
    }
}

/* Rows of one routing against the oracle: ids equal, weights equal in every bit (any NaN for a NaN). */
static void compare_with_oracle(const moe4_routing *routing, int32_t E, enum logit_kind kind, moe4_dtype dtype)
{
    enum { T = 3 };
    const int32_t A = routing->top_k, ld = E + 3;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    char *logits = buffers_allocate(&buffers, (size_t)(T * ld) * 4 + 1);
    double *row = buffers_allocate(&buffers, (size_t)E * sizeof *row);
    int32_t *ids = buffers_allocate(&buffers, (size_t)(T * A) * sizeof *ids);
    float *weights = buffers_allocate(&buffers, (size_t)(T * A) * sizeof *weights);
    int16_t *replay = buffers_allocate(&buffers, (size_t)(T * A) * sizeof *replay);
    int32_t expected_ids[MAX_TOP_K];
    double expected_weights[MAX_TOP_K];
    int32_t token_ids[T];
    logits += 1; /* any address will do */
    for (int t = 0; t < T; t++) {
        token_ids[t] = routing->vocab_size ? (int32_t)random_below(&rng, routing->vocab_size) : -1;
        for (int32_t e = 0; e < ld; e++)
            store_value(logits, dtype, t * ld + e, e < E ? random_logit(kind, e, E) : 1e9f);
    }
    struct route_call call = {logits, dtype, ld, token_ids, ids, weights, replay};
    route(routing, E, &call, 0, 1);
    route(routing, E, &call, 1, T);
    for (int t = 0; t < T; t++) {
        for (int32_t e = 0; e < E; e++) row[e] = ref_load(logits, dtype, t * ld + e);
        ref_route(routing, E, row, token_ids[t], expected_ids, expected_weights);
        for (int32_t a = 0; a < A; a++) {
            float got = weights[t * A + a], expected = (float)expected_weights[a];
            int equal = isnan(expected) ? isnan(got) : f32_bits(got) == f32_bits(expected);
            if (ids[t * A + a] != expected_ids[a] || !equal || replay[t * A + a] != expected_ids[a])
                fail_msg("%s, E %d, A %d, groups %d of %d, logits %d, dtype %d, slot %d: expert %d weight %a, expected "
                         "%d %a",
                         route_method_name(routing->method), E, A, routing->topk_group, routing->n_group, kind, dtype,
                         a, ids[t * A + a], (double)got, expected_ids[a], (double)expected);
        }
    }
    buffers_release(&buffers);
}

static const struct shape {
    int32_t E, A, n_group, topk_group;
} shapes[] = {
    {1, 1, 0, 0},      {2, 1, 1, 1},           {2, 2, 0, 0},    {31, 4, 0, 0},    {32, 4, 4, 2},
    {33, 33, 0, 0},    {16, 2, 0, 0},          {60, 8, 15, 2},  {128, 4, 4, 2},   {128, 128, 2, 2},
    {144, 6, 72, 3},   {160, 8, 8, 3},         {256, 8, 8, 4},  {257, 22, 0, 0},  {384, 8, 1, 1},
    {656, 10, 0, 0},   {512, 128, 8, 2},       {896, 16, 7, 7}, {1024, 32, 4, 4}, {2048, 32, 1024, 40},
    {2880, 128, 0, 0}, {MAX_EXPERTS, 8, 7, 2},
};

/* One routing of a method at a shape, its optional parts drawn at random. */
static moe4_routing random_routing(moe4_routing_method method, const struct shape *shape, void *bias, int32_t *table)
{
    static const moe4_dtype floats[] = {MOE4_DTYPE_NONE, MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16};
    moe4_routing routing = routing_of(method, method == MOE4_ROUTING_LLAMA4 ? 1 : shape->A);
    if (random_bits(&rng) & 1) routing.scaling_factor = (float)(0.5 + 0.01 * (double)random_below(&rng, 300));
    if (method == MOE4_ROUTING_SIGMOID_RENORM) routing.renormalize = (moe4_renormalize)(random_bits(&rng) & 1);
    if (method == MOE4_ROUTING_DEEPSEEK_V3) {
        routing.n_group = shape->n_group;
        routing.topk_group = shape->topk_group;
    }
    moe4_dtype dtype = floats[random_bits(&rng) % 4];
    if ((method == MOE4_ROUTING_DEEPSEEK_V3 || method == MOE4_ROUTING_MINIMAX2 ||
         method == MOE4_ROUTING_SQRT_SOFTPLUS) &&
        dtype != MOE4_DTYPE_NONE) {
        double spread = random_bits(&rng) & 1 ? 0.1 : 12.0;
        for (int32_t e = 0; e < shape->E; e++) store_value(bias, dtype, e, (float)(spread * random_normal(&rng)));
        for (int i = 0; i < 3 && !(random_bits(&rng) % 4); i++) /* one that is not finite, or a few */
            store_value(bias, dtype, (int64_t)(random_bits(&rng) % (uint64_t)shape->E),
                        i == 0   ? NAN
                        : i == 1 ? INFINITY
                                 : -INFINITY);
        routing.correction_bias = bias;
        routing.correction_bias_dtype = dtype;
    }
    if (method == MOE4_ROUTING_HASH) {
        routing.vocab_size = 5;
        for (int64_t i = 0; i < routing.vocab_size * routing.top_k; i++)
            table[i] = (int32_t)random_below(&rng, shape->E);
        routing.hash_table = table;
        routing.hash_table_dtype = MOE4_DTYPE_I32;
    }
    return routing;
}

static void every_method_equals_the_oracle(void **state)
{
    (void)state;
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16};
    static float bias[MAX_EXPERTS];
    static int32_t table[5 * MAX_TOP_K];
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (int m = MOE4_ROUTING_DEFAULT; m <= MOE4_ROUTING_HASH; m++)
            for (int kind = 0; kind < N_KINDS; kind++) {
                int repeats = shapes[s].E <= 256 ? 6 : 1;
                for (int repeat = 0; repeat < repeats; repeat++) {
                    moe4_routing routing = random_routing((moe4_routing_method)m, &shapes[s], bias, table);
                    compare_with_oracle(&routing, shapes[s].E, (enum logit_kind)kind, dtypes[random_bits(&rng) % 3]);
                }
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_deepseek_v3),
        cmocka_unit_test(every_method_equals_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
