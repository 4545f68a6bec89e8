/* Every refusal of contexts, layers and queries: its status, a message that names the field and both values, and
 * nothing read before it.  (Calls: test_refused_calls.c.) */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "refusal.h"

enum { H = 64, I = 96, E = 8, A = 2 };

static void run_nothing(void *user, void (*task)(void *, int32_t), void *argument)
{
    (void)user, (void)task, (void)argument;
}

static struct arguments valid_arguments(void)
{
    struct arguments a = {.context = MOE4_CONTEXT_CONFIG_INIT,
                          .pool = {2, run_nothing, NULL},
                          .config = layer_config(H, I, E, A),
                          .query = MOE4_QUERY_INIT};
    a.context.n_threads = 1;
    return a;
}

/* ---- Contexts ---- */

static void test_contexts(void **state)
{
    (void)state;
    static struct arguments given;
    const struct refusal rows[] = {
        {{SET(context.device, MOE4_DEVICE_CUDA)}, MOE4_EUNSUPPORTED, {"device", "cuda"}},
        {{SET(context.device, 7)}, MOE4_EINVAL, {"device is 7", "cpu"}},
        {{SET(context.device_index, 3)}, MOE4_EINVAL, {"device_index is 3", "expected 0"}},
        {{SET(context.isa, 99)}, MOE4_EINVAL, {"isa is 99"}},
        {{SET(context.isa, -1)}, MOE4_EINVAL, {"isa is -1"}},
        {{SET(context.n_threads, -1)}, MOE4_EINVAL, {"n_threads is -1", "0 to 1024"}},
        {{SET(context.n_threads, 1025)}, MOE4_EINVAL, {"n_threads is 1025", "0 to 1024"}},
        {{SET(context.pool, (uintptr_t)&given.pool)}, MOE4_EINVAL, {"n_threads 1"}},
        {{SET(context.pool, (uintptr_t)&given.pool), SET(context.n_threads, 0), SET(pool.width, 0)},
         MOE4_EINVAL,
         {"pool has width 0"}},
        {{SET(context.pool, (uintptr_t)&given.pool), SET(context.n_threads, 0), SET(pool.run, 0)},
         MOE4_EINVAL,
         {"run NULL"}},
        {{SET(context.allocator, (uintptr_t)&given.allocator)}, MOE4_EINVAL, {"allocator.allocate is NULL"}},
        {{SET(context.size, 0)}, MOE4_EINVAL, {"config.size is 0", "INIT"}},
        {{SET(context.size, 7)}, MOE4_EINVAL, {"config.size is 7", "INIT"}},
        {{SET(context.size, UINT64_MAX)}, MOE4_EINVAL, {"config.size is", "INIT"}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe4_context *context = NULL;
        given = valid_arguments();
        refusal_apply(&rows[i], &given);
        moe4_status status = moe4_context_create(&given.context, &context);
        assert_non_null(context);
        refusal_check(&rows[i], i, status, context);
        moe4_context_destroy(context);
    }
}

/* A level that this CPU lacks; vacuous where it has them all. */
static void test_missing_levels(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    for (int32_t i = isa_levels(levels); i < MAX_LEVELS; i++) {
        moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
        moe4_context *context;
        config.isa = (moe4_isa)(MOE4_ISA_C + i);
        assert_int_equal(moe4_context_create(&config, &context), MOE4_EUNSUPPORTED);
        assert_non_null(strstr(moe4_context_message(context), "isa is "));
        moe4_context_destroy(context);
    }
}

/* A context whose creation failed answers every call with that status and lives until it is destroyed. */
static void test_half_built_context(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct arguments a = valid_arguments();
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    moe4_expert_source source = {.read = NULL};
    moe4_deferred deferred = MOE4_DEFERRED_INIT;
    struct weight_plan weights = {.seed = 1};
    moe4_expert *experts = weights_create(&buffers, &a.config, &weights);
    moe4_context *context, *good = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *layer = layer_open(good, &a.config, experts), *other = layer;
    size_t bytes;
    a.context.device = MOE4_DEVICE_CUDA;
    a.query.config = &a.config;
    assert_int_equal(moe4_context_create(&a.context, &context), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_context_describe(context, &info), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_supports(context, &a.query), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_layer_create(context, &a.config, experts, &other), MOE4_EUNSUPPORTED);
    assert_null(other);
    assert_int_equal(moe4_layer_create_from(context, &a.config, &source, &other), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, 1, 1, &bytes), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_forward_router(context, layer, &batch, NULL, &result), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_forward_experts(context, layer, &batch, &topk, &result), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_route(context, &a.config.routing, E, 1, NULL, NULL, NULL, NULL), MOE4_EUNSUPPORTED);
    assert_int_equal(moe4_combine(context, &deferred, &result), MOE4_EUNSUPPORTED);
    assert_non_null(strstr(moe4_context_message(context), "cuda"));
    moe4_context_destroy(context);
    moe4_layer_destroy(layer);
    moe4_context_destroy(good);
    buffers_release(&buffers);
}

