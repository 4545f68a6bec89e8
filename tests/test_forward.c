/* Forward, stage by stage against the oracle, over a pairwise covering array of everything that a config and a call can
 * say, in memory that begins or ends at pages that cannot be touched.  `test_forward SEED [CASES]` runs another array,
 * or the first cases of it;
 * `test_forward --product [SEED [PART PARTS]]` runs every combination of the factors that semantics are about, the
 * others drawn at random, or one of PARTS equal parts of it. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "pairwise.h"

enum factor {
    F_ACTIVATION,
    F_GATE_UP,
    F_PARAMS,
    F_BIASES,
    F_BIAS_DTYPE,
    F_PLACEMENT,
    F_TOKENS,
    F_TOP_K,
    F_EXPERTS,
    F_HIDDEN,
    F_INTERMEDIATE,
    F_OUTPUT,
    F_STORED,
    F_ROUTING,
    F_METHOD,
    F_IDS,
    F_COMPUTE,
    F_X_DTYPE,
    F_Y_DTYPE,
    F_WRITE,
    F_WEIGHT_USE,
    F_GAP,
    F_BUFFERS,
    F_ISA,
    F_THREADS,
    N_FACTORS
};

static int32_t n_values[N_FACTORS] = {
    [F_ACTIVATION] = 8,
    [F_GATE_UP] = 3,
    [F_PARAMS] = 3,
    [F_BIASES] = 4,
    [F_BIAS_DTYPE] = 3,
    [F_PLACEMENT] = 4,
    [F_TOKENS] = 10,
    [F_TOP_K] = 5,
    [F_EXPERTS] = 3,
    [F_HIDDEN] = 6,
    [F_INTERMEDIATE] = 6,
    [F_OUTPUT] = 3,
    [F_STORED] = 3,
    [F_ROUTING] = N_ROUTE_SOURCES,
    [F_METHOD] = MOE4_ROUTING_HASH - MOE4_ROUTING_DEFAULT + 1,
    [F_IDS] = 4,
    [F_X_DTYPE] = 4,
    [F_Y_DTYPE] = 3,
    [F_WRITE] = 2,
    [F_WEIGHT_USE] = 2,
    [F_GAP] = 3,
    [F_BUFFERS] = 3,
    [F_ISA] = 1 /* set by main */,
    [F_THREADS] = 3,
};

static const int64_t token_counts[] = {0, 1, 2, 3, 7, 8, 13, 31, 64, 257}, sizes[] = {32, 96, 160, 544, 608, 1856};
static const int32_t top_ks[] = {1, 2, 4, 8, 128}, expert_counts[] = {8, 2, 33};
static const moe4_dtype dtypes[] = {MOE4_DTYPE_BF16, MOE4_DTYPE_F32, MOE4_DTYPE_F16, MOE4_DTYPE_F8_E4M3};

static uint64_t seed = 1;
static moe4_isa levels[MAX_LEVELS];

/* ---- From values to a config and a call; what makes no sense together is replaced ---- */

struct test_case {
    struct buffers buffers;
    moe4_layer_config config;
    struct weight_plan weights;
    struct call_plan call;
    const int32_t *token_ids;
    moe4_isa isa;
    int32_t n_threads;
    char label[400];
};

/* Which of alpha, beta and limit an activation takes, as its documentation has it. */
static int uses_alpha(moe4_activation activation)
{
    return activation == MOE4_ACTIVATION_SWIGLU_OAI || activation == MOE4_ACTIVATION_SITU ||
           activation == MOE4_ACTIVATION_GEGLU || activation == MOE4_ACTIVATION_GEGLU_TANH;
}

static int has_gate(moe4_activation activation)
{
    return activation != MOE4_ACTIVATION_RELU2 && activation != MOE4_ACTIVATION_IDENTITY;
}

/* values[l] = first * (1 + l/16): distinct and positive. */
static moe4_param make_param(struct test_case *c, moe4_presence presence, float first)
{
    moe4_param param = {presence, first, NULL};
    if (presence != MOE4_PER_EXPERT) return param;
    float *values = buffers_allocate(&c->buffers, (size_t)local_experts(&c->config) * sizeof *values);
    for (int32_t l = 0; l < local_experts(&c->config); l++) values[l] = first * (1 + (float)l / 16);
    param.values = values;
    return param;
}

