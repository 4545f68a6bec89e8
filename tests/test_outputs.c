/* What a call may be asked for: each optional output alone, deferral, a token count on the device, few or many experts;
 * none changes a bit of the others. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

enum { H = 96, I = 160, T = 37, E = 12, A = 4 };

static moe4_layer_config config;
static struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 77};
static struct buffers shared;
static moe4_expert *experts;
static moe4_context *context;
static moe4_layer *layer;
static moe4_isa isa;

/* One layer for all tests: the middle eight of twelve experts, a cut output. */
static int setup(void **state)
{
    (void)state;
    config = layer_config(H, I, E, A);
    config.first_expert = 2;
    config.n_local_experts = 8;
    config.output_size = 90;
    experts = weights_create(&shared, &config, &weights);
    context = context_open(MOE4_ISA_AUTO, 2);
    layer = layer_open(context, &config, experts);
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    assert_int_equal(moe4_context_describe(context, &info), MOE4_OK);
    isa = info.isa;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&shared);
    return 0;
}

static struct call run_plan(struct buffers *buffers, const struct call_plan *plan)
{
    struct call call = call_create(buffers, &config, plan);
    call_must_run(buffers, context, layer, &call);
    return call;
}

/* ---- Optional outputs ---- */

enum { N_OPTIONAL = 8 };

/* Keeps y and optional output i of a result, forgets the others. */
static void keep_one(moe4_result *result, int i)
{
    const moe4_result all = *result;
    result->logits = i == 0 ? all.logits : NULL;
    result->ids = i == 1 ? all.ids : NULL;
    result->weights = i == 2 ? all.weights : NULL;
    result->replay = i == 3 ? all.replay : NULL;
    result->intermediate = i == 4 ? all.intermediate : NULL;
    result->gemm2_rows = i == 5 ? all.gemm2_rows : NULL;
    result->row_map = i == 6 ? all.row_map : NULL;
    result->n_rows = i == 7 ? all.n_rows : NULL;
}

static void test_each_output_alone(void **state)
{
    (void)state;
    for (int i = -1; i < N_OPTIONAL; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        struct call_plan plan = {.n_tokens = T, .routing = ROUTE_LOGITS_BF16, .gap = 3, .seed = 9};
        struct call full = run_plan(&buffers, &plan), one = call_create(&buffers, &config, &plan);
        const moe4_result all = one.result;
        keep_one(&one.result, i);
        call_must_run(&buffers, context, layer, &one);
        assert_memory_equal(all.y, full.result.y, full.y_bytes);
        one.result = all;
        const moe4_result *r = &full.result;
        const size_t slots = (size_t)full.R, rows = (size_t)*r->n_rows;
        if (i == 0) assert_memory_equal(all.logits, r->logits, (size_t)(T * E) * sizeof *r->logits);
        if (i == 1) assert_memory_equal(all.ids, r->ids, slots * sizeof *r->ids);
        if (i == 2) assert_memory_equal(all.weights, r->weights, slots * sizeof *r->weights);
        if (i == 3) assert_memory_equal(all.replay, r->replay, (size_t)(r->replay_rows * A) * sizeof *r->replay);
        if (i == 4) assert_memory_equal(all.intermediate, r->intermediate, rows * I * 2);
        if (i == 5) assert_memory_equal(all.gemm2_rows, r->gemm2_rows, rows * 90 * 2);
        if (i == 6) assert_memory_equal(all.row_map, r->row_map, slots * sizeof *r->row_map);
        if (i == 7) assert_int_equal(*all.n_rows, *r->n_rows);
        buffers_release(&buffers);
    }
}

/* ---- Deferral ---- */

