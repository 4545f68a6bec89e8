/* Every refusal of a forward call: its status, a message that names the field and both values, every output untouched;
 * what moe4_supports can know it foresees; and fields left at zero mean what the documentation says. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/prepared.h"
#include "refusal.h"

enum { H = 64, I = 96, T = 5, E = 8, A = 2, ROUTER_H = 32 };

static struct buffers shared;
static moe4_context *context;
static moe4_layer_config plain, latent; /* latent: its router sees another width than H */
static moe4_expert *experts;
static moe4_layer *plain_layer, *latent_layer;

static int setup(void **state)
{
    (void)state;
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 1};
    context = context_open(MOE4_ISA_AUTO, 2);
    plain = latent = layer_config(H, I, E, A);
    experts = weights_create(&shared, &plain, &weights);
    router_create(&shared, &plain, 1);
    latent.router.hidden_size = ROUTER_H;
    router_create(&shared, &latent, 2);
    plain_layer = layer_open(context, &plain, experts);
    latent_layer = layer_open(context, &latent, experts);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    moe4_layer_destroy(latent_layer);
    moe4_layer_destroy(plain_layer);
    moe4_context_destroy(context);
    buffers_release(&shared);
    return 0;
}

/* A call that would succeed, its workspace there. */
static struct call valid_call(struct buffers *buffers, const moe4_layer_config *config, enum route_source routing,
                              moe4_compute compute, moe4_dtype x_dtype)
{
    struct call_plan plan = {
        .n_tokens = T, .top_k = A, .routing = routing, .compute = compute, .x_dtype = x_dtype, .gap = 2, .seed = 3};
    struct call call = call_create(buffers, config, &plan);
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, compute, T, A, &call.batch.workspace_bytes), MOE4_OK);
    char *memory = buffers_allocate(buffers, call.batch.workspace_bytes + 256);
    call.batch.workspace = memory + (256 - (uintptr_t)memory % 256) % 256;
    return call;
}

/* A call with logits NULL goes to the layer's own router. */
static void check_rows(const moe4_layer *layer, const struct call *call, const struct refusal *rows, size_t n_rows)
{
    for (size_t i = 0; i < n_rows; i++) {
        struct arguments a = {.batch = call->batch, .topk = call->topk, .logits = call->logits, .result = call->result};
        refusal_apply(&rows[i], &a);
        const moe4_logits *logits = call->plan.routing == ROUTE_OWN_ROUTER ? NULL : &a.logits;
        moe4_status status = call->is_routed ? moe4_forward_router(context, layer, &a.batch, logits, &a.result)
                                             : moe4_forward_experts(context, layer, &a.batch, &a.topk, &a.result);
        refusal_check(&rows[i], i, status, context);
        check_untouched_outputs(call);
    }
}

static const int32_t six = T + 1, minus_one = -1;
static int64_t number;