static void choose_activation(struct test_case *c, const int32_t *v)
{
    moe4_layer_config *config = &c->config;
    moe4_presence presence = (moe4_presence)v[F_PARAMS];
    config->activation = (moe4_activation)(MOE4_ACTIVATION_SILU + v[F_ACTIVATION]);
    config->gate_up = has_gate(config->activation) ? (moe4_gate_up)(1 + v[F_GATE_UP]) : MOE4_GATE_UP_NONE;
    config->alpha = config->beta = config->limit = (moe4_param)MOE4_PARAM_INIT;
    if (has_gate(config->activation)) config->limit = make_param(c, presence, 1.5f);
    if (!uses_alpha(config->activation)) return;
    config->alpha = make_param(c, presence, 1.25f);
    config->beta = make_param(c, presence, 0.75f);
    if (config->activation == MOE4_ACTIVATION_SITU && !presence) config->alpha = make_param(c, MOE4_SAME, 4.0f);
}

/* All experts, the middle of the range, a map with holes, one. */
static void choose_placement(struct test_case *c, const int32_t *v)
{
    moe4_layer_config *config = &c->config;
    int32_t E = config->n_experts, n = 0, *map;
    switch (v[F_PLACEMENT]) {
    case 1:
        config->first_expert = E / 4;
        config->n_local_experts = E / 2;
        break;
    case 2:
        config->expert_map = map = buffers_allocate(&c->buffers, (size_t)E * sizeof *map);
        for (int32_t e = E - 1; e >= 0; e--) map[e] = e % 3 == 1 ? -1 : n++;
        break;
    case 3:
        config->first_expert = E - 1;
        config->n_local_experts = 1;
        break;
    default: break;
    }
}

/* Where one dimension is large the other factors are small enough. */
static void choose_sizes(struct test_case *c, const int32_t *v)
{
    moe4_layer_config *config = &c->config;
    int64_t T = token_counts[v[F_TOKENS]], H = sizes[v[F_HIDDEN]], I = sizes[v[F_INTERMEDIATE]];
    int32_t E = expert_counts[v[F_EXPERTS]], A = top_ks[v[F_TOP_K]] < E ? top_ks[v[F_TOP_K]] : E;
    if (T * A * H * I > (int64_t)257 * 8 * 544 * 160) H = H > 544 ? 544 : H, I = I > 160 ? 160 : I;
    if (T * A > 257 * 8) A = 8;
    *config = layer_config(H, I, E, A);
    if (v[F_OUTPUT]) config->output_size = v[F_OUTPUT] == 1 ? H - 1 : H / 2 + 1;
    if (v[F_STORED]) config->stored_intermediate_size = v[F_STORED] == 1 ? I + 32 : I + 5;
    c->call.n_tokens = T;
    c->call.top_k = A;
}

static void choose_call(struct test_case *c, const int32_t *v)
{
    struct call_plan *call = &c->call;
    static const int64_t gaps[] = {0, 1, 24};
    call->routing = (enum route_source)v[F_ROUTING];
    call->ids = (enum id_pattern)v[F_IDS];
    call->compute = c->config.compute = (moe4_compute)v[F_COMPUTE];
    call->x_dtype = dtypes[v[F_X_DTYPE]];
    call->y_dtype = dtypes[v[F_Y_DTYPE]];
    call->write = v[F_WRITE] ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE;
    call->gap = gaps[v[F_GAP]];
    const int takes_codes = call->compute == MOE4_COMPUTE_MXFP8 || call->compute == MOE4_COMPUTE_FP8;
    if (!takes_codes && call->x_dtype == MOE4_DTYPE_F8_E4M3) call->x_dtype = MOE4_DTYPE_BF16;
    if (call->routing >= ROUTE_IDS_F32) c->config.routing = (moe4_routing)MOE4_ROUTING_INIT;
    if (!v[F_WEIGHT_USE] || call->routing < ROUTE_IDS_F32 || call->x_dtype == MOE4_DTYPE_F8_E4M3) return;
    call->weight_use = MOE4_WEIGHT_ON_INPUT;
    call->top_k = 1;
}