static void check_deferred(const struct call_plan *plan)
{
    struct buffers buffers = {BUFFERS_GUARD_AFTER, NULL};
    struct call full = run_plan(&buffers, plan), deferred = call_create(&buffers, &config, plan);
    void *y = deferred.result.y;
    deferred.result.y = NULL;
    call_must_run(&buffers, context, layer, &deferred);
    assert_memory_equal(y, deferred.y_before, deferred.y_bytes);
    assert_memory_equal(deferred.result.gemm2_rows, full.result.gemm2_rows, (size_t)*full.result.n_rows * 90 * 2);
    assert_memory_equal(deferred.result.row_map, full.result.row_map, (size_t)full.R * sizeof(int32_t));

    moe4_deferred finish = MOE4_DEFERRED_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    finish.n_tokens = T;
    finish.top_k = deferred.A;
    finish.output_size = 90;
    finish.gemm2_rows = deferred.result.gemm2_rows;
    finish.n_rows = *deferred.result.n_rows;
    finish.row_map = deferred.result.row_map;
    finish.weights = deferred.result.weights;
    result.y = y;
    result.y_dtype = deferred.result.y_dtype;
    result.ldy = deferred.result.ldy;
    result.write = deferred.result.write;
    assert_int_equal(moe4_combine(context, &finish, &result), MOE4_OK);
    assert_memory_equal(y, full.result.y, full.y_bytes);
    buffers_release(&buffers);
}

static void test_deferred_rows_combine_to_the_same_bits(void **state)
{
    (void)state;
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32};
    for (int i = 0; i < 8; i++) { /* the last two with weights on the input */
        struct call_plan plan = {.n_tokens = T,
                                 .top_k = i < 6 ? A : 1,
                                 .routing = i % 2 || i >= 6 ? ROUTE_IDS_F32 : ROUTE_LOGITS_F32,
                                 .ids = IDS_WILD,
                                 .weight_use = i < 6 ? MOE4_WEIGHT_ON_OUTPUT : MOE4_WEIGHT_ON_INPUT,
                                 .y_dtype = dtypes[i % 3],
                                 .write = i < 3 ? MOE4_WRITE_OVERWRITE : MOE4_WRITE_ADD,
                                 .gap = i,
                                 .seed = (uint64_t)i};
        check_deferred(&plan);
    }
}

/* ---- Tokens ---- */

/* A count on the device: exactly the call with that many tokens, and nothing of the rows beyond. */
static void test_token_count_on_the_device(void **state)
{
    (void)state;
    static const int32_t counts[] = {0, 1, 5, T - 1, T};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int routed = 0; routed < 2; routed++) {
            struct buffers buffers = {BUFFERS_PLAIN, NULL};
            struct call_plan plan = {.n_tokens = T,
                                     .top_k = A,
                                     .routing = routed ? ROUTE_LOGITS_F32 : ROUTE_IDS_PACKED,
                                     .gap = 2,
                                     .seed = i};
            struct call call = call_create(&buffers, &config, &plan);
            call.batch.n_tokens_device = buffers_copy(&buffers, &counts[i], sizeof counts[i]);
            call_must_run(&buffers, context, layer, &call);
            call.T = counts[i];
            if (counts[i]) call_check(&call, experts, isa, 16);
            if (!counts[i]) assert_memory_equal(call.result.y, call.y_before, call.y_bytes);
            plan.n_tokens = counts[i];
            struct call exact = call_create(&buffers, &config, &plan);
            call_must_run(&buffers, context, layer, &exact);
            for (int64_t t = 0; t < counts[i]; t++) call_compare_tokens(&call, t, &exact, t);
            buffers_release(&buffers);
        }
}

/* More tokens than fit a chunk, or 16 bits. */
static void test_70000_tokens(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config narrow = layer_config(32, 32, 8, 2);
    narrow.first_expert = 1;
    moe4_expert *few = weights_create(&buffers, &narrow, &weights);
    moe4_layer *small = layer_open(context, &narrow, few);
    struct call_plan plan = {.n_tokens = 70000, .seed = 1};
    struct call call = call_create(&buffers, &narrow, &plan);
    call_must_run(&buffers, context, small, &call);
    call_check(&call, few, isa, 32);
    plan.n_tokens = 500;
    struct call first = call_create(&buffers, &narrow, &plan);
    call_must_run(&buffers, context, small, &first);
    for (int64_t t = 0; t < first.T; t++) call_compare_tokens(&call, t, &first, t);
    moe4_layer_destroy(small);
    buffers_release(&buffers);
}