/* ---- Layers ---- */

static moe4_status read_never(void *user, int32_t local_expert, moe4_expert *expert)
{
    (void)user, (void)local_expert, (void)expert;
    fail_msg("an expert was read for a config that is refused");
    return MOE4_EIO;
}

/* Both moe4_supports and creation refuse, alike, before anything is read. */
static void check_configs(const struct refusal *rows, size_t n_rows, struct arguments *given)
{
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    const struct arguments valid = *given;
    const moe4_expert_source source = {.read = read_never};
    for (size_t i = 0; i < n_rows; i++) {
        moe4_layer *layer = (moe4_layer *)&valid; /* must become NULL */
        *given = valid;
        refusal_apply(&rows[i], given);
        given->query.config = &given->config;
        refusal_check(&rows[i], i, moe4_supports(context, &given->query), context);
        refusal_check(&rows[i], i, moe4_layer_create_from(context, &given->config, &source, &layer), context);
        assert_null(layer);
    }
    moe4_context_destroy(context);
}

static void test_shapes_and_experts(void **state)
{
    (void)state;
    static int32_t map_low[E] = {0, -2}, map_high[E] = {0, 1, 2}, map_none[E];
    static struct arguments a;
    memset(map_none, 0xFF, sizeof map_none);
    a = valid_arguments();
    const struct refusal rows[] = {
        {{SET(config.hidden_size, 0)}, MOE4_EINVAL, {"hidden_size is 0", "multiple of 32"}},
        {{SET(config.hidden_size, -32)}, MOE4_EINVAL, {"hidden_size is -32", "multiple of 32"}},
        {{SET(config.hidden_size, 48)}, MOE4_EINVAL, {"hidden_size is 48", "multiple of 32"}},
        {{SET(config.hidden_size, 1 << 25)}, MOE4_EINVAL, {"hidden_size is 33554432", "up to 16777216"}},
        {{SET(config.intermediate_size, 0)}, MOE4_EINVAL, {"intermediate_size is 0", "multiple of 32"}},
        {{SET(config.intermediate_size, 40)}, MOE4_EINVAL, {"intermediate_size is 40", "multiple of 32"}},
        {{SET(config.output_size, -1)}, MOE4_EINVAL, {"output_size is -1", "hidden_size 64"}},
        {{SET(config.output_size, H + 1)}, MOE4_EINVAL, {"output_size is 65", "hidden_size 64"}},
        {{SET(config.stored_intermediate_size, I - 1)}, MOE4_EINVAL, {"stored_intermediate_size is 95", "96"}},
        {{SET(config.stored_intermediate_size, -1)}, MOE4_EINVAL, {"stored_intermediate_size is -1", "96"}},
        {{SET(config.stored_intermediate_size, 1 << 25)}, MOE4_EINVAL, {"stored_intermediate_size", "16777216"}},
        {{SET(config.n_experts, 0)}, MOE4_EINVAL, {"n_experts is 0", "1 to 32767"}},
        {{SET(config.n_experts, -5)}, MOE4_EINVAL, {"n_experts is -5", "1 to 32767"}},
        {{SET(config.n_experts, 32768)}, MOE4_EINVAL, {"n_experts is 32768", "1 to 32767"}},
        {{SET(config.first_expert, -1)}, MOE4_EINVAL, {"first_expert is -1", "0 to 7"}},
        {{SET(config.first_expert, E)}, MOE4_EINVAL, {"first_expert is 8", "0 to 7"}},
        {{SET(config.n_local_experts, -1)}, MOE4_EINVAL, {"n_local_experts is -1", "8"}},
        {{SET(config.n_local_experts, E + 1)}, MOE4_EINVAL, {"n_local_experts is 9", "8"}},
        {{SET(config.first_expert, 4), SET(config.n_local_experts, 5)}, MOE4_EINVAL, {"4", "5", "n_experts 8"}},
        {{SET(config.first_expert, INT32_MAX)}, MOE4_EINVAL, {"first_expert is 2147483647", "0 to 7"}},
        {{SET(config.expert_map, (uintptr_t)map_low)}, MOE4_EINVAL, {"expert_map[1] is -2", "-1 to 0"}},
        {{SET(config.expert_map, (uintptr_t)map_high), SET(config.n_local_experts, 2)},
         MOE4_EINVAL,
         {"expert_map[2] is 2", "-1 to 1"}},
        {{SET(config.expert_map, (uintptr_t)map_none)}, MOE4_EINVAL, {"expert_map names no local expert"}},
        {{SET(config.expert_map, (uintptr_t)map_high), SET(config.first_expert, 1)},
         MOE4_EINVAL,
         {"first_expert is 1", "expected 0", "expert_map"}},
        {{SET(config.size, 1)}, MOE4_EINVAL, {"config.size is 1", "INIT"}},
    };
    check_configs(rows, sizeof rows / sizeof *rows, &a);
}