/* Method, with all that it can take: a selection bias, groups, a table, a factor. */
static void choose_method(struct test_case *c, const int32_t *v)
{
    enum { VOCABULARY = 19 };
    moe4_routing *routing = &c->config.routing;
    const int32_t E = c->config.n_experts;
    routing->method = (moe4_routing_method)(MOE4_ROUTING_DEFAULT + v[F_METHOD]);
    if (routing->method == MOE4_ROUTING_LLAMA4) routing->top_k = c->call.top_k = 1;
    if (v[F_PARAMS]) routing->scaling_factor = 2.5f;
    if (routing->method == MOE4_ROUTING_SIGMOID_RENORM && v[F_OUTPUT]) routing->renormalize = MOE4_RENORMALIZE_NO;
    const int is_biased = routing->method == MOE4_ROUTING_DEEPSEEK_V3 || routing->method == MOE4_ROUTING_MINIMAX2 ||
                          routing->method == MOE4_ROUTING_SQRT_SOFTPLUS;
    if (is_biased && v[F_BIASES]) {
        float *bias = buffers_allocate(&c->buffers, (size_t)E * sizeof *bias);
        for (int32_t e = 0; e < E; e++) bias[e] = (float)(e * 5 % 7 - 3) / 8;
        routing->correction_bias = bias;
        routing->correction_bias_dtype = MOE4_DTYPE_F32;
    }
    if (routing->method == MOE4_ROUTING_DEEPSEEK_V3 && E % 4 == 0 && routing->top_k <= E / 2) {
        routing->n_group = 4;
        routing->topk_group = 2;
    }
    if (routing->method != MOE4_ROUTING_HASH) return;
    int64_t *table = buffers_allocate(&c->buffers, VOCABULARY * (size_t)routing->top_k * sizeof *table);
    for (int32_t i = 0; i < VOCABULARY * routing->top_k; i++) table[i] = i * 11 % E;
    int32_t *tokens = buffers_allocate(&c->buffers, (size_t)c->call.n_tokens * sizeof *tokens);
    for (int64_t t = 0; t < c->call.n_tokens; t++) tokens[t] = (int32_t)(t * 3 % VOCABULARY);
    routing->hash_table = table;
    routing->hash_table_dtype = MOE4_DTYPE_I64;
    routing->vocab_size = VOCABULARY;
    c->token_ids = tokens;
}

static struct test_case make_case(const int32_t *v, uint64_t case_seed)
{
    struct test_case c = {
        .buffers = {(enum buffers_kind)v[F_BUFFERS], NULL}, .isa = levels[v[F_ISA]], .n_threads = 1 + v[F_THREADS]};
    choose_sizes(&c, v);
    choose_placement(&c, v);
    choose_activation(&c, v);
    choose_call(&c, v);
    if (c.call.routing < ROUTE_IDS_F32) choose_method(&c, v);
    if (c.call.routing == ROUTE_OWN_ROUTER) {
        c.config.router.hidden_size = v[F_OUTPUT] == 2 ? 48 : 0;
        router_create(&c.buffers, &c.config, case_seed);
    }
    c.weights = (struct weight_plan){.biases = (enum bias_use)v[F_BIASES],
                                     .bias_dtype = dtypes[v[F_BIAS_DTYPE]],
                                     .row_gap = v[F_GAP],
                                     .seed = case_seed};
    c.call.seed = case_seed;
    int n = 0;
    for (int f = 0; f < N_FACTORS; f++)
        n += snprintf(c.label + n, sizeof c.label - (size_t)n, "%s%d", f ? "," : "values ", v[f]);
    snprintf(c.label + n, sizeof c.label - (size_t)n, " of seed %llu", (unsigned long long)seed);
    return c;
}