/* No tokens: success without any other pointer. */
static void test_no_tokens(void **state)
{
    (void)state;
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_logits logits = MOE4_LOGITS_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    size_t bytes = 0;
    assert_int_equal(moe4_forward_router(context, layer, &batch, &logits, &result), MOE4_OK);
    assert_int_equal(moe4_forward_router(context, layer, &batch, NULL, &result), MOE4_OK);
    assert_int_equal(moe4_forward_experts(context, layer, &batch, &topk, &result), MOE4_OK);
    assert_int_equal(moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, 0, 0, &bytes), MOE4_OK);
    if (is_cpu_tested())
        assert_int_equal(moe4_route(context, &config.routing, E, 0, &logits, NULL, NULL, NULL), MOE4_OK);
}

/* Every slot elsewhere: rows of exact +0, or y as it was where it is added to. */
static void test_tokens_without_local_experts(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        struct call_plan plan = {.n_tokens = T,
                                 .top_k = A,
                                 .routing = ROUTE_IDS_BF16,
                                 .ids = IDS_ELSEWHERE,
                                 .y_dtype = i % 2 ? MOE4_DTYPE_F32 : MOE4_DTYPE_BF16,
                                 .write = i / 2 ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE};
        struct call call = run_plan(&buffers, &plan);
        assert_int_equal(*call.result.n_rows, 0);
        for (int64_t p = 0; p < call.R; p++) assert_int_equal(call.result.row_map[p], -1);
        if (i / 2)
            assert_memory_equal(call.result.y, call.y_before, call.y_bytes);
        else
            for (size_t b = 0; b < call.y_bytes; b++) assert_int_equal(((char *)call.result.y)[b], 0);
        buffers_release(&buffers);
    }
}

/* ---- Experts ---- */

static void check_expert_count(int32_t n_experts, int32_t top_k, int64_t n_tokens)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config many = layer_config(32, 32, n_experts, top_k);
    many.n_local_experts = n_experts < 40 ? n_experts : 40;
    many.first_expert = (n_experts - many.n_local_experts) / 2;
    moe4_expert *some = weights_create(&buffers, &many, &weights);
    moe4_layer *narrow = layer_open(context, &many, some);
    struct call_plan plan = {.n_tokens = n_tokens, .seed = (uint64_t)(n_experts * 1000 + top_k)};
    struct call call = call_create(&buffers, &many, &plan);
    call_must_run(&buffers, context, narrow, &call);
    call_check(&call, some, isa, 8);
    moe4_layer_destroy(narrow);
    buffers_release(&buffers);
}

static void test_expert_counts(void **state)
{
    (void)state;
    static const int32_t counts[] = {1, 2, 31, 32, 33, 144, 257, 656, 896, 1024};
    static const int32_t top_ks[] = {1, 2, 3, 6, 8, 10, 16, 22, 32, 128};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (size_t j = 0; j < sizeof top_ks / sizeof *top_ks; j++)
            if (top_ks[j] < counts[i]) check_expert_count(counts[i], top_ks[j], 4 + (int64_t)j);
        if (counts[i] <= 128) check_expert_count(counts[i], counts[i], 3); /* every expert */
    }
}

/* Groups that leave exactly top_k candidates. */
static void test_grouped_routing(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config grouped = layer_config(32, 32, 32, 8);
    float bias[32];
    for (int e = 0; e < 32; e++) bias[e] = (float)(e % 5 - 4) * 0.25f; /* negative for most */
    grouped.routing.method = MOE4_ROUTING_DEEPSEEK_V3;
    grouped.routing.n_group = 8;
    grouped.routing.topk_group = 2;
    grouped.routing.scaling_factor = 2.5f;
    grouped.routing.correction_bias = bias;
    grouped.routing.correction_bias_dtype = MOE4_DTYPE_F32;
    moe4_expert *all = weights_create(&buffers, &grouped, &weights);
    moe4_layer *groups = layer_open(context, &grouped, all);
    struct call call = call_create(&buffers, &grouped, &(struct call_plan){.n_tokens = 21});
    call_must_run(&buffers, context, groups, &call);
    call_check(&call, all, isa, 16);
    moe4_layer_destroy(groups);
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_output_alone),
        cmocka_unit_test(test_deferred_rows_combine_to_the_same_bits),
        cmocka_unit_test(test_token_count_on_the_device),
        cmocka_unit_test(test_70000_tokens),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_tokens_without_local_experts),
        cmocka_unit_test(test_expert_counts),
        cmocka_unit_test(test_grouped_routing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