static void test_activations(void **state)
{
    (void)state;
    static struct arguments a;
    a = valid_arguments();
    const struct refusal rows[] = {
        {{SET(config.activation, MOE4_ACTIVATION_NONE)}, MOE4_EINVAL, {"activation is not set"}},
        {{SET(config.activation, 77)}, MOE4_EINVAL, {"activation 77", "1..8"}},
        {{SET(config.gate_up, MOE4_GATE_UP_NONE)}, MOE4_EINVAL, {"gate_up is none", "swiglu_oai"}},
        {{SET(config.gate_up, 9)}, MOE4_EINVAL, {"gate_up 9"}},
        {{SET(config.activation, MOE4_ACTIVATION_SILU)}, MOE4_EINVAL, {"alpha is given", "silu"}},
        {{SET(config.activation, MOE4_ACTIVATION_SWIGLU_STEP), SET(config.alpha.presence, 0)},
         MOE4_EINVAL,
         {"beta is given", "swiglu_step"}},
        {{SET(config.alpha.presence, 5)}, MOE4_EINVAL, {"alpha", "5"}},
        {{SET(config.alpha.value, float_bits(NAN))}, MOE4_EINVAL, {"alpha is nan", "finite"}},
        {{SET(config.beta.value, float_bits(INFINITY))}, MOE4_EINVAL, {"beta is inf", "finite"}},
        {{SET(config.limit.value, float_bits(0))}, MOE4_EINVAL, {"limit is 0", "above 0"}},
        {{SET(config.limit.value, float_bits(-7))}, MOE4_EINVAL, {"limit is -7", "above 0"}},
        {{SET(config.limit.value, float_bits(NAN))}, MOE4_EINVAL, {"limit is nan", "above 0"}},
        {{SET(config.activation, MOE4_ACTIVATION_SITU), SET(config.alpha.presence, 0)},
         MOE4_EINVAL,
         {"alpha is absent", "situ"}},
        {{SET(config.activation, MOE4_ACTIVATION_SITU), SET(config.beta.value, float_bits(-1))},
         MOE4_EINVAL,
         {"beta is -1", "above 0"}},
        {{SET(config.activation, MOE4_ACTIVATION_RELU2), SET(config.alpha.presence, 0), SET(config.beta.presence, 0)},
         MOE4_EINVAL,
         {"limit is given", "relu2"}},
    };
    check_configs(rows, sizeof rows / sizeof *rows, &a);
}