/* Kernels that keep nothing of the stages have y's very bits. */
static void check_y_alone(struct test_case *c, moe4_context *context, const moe4_layer *layer, const struct call *call)
{
    struct call alone = call_create(&c->buffers, &c->config, &c->call);
    moe4_result *result = &alone.result;
    alone.label = c->label;
    alone.batch.token_ids = c->token_ids;
    result->intermediate = result->intermediate_scale = NULL;
    result->gemm2_rows = NULL;
    result->row_map = NULL;
    result->n_rows = NULL;
    call_must_run(&c->buffers, context, layer, &alone);
    const size_t slots = (size_t)call->R * 4;
    if (memcmp(result->y, call->result.y, call->y_bytes) || memcmp(result->ids, call->result.ids, slots) ||
        memcmp(result->weights, call->result.weights, slots))
        fail_msg("%s: y, ids or weights differ where no stage is wanted", c->label);
}

static void run_case(struct test_case *c)
{
    moe4_expert *experts = weights_create(&c->buffers, &c->config, &c->weights);
    moe4_context *context = context_open(c->isa, c->n_threads);
    moe4_layer *layer = layer_open(context, &c->config, experts);
    struct call call = call_create(&c->buffers, &c->config, &c->call);
    call.label = c->label;
    call.batch.token_ids = c->token_ids;
    call_must_run(&c->buffers, context, layer, &call);
    if (call.T) call_check(&call, experts, c->isa, 12);
    if (call.T && call.T <= 8) check_y_alone(c, context, layer, &call);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&c->buffers);
}

static int32_t max_cases = INT32_MAX;

static void test_covering_array(void **state)
{
    (void)state;
    static struct pairwise pairwise;
    int32_t values[N_FACTORS], n = 0;
    pairwise_init(&pairwise, n_values, N_FACTORS, seed);
    while (n < max_cases && pairwise_next(&pairwise, values)) {
        struct test_case c = make_case(values, seed * 1000 + (uint64_t)n++);
        run_case(&c);
    }
    print_message("%d cases of seed %llu\n", n, (unsigned long long)seed);
}

/* ---- Every night: the full product ---- */

static const enum factor product_factors[] = {F_METHOD,    F_ACTIVATION, F_COMPUTE, F_GATE_UP,
                                              F_PLACEMENT, F_TOKENS,     F_EXPERTS, F_TOP_K};
enum { N_PRODUCT_FACTORS = sizeof product_factors / sizeof *product_factors };
static int64_t part, n_parts = 1;

static void test_full_product(void **state)
{
    (void)state;
    int64_t n_cases = 1, n_run = 0;
    for (int i = 0; i < N_PRODUCT_FACTORS; i++) n_cases *= n_values[product_factors[i]];
    print_message("%lld cases of seed %llu, part %lld of %lld\n", (long long)n_cases, (unsigned long long)seed,
                  (long long)part, (long long)n_parts);
    for (int64_t number = part; number < n_cases; number += n_parts, n_run++) {
        struct random random = {seed * 1000003 + (uint64_t)number};
        int32_t values[N_FACTORS];
        int64_t rest = number;
        for (int f = 0; f < N_FACTORS; f++) values[f] = (int32_t)random_below(&random, n_values[f]);
        for (int i = 0; i < N_PRODUCT_FACTORS; i++) {
            values[product_factors[i]] = (int32_t)(rest % n_values[product_factors[i]]);
            rest /= n_values[product_factors[i]];
        }
        values[F_ROUTING] = (int32_t)random_below(&random, ROUTE_IDS_F32); /* methods need logits */
        struct test_case c = make_case(values, seed + (uint64_t)number);
        run_case(&c);
    }
    print_message("%lld cases run\n", (long long)n_run);
}

int main(int argc, char **argv)
{
    const int is_product = argc > 1 && strcmp(argv[1], "--product") == 0;
    if (!is_product && argc > 2) max_cases = (int32_t)strtol(argv[2], NULL, 10);
    if (argc > 1 + is_product) seed = strtoull(argv[1 + is_product], NULL, 10);
    if (is_product && argc > 4) {
        part = strtoll(argv[3], NULL, 10);
        n_parts = strtoll(argv[4], NULL, 10);
    }
    n_values[F_ISA] = isa_levels(levels);
    n_values[F_COMPUTE] = n_computes();
    const struct CMUnitTest pairs[] = {cmocka_unit_test(test_covering_array)};
    const struct CMUnitTest product[] = {cmocka_unit_test(test_full_product)};
    return is_product ? cmocka_run_group_tests(product, NULL, NULL) : cmocka_run_group_tests(pairs, NULL, NULL);
}