static void test_batch_and_result(void **state)
{
    (void)state;
    static const enum route_source sources[] = {ROUTE_LOGITS_F32, ROUTE_IDS_F32, ROUTE_OWN_ROUTER};
    for (int form = 0; form < 3; form++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        struct call call = valid_call(&buffers, &plain, sources[form], MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
        const size_t bytes = call.batch.workspace_bytes;
        const struct refusal rows[] = {
            {{SET(batch.size, 0)}, MOE4_EINVAL, {"batch.size is 0", "INIT"}},
            {{SET(result.size, 3)}, MOE4_EINVAL, {"result.size is 3", "INIT"}},
            {{SET(batch.n_tokens, -1)}, MOE4_EINVAL, {"n_tokens is -1", "0 or more"}},
            {{SET(batch.n_tokens, (int64_t)1 << 40)}, MOE4_EINVAL, {"n_tokens is 1099511627776", "2147483647"}},
            {{SET(batch.n_tokens_device, (uintptr_t)&six)}, MOE4_EINVAL, {"*n_tokens_device is 6", "5"}},
            {{SET(batch.n_tokens_device, (uintptr_t)&minus_one)}, MOE4_EINVAL, {"*n_tokens_device is -1", "5"}},
            {{SET(batch.compute, 33)}, MOE4_EINVAL, {"compute is 33"}},
            {{SET(batch.x, 0)}, MOE4_EINVAL, {"x is NULL"}},
            {{SET(batch.x_dtype, MOE4_DTYPE_F8_E4M3)}, MOE4_EINVAL, {"x_dtype is f8_e4m3"}},
            {{SET(batch.x_dtype, MOE4_DTYPE_I16)}, MOE4_EINVAL, {"x_dtype is i16"}},
            {{SET(batch.ldx, H - 1)}, MOE4_EINVAL, {"ldx is 63", "at least 64"}},
            {{SET(batch.ldx, -H)}, MOE4_EINVAL, {"ldx is -64", "at least 64"}},
            {{SET(batch.x_scale, (uintptr_t)&number)}, MOE4_EINVAL, {"x_scale is given", "not quantised"}},
            {{SET(batch.stream, (uintptr_t)&number)}, MOE4_EINVAL, {"stream"}},
            {{SET(batch.workspace, 0)}, MOE4_EINVAL, {"workspace has 0 bytes"}},
            {{SET(batch.workspace_bytes, bytes - 1)}, MOE4_EINVAL, {"workspace has", "at least"}},
            {{SET(batch.workspace, (uintptr_t)call.batch.workspace + 64)}, MOE4_EINVAL, {"64 bytes", "256"}},
            {{SET(result.y, 0), SET(result.gemm2_rows, 0)}, MOE4_EINVAL, {"y is NULL", "gemm2_rows"}},
            {{SET(result.y_dtype, MOE4_DTYPE_F8_E4M3)}, MOE4_EINVAL, {"y_dtype is f8_e4m3"}},
            {{SET(result.ldy, H - 1)}, MOE4_EINVAL, {"ldy is 63", "at least 64"}},
            {{SET(result.write, 5)}, MOE4_EINVAL, {"write is 5"}},
        };
        check_rows(plain_layer, &call, rows, sizeof rows / sizeof *rows);
        buffers_release(&buffers);
    }
}

static void test_logits(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = valid_call(&buffers, &plain, ROUTE_LOGITS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    const struct refusal rows[] = {
        {{SET(logits.size, 1)}, MOE4_EINVAL, {"logits.size is 1"}},
        {{SET(logits.logits, 0)}, MOE4_EINVAL, {"logits.logits is NULL"}},
        {{SET(logits.dtype, MOE4_DTYPE_I32)}, MOE4_EINVAL, {"logits dtype is i32", "f32"}},
        {{SET(logits.ld, E - 1)}, MOE4_EINVAL, {"logits.ld is 7", "at least 8"}},
        {{SET(result.replay_rows, T - 1)}, MOE4_EINVAL, {"replay_rows is 4", "5"}},
    };
    check_rows(plain_layer, &call, rows, sizeof rows / sizeof *rows);
    buffers_release(&buffers);
}

static void test_ids(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = valid_call(&buffers, &plain, ROUTE_IDS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    struct call packed = valid_call(&buffers, &plain, ROUTE_IDS_PACKED, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    const struct refusal rows[] = {
        {{SET(topk.size, 2)}, MOE4_EINVAL, {"topk.size is 2"}},
        {{SET(topk.top_k, 0)}, MOE4_EINVAL, {"top_k is 0", "1 to 8"}},
        {{SET(topk.top_k, E + 1)}, MOE4_EINVAL, {"top_k is 9", "1 to 8"}},
        {{SET(topk.top_k, -3)}, MOE4_EINVAL, {"top_k is -3", "1 to 8"}},
        {{SET(topk.format, 4)}, MOE4_EINVAL, {"format is 4"}},
        {{SET(topk.ids, 0)}, MOE4_EINVAL, {"topk.ids is NULL"}},
        {{SET(topk.ld_ids, A - 1)}, MOE4_EINVAL, {"topk.ld_ids is 1", "at least 2"}},
        {{SET(topk.weights, 0)}, MOE4_EINVAL, {"topk.weights is NULL"}},
        {{SET(topk.weights_dtype, MOE4_DTYPE_F16)}, MOE4_EINVAL, {"weights_dtype is f16", "f32 or bf16"}},
        {{SET(topk.ld_weights, A - 1)}, MOE4_EINVAL, {"topk.ld_weights is 1", "at least 2"}},
        {{SET(topk.weight_use, 2)}, MOE4_EINVAL, {"weight_use is 2"}},
        {{SET(topk.weight_use, MOE4_WEIGHT_ON_INPUT)}, MOE4_EUNSUPPORTED, {"top_k is 2"}},
        {{SET(result.logits, (uintptr_t)&number)}, MOE4_EINVAL, {"result.logits"}},
        {{SET(result.replay, (uintptr_t)&number), SET(result.replay_rows, T)}, MOE4_EINVAL, {"result.replay"}},
    };
    const struct refusal packed_rows[] = {
        {{SET(topk.weights, (uintptr_t)&number)}, MOE4_EINVAL, {"topk.weights is given", "packed"}},
    };
    check_rows(plain_layer, &call, rows, sizeof rows / sizeof *rows);
    check_rows(plain_layer, &packed, packed_rows, 1);
    buffers_release(&buffers);
}

static void test_quantised_x(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = valid_call(&buffers, &plain, ROUTE_LOGITS_F32, MOE4_COMPUTE_MXFP8, MOE4_DTYPE_F8_E4M3);
    struct call fp8 = valid_call(&buffers, &plain, ROUTE_LOGITS_F32, MOE4_COMPUTE_FP8, MOE4_DTYPE_F8_E4M3);
    struct call own = valid_call(&buffers, &plain, ROUTE_OWN_ROUTER, MOE4_COMPUTE_MXFP8, MOE4_DTYPE_F8_E4M3);
    const struct refusal rows[] = {
        {{SET(batch.x_scale, 0)}, MOE4_EINVAL, {"x_scale is NULL", "f8_e4m3"}},
        {{SET(batch.ldx_scale, 1)}, MOE4_EINVAL, {"ldx_scale is 1", "at least 2"}},
        {{SET(batch.compute, MOE4_COMPUTE_BF16)}, MOE4_EINVAL, {"x_dtype is f8_e4m3"}},
    };
    const struct refusal fp8_rows[] = {
        {{SET(batch.x_scale, 0)}, MOE4_EINVAL, {"x_scale is NULL", "f8_e4m3"}},
        {{SET(batch.ldx_scale, -1)}, MOE4_EINVAL, {"ldx_scale is -1", "at least 1"}},
    };
    const struct refusal own_rows[] = {
        {{SET(batch.router_x, 0)}, MOE4_EUNSUPPORTED, {"router", "x is f8_e4m3"}},
    };
    check_rows(plain_layer, &call, rows, sizeof rows / sizeof *rows);
    check_rows(plain_layer, &fp8, fp8_rows, sizeof fp8_rows / sizeof *fp8_rows);
    check_rows(plain_layer, &own, own_rows, 1);
    buffers_release(&buffers);
}

static void test_own_router(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = valid_call(&buffers, &latent, ROUTE_OWN_ROUTER, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    const struct refusal rows[] = {
        {{SET(batch.router_x, 0)}, MOE4_EINVAL, {"router_x is NULL", "32", "64"}},
        {{SET(batch.ldrouter_x, ROUTER_H - 1)}, MOE4_EINVAL, {"ldrouter_x is 31", "at least 32"}},
        {{SET(batch.router_x_dtype, MOE4_DTYPE_F8_E4M3)}, MOE4_EUNSUPPORTED, {"router_x is f8_e4m3"}},
        {{SET(batch.router_x_dtype, MOE4_DTYPE_I64)}, MOE4_EUNSUPPORTED, {"router_x is i64"}},
    };
    check_rows(latent_layer, &call, rows, sizeof rows / sizeof *rows);

    moe4_layer_config no_router = layer_config(H, I, E, A);
    moe4_layer *layer = layer_open(context, &no_router, experts);
    const struct refusal no_logits[] = {{{{0}}, MOE4_EINVAL, {"logits are NULL", "no router"}}};
    check_rows(layer, &call, no_logits, 1);
    moe4_layer_destroy(layer);

    no_router.routing = (moe4_routing)MOE4_ROUTING_INIT;
    layer = layer_open(context, &no_router, experts);
    const struct refusal no_method[] = {{{{0}}, MOE4_EINVAL, {"no routing method"}}};
    check_rows(layer, &call, no_method, 1);
    moe4_layer_destroy(layer);
    buffers_release(&buffers);
}

static void test_token_ids(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    static const int32_t tokens[T] = {0, 2, 1, 3, 0};
    int32_t table[3 * A] = {0, 1, 2, 3, 4, 5};
    moe4_layer_config config = layer_config(H, I, E, A);
    config.routing.method = MOE4_ROUTING_HASH;
    config.routing.hash_table = table;
    config.routing.hash_table_dtype = MOE4_DTYPE_I32;
    config.routing.vocab_size = 3;
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call call = valid_call(&buffers, &config, ROUTE_LOGITS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    const struct refusal rows[] = {
        {{{0}}, MOE4_EINVAL, {"token_ids is NULL"}},
        {{SET(batch.token_ids, (uintptr_t)tokens)}, MOE4_EINVAL, {"token_ids[3] is 3", "0..2"}},
    };
    check_rows(layer, &call, rows, 2);
    moe4_layer_destroy(layer);
    buffers_release(&buffers);
}

static void test_null_structs(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call c = valid_call(&buffers, &plain, ROUTE_IDS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    assert_int_equal(moe4_forward_experts(NULL, plain_layer, &c.batch, &c.topk, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_experts(context, NULL, &c.batch, &c.topk, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_experts(context, plain_layer, NULL, &c.topk, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_experts(context, plain_layer, &c.batch, NULL, &c.result), MOE4_EINVAL);
    assert_non_null(strstr(moe4_context_message(context), "topk is NULL"));
    assert_int_equal(moe4_forward_experts(context, plain_layer, &c.batch, &c.topk, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_forward_router(NULL, plain_layer, &c.batch, NULL, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_router(context, NULL, &c.batch, NULL, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_router(context, plain_layer, NULL, NULL, &c.result), MOE4_EINVAL);
    assert_int_equal(moe4_forward_router(context, plain_layer, &c.batch, NULL, NULL), MOE4_EINVAL);
    check_untouched_outputs(&c);
    buffers_release(&buffers);
}

/* A layer packed for a level that the context lacks. */
static void test_layer_of_a_higher_level(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    if (isa_levels(levels) < 2) skip();
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = valid_call(&buffers, &plain, ROUTE_IDS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    moe4_context *low = context_open(MOE4_ISA_C, 1);
    assert_int_equal(moe4_forward_experts(low, plain_layer, &call.batch, &call.topk, &call.result), MOE4_EINVAL);
    assert_non_null(strstr(moe4_context_message(low), ((struct prepared *)plain_layer->prepared)->kernel->name));
    check_untouched_outputs(&call);

    /* The other way round is fine, and keeps the layer's own order of sums. */
    moe4_layer *portable = layer_open(low, &plain, experts);
    struct call first = valid_call(&buffers, &plain, ROUTE_IDS_F32, MOE4_COMPUTE_BF16, MOE4_DTYPE_BF16);
    call_must_run(&buffers, low, portable, &first);
    call_must_run(&buffers, context, portable, &call);
    call_compare(&first, &call);
    moe4_layer_destroy(portable);
    moe4_context_destroy(low);
    buffers_release(&buffers);
}

/* ---- Fields left at zero ---- */

/* Dtypes: what the INIT macro says.  Strides: tight rows.  router_x: x, given or not. */
static void test_zero_means_default(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    static const enum route_source sources[] = {ROUTE_OWN_ROUTER, ROUTE_LOGITS_F32, ROUTE_IDS_F32};
    for (int i = 0; i < 3; i++) {
        struct call_plan plan = {.n_tokens = T, .top_k = A, .routing = sources[i], .write = MOE4_WRITE_ADD, .seed = 4};
        struct call expected = call_create(&buffers, &plain, &plan), zero = call_create(&buffers, &plain, &plan);
        call_must_run(&buffers, context, plain_layer, &expected);
        zero.batch.x_dtype = zero.batch.router_x_dtype = zero.result.y_dtype = MOE4_DTYPE_NONE;
        zero.logits.dtype = zero.topk.weights_dtype = MOE4_DTYPE_NONE;
        if (sources[i] == ROUTE_OWN_ROUTER) zero.batch.router_x = zero.batch.x;
        call_must_run(&buffers, context, plain_layer, &zero);
        zero.result.y_dtype = MOE4_DTYPE_BF16;
        call_compare(&expected, &zero);
    }
    buffers_release(&buffers);
}

/* The routing's top_k counts even where the caller brings the ids. */
static void test_top_k_without_a_method(void **state)
{
    (void)state;
    moe4_layer_config config = layer_config(H, I, E, A);
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    size_t by_default, given;
    config.routing = (moe4_routing)MOE4_ROUTING_INIT;
    config.routing.top_k = 3;
    moe4_layer *layer = layer_open(context, &config, experts);
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_int_equal(info.top_k, 3);
    assert_int_equal(moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, T, 0, &by_default), MOE4_OK);
    assert_int_equal(moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, T, 3, &given), MOE4_OK);
    assert_int_equal(by_default, given);
    moe4_layer_destroy(layer);
}

static void test_workspace_query(void **state)
{
    (void)state;
    size_t bytes = 0, last = 0;
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, T, 1, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, -1, 1, &bytes), MOE4_EINVAL);
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, T, -1, &bytes), MOE4_EINVAL);
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, T, E + 1, &bytes), MOE4_EINVAL);
    assert_non_null(strstr(moe4_context_message(context), "top_k is 9, expected 1 to 8"));
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, (int64_t)INT32_MAX + 1, 1, &bytes),
                     MOE4_EINVAL);
    assert_int_equal(bytes, 0);
    for (int64_t n = 0; n < 100000; n += 1 + n / 3) {
        assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, n, 2, &bytes), MOE4_OK);
        assert_true(bytes >= last);
        last = bytes;
    }
    assert_int_equal(moe4_workspace_bytes(context, plain_layer, MOE4_COMPUTE_BF16, INT32_MAX, E, &bytes), MOE4_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batch_and_result),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_ids),
        cmocka_unit_test(test_quantised_x),
        cmocka_unit_test(test_own_router),
        cmocka_unit_test(test_token_ids),
        cmocka_unit_test(test_null_structs),
        cmocka_unit_test(test_layer_of_a_higher_level),
        cmocka_unit_test(test_zero_means_default),
        cmocka_unit_test(test_top_k_without_a_method),
        cmocka_unit_test(test_workspace_query),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