static void test_routing_and_router(void **state)
{
    (void)state;
    static const uint16_t numbers[E * H];
    static struct arguments a;
    a = valid_arguments();
    const struct refusal rows[] = {
        {{SET(config.routing.method, 99)}, MOE4_EINVAL, {"method 99"}},
        {{SET(config.routing.top_k, 0)}, MOE4_EINVAL, {"top_k is 0", "8"}},
        {{SET(config.routing.top_k, E + 1)}, MOE4_EINVAL, {"top_k is 9", "8"}},
        {{SET(config.routing.method, 0), SET(config.routing.top_k, E + 1)}, MOE4_EINVAL, {"top_k is 9", "8"}},
        {{SET(config.routing.method, 0), SET(config.routing.n_group, 2)}, MOE4_EINVAL, {"method"}},
        {{SET(config.routing.n_group, 3)}, MOE4_EINVAL, {"n_group is 3"}},
        {{SET(config.routing.scaling_factor, float_bits(NAN))}, MOE4_EINVAL, {"scaling_factor is nan"}},
        {{SET(config.router.bias, (uintptr_t)numbers)}, MOE4_EINVAL, {"router.bias", "no router.weight"}},
        {{SET(config.router.weight, (uintptr_t)numbers)}, MOE4_EINVAL, {"router.weight_dtype is none", "bf16"}},
        {{SET(config.router.weight, (uintptr_t)numbers), SET(config.router.weight_dtype, MOE4_DTYPE_BF16),
          SET(config.router.bias, (uintptr_t)numbers)},
         MOE4_EINVAL,
         {"router.bias_dtype is none", "bf16"}},
        {{SET(config.router.weight, (uintptr_t)numbers), SET(config.router.weight_dtype, MOE4_DTYPE_BF16),
          SET(config.router.hidden_size, -1)},
         MOE4_EINVAL,
         {"router.hidden_size is -1", "0 to"}},
        {{SET(config.router.weight, (uintptr_t)numbers), SET(config.router.weight_dtype, MOE4_DTYPE_BF16),
          SET(config.routing.method, 0)},
         MOE4_EINVAL,
         {"router.weight", "method is none"}},
    };
    check_configs(rows, sizeof rows / sizeof *rows, &a);
}

/* What only shows when values are read: refused by creation alone. */
static void test_values_per_expert(void **state)
{
    (void)state;
    float values[E] = {1, 1, 1, -1, 1, 1, 1, 1};
    const moe4_expert_source source = {.read = read_never};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *layer;
    moe4_layer_config config = layer_config(H, I, E, A);
    config.limit = (moe4_param){MOE4_PER_EXPERT, 0, NULL};
    assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), MOE4_EINVAL);
    assert_non_null(strstr(moe4_context_message(context), "limit is per expert, but its values are NULL"));
    config.limit.values = values;
    assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), MOE4_EINVAL);
    assert_non_null(strstr(moe4_context_message(context), "limit of local expert 3 is -1"));
    moe4_context_destroy(context);
}

/* ---- Experts ---- */

static moe4_status read_given(void *user, int32_t local_expert, moe4_expert *expert)
{
    (void)local_expert;
    *expert = *(moe4_expert *)user;
    return MOE4_OK;
}

static void test_experts(void **state)
{
    (void)state;
    static const float bias[2 * I];
    static struct arguments a;
    const struct refusal rows[] = {
        {{SET(expert.gate_up.codes, 0)}, MOE4_EINVAL, {"expert 0", "gate_up.codes is NULL"}},
        {{SET(expert.gate_up.scales, 0)}, MOE4_EINVAL, {"expert 0", "gate_up.scales is NULL"}},
        {{SET(expert.down.codes, 0)}, MOE4_EINVAL, {"expert 0", "down.codes is NULL"}},
        {{SET(expert.down.scales, 0)}, MOE4_EINVAL, {"expert 0", "down.scales is NULL"}},
        {{SET(expert.gate_up.codes_row_bytes, 31)}, MOE4_EINVAL, {"gate_up.codes_row_bytes is 31", "at least 32"}},
        {{SET(expert.gate_up.codes_row_bytes, -1)}, MOE4_EINVAL, {"gate_up.codes_row_bytes is -1", "at least 32"}},
        {{SET(expert.gate_up.scales_row_bytes, 1)}, MOE4_EINVAL, {"gate_up.scales_row_bytes is 1", "at least 2"}},
        {{SET(expert.down.codes_row_bytes, 47)}, MOE4_EINVAL, {"down.codes_row_bytes is 47", "at least 48"}},
        {{SET(expert.down.scales_row_bytes, 2)}, MOE4_EINVAL, {"down.scales_row_bytes is 2", "at least 3"}},
        {{SET(expert.gate_up.bias, (uintptr_t)bias), SET(expert.gate_up.bias_dtype, 0)},
         MOE4_EINVAL,
         {"gate_up.bias_dtype is none", "bf16"}},
        {{SET(expert.down.bias, (uintptr_t)bias), SET(expert.down.bias_dtype, MOE4_DTYPE_I16)},
         MOE4_EINVAL,
         {"down.bias_dtype is i16", "bf16"}},
    };
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.seed = 1};
    a = valid_arguments();
    a.expert = weights_expert(&buffers, &a.config, &weights, 0);
    const struct arguments valid = a;
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        moe4_layer *layer;
        a = valid;
        refusal_apply(&rows[i], &a);
        const moe4_expert_source source = {.read = read_given, .user = &a.expert};
        refusal_check(&rows[i], i, moe4_layer_create_from(context, &a.config, &source, &layer), context);
        assert_null(layer);
    }
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* ---- Queries ---- */

static void test_queries(void **state)
{
    (void)state;
    static struct arguments a;
    const struct refusal rows[] = {
        {{SET(query.compute, 9)}, MOE4_EINVAL, {"compute is 9"}},
        {{SET(query.x_dtype, MOE4_DTYPE_F8_E4M3)}, MOE4_EINVAL, {"x_dtype is f8_e4m3", "bf16 compute"}},
        {{SET(query.x_dtype, MOE4_DTYPE_I32)}, MOE4_EINVAL, {"x_dtype is i32", "bf16"}},
        {{SET(query.x_dtype, 50)}, MOE4_EINVAL, {"x_dtype is unknown", "bf16"}},
        {{SET(query.compute, MOE4_COMPUTE_INT8), SET(query.x_dtype, MOE4_DTYPE_F8_E4M3)},
         MOE4_EINVAL,
         {"x_dtype is f8_e4m3", "int8 compute"}},
        {{SET(query.y_dtype, MOE4_DTYPE_F8_E4M3)}, MOE4_EINVAL, {"y_dtype is f8_e4m3", "bf16"}},
        {{SET(query.write, 2)}, MOE4_EINVAL, {"write is 2"}},
        {{SET(query.logits_dtype, MOE4_DTYPE_I64)}, MOE4_EINVAL, {"logits dtype is i64", "f32"}},
        {{SET(query.logits_dtype, MOE4_DTYPE_F32), SET(query.weights_dtype, MOE4_DTYPE_F32)},
         MOE4_EINVAL,
         {"both logits and ids"}},
        {{SET(query.logits_dtype, MOE4_DTYPE_F32), SET(config.routing.method, 0)}, MOE4_EINVAL, {"method is none"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F16)}, MOE4_EINVAL, {"weights_dtype is f16", "f32 or bf16"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.topk_format, MOE4_TOPK_PACKED)},
         MOE4_EINVAL,
         {"weights_dtype is f32", "bf16"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.topk_format, 3)}, MOE4_EINVAL, {"format is 3"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.weight_use, 3)}, MOE4_EINVAL, {"weight_use is 3"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.weight_use, MOE4_WEIGHT_ON_INPUT), SET(query.top_k, 3)},
         MOE4_EUNSUPPORTED,
         {"top_k is 3"}},
        /* top_k 0 is the routing's */
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.weight_use, MOE4_WEIGHT_ON_INPUT)},
         MOE4_EUNSUPPORTED,
         {"top_k is 2"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.top_k, E + 1)}, MOE4_EINVAL, {"top_k is 9", "1 to 8"}},
        {{SET(query.weights_dtype, MOE4_DTYPE_F32), SET(query.top_k, -1)}, MOE4_EINVAL, {"top_k is -1", "1 to 8"}},
        {{SET(query.n_tokens, -1)}, MOE4_EINVAL, {"n_tokens is -1", "0 or more"}},
        {{SET(query.n_tokens, (int64_t)INT32_MAX + 1)}, MOE4_EINVAL, {"n_tokens is 2147483648", "2147483647"}},
        {{SET(query.parallel.tensor_size, -1)}, MOE4_EINVAL, {"parallel sizes are -1"}},
        {{SET(query.parallel.sequence_size, -2)}, MOE4_EINVAL, {"parallel sizes are", "-2"}},
        {{SET(query.parallel.expert_size, 2), SET(query.parallel.data_size, 4)}, MOE4_EUNSUPPORTED, {"2", "4"}},
        {{SET(query.config, 0)}, MOE4_EINVAL, {"config is NULL"}},
        {{SET(query.size, 4)}, MOE4_EINVAL, {"query.size is 4"}},
    };
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        a = valid_arguments();
        a.query.config = &a.config;
        refusal_apply(&rows[i], &a);
        refusal_check(&rows[i], i, moe4_supports(context, &a.query), context);
    }
    /* Quantised x with the weights on it: in mxfp8 compute, where it is otherwise fine. */
    a = valid_arguments();
    a.query.config = &a.config;
    a.query.compute = MOE4_COMPUTE_MXFP8;
    a.query.x_dtype = MOE4_DTYPE_F8_E4M3;
    a.query.weights_dtype = MOE4_DTYPE_F32;
    a.query.top_k = 1;
    assert_int_equal(moe4_supports(context, &a.query), MOE4_OK);
    a.query.weight_use = MOE4_WEIGHT_ON_INPUT;
    assert_int_equal(moe4_supports(context, &a.query), MOE4_EUNSUPPORTED);
    assert_non_null(strstr(moe4_context_message(context), "f8_e4m3"));
    moe4_context_destroy(context);
}

/* ---- NULL ---- */

static void test_null(void **state)
{
    (void)state;
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer_config config = layer_config(H, I, E, A);
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_layer_info layer_info = MOE4_LAYER_INFO_INIT;
    moe4_expert_source source = {.read = read_never}, no_read = {.read = NULL};
    moe4_layer *layer;
    moe4_query query = MOE4_QUERY_INIT;
    size_t bytes;
    assert_int_equal(moe4_context_create(NULL, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_context_describe(NULL, &info), MOE4_EINVAL);
    assert_int_equal(moe4_context_describe(context, NULL), MOE4_EINVAL);
    info.size = 5;
    assert_int_equal(moe4_context_describe(context, &info), MOE4_EINVAL);
    assert_string_equal(moe4_context_message(NULL), "");
    assert_int_equal(moe4_layer_create_from(NULL, &config, &source, &layer), MOE4_EINVAL);
    assert_null(layer);
    assert_int_equal(moe4_layer_create_from(context, NULL, &source, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_layer_create_from(context, &config, NULL, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_layer_create_from(context, &config, &no_read, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_layer_create_from(context, &config, &source, NULL), MOE4_EINVAL);
    source.describe = read_never;
    assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), MOE4_EINVAL);
    assert_string_equal(moe4_context_message(context), "source.copy is NULL, but source.describe is not");
    assert_int_equal(moe4_layer_create(NULL, &config, NULL, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_layer_create(context, &config, NULL, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_layer_describe(NULL, &layer_info), MOE4_EINVAL);
    assert_int_equal(moe4_workspace_bytes(NULL, NULL, MOE4_COMPUTE_BF16, 1, 1, &bytes), MOE4_EINVAL);
    assert_int_equal(moe4_workspace_bytes(context, NULL, MOE4_COMPUTE_BF16, 1, 1, &bytes), MOE4_EINVAL);
    assert_int_equal(moe4_supports(NULL, &query), MOE4_EINVAL);
    assert_int_equal(moe4_supports(context, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_supports(context, &query), MOE4_EINVAL); /* no config */
    moe4_layer_destroy(NULL);
    moe4_context_destroy(context);
    moe4_context_destroy(NULL);
    assert_int_equal(moe4_context_create(NULL, &context), MOE4_OK);
    assert_string_equal(moe4_context_message(context), "");
    moe4_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_contexts),
        cmocka_unit_test(test_missing_levels),
        cmocka_unit_test(test_half_built_context),
        cmocka_unit_test(test_shapes_and_experts),
        cmocka_unit_test(test_activations),
        cmocka_unit_test(test_routing_and_router),
        cmocka_unit_test(test_values_per_expert),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_queries),
        cmocka_unit_test(test_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
