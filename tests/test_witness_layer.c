/* Whole layers against the MoE blocks of the transformers library in f64 (tests/data/witness, tests/witness), and
 * torch's rounding seen through a layer that changes nothing. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fixture.h"
#include "ref.h"
#include "witness.h"

/* ---- Whole layers ---- */

enum { T = 16, H = 64, I = 64, E = 8, N_SHARED = 2, N_STORED = E + N_SHARED };

static const char *const layer_files[] = {
    "layer_gpt_oss",    "layer_mixtral",     "layer_qwen3_moe",   "layer_minimax_m2",
    "layer_llama4",     "layer_deepseek_v3", "layer_deepseek_v4", "layer_deepseek_v4_hash",
    "layer_nemotron_h", "layer_step3p7",     "layer_gemma4",
};

/* The weights that all of them share, and one of them. */
struct witness_layer {
    golden_file *weights, *file;
    moe4_layer_config config;
    moe4_expert experts[N_STORED];
};

static moe4_gate_up gate_up_of(const golden_file *file)
{
    if (witness_says(file, "gate_up", "none")) return MOE4_GATE_UP_NONE;
    return witness_says(file, "gate_up", "interleaved") ? MOE4_GATE_UP_INTERLEAVED : MOE4_GATE_UP_GATE_FIRST;
}

static moe4_param same(const golden_file *file, const char *key)
{
    return (moe4_param){golden_metadata(file, key) ? MOE4_SAME : MOE4_ABSENT, witness_number(file, key), NULL};
}

static void fill_config(struct witness_layer *layer)
{
    const golden_file *file = layer->file, *weights = layer->weights;
    moe4_layer_config *config = &layer->config;
    *config = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    config->hidden_size = H;
    config->intermediate_size = I;
    config->n_experts = E;
    config->gate_up = gate_up_of(file);
    config->activation = witness_activation(file);
    config->alpha = same(file, "alpha");
    config->beta = same(file, "beta");
    config->limit = same(file, "limit");
    config->routing = witness_routing(file);
    if (witness_says(file, "correction", "yes"))
        witness_set_bias(&config->routing, golden_find(weights, "correction_bias"));
    if (config->routing.method == MOE4_ROUTING_HASH)
        witness_set_table(&config->routing, golden_find(weights, "hash_table"));
    if (config->routing.method == MOE4_ROUTING_NONE) return;
    config->router.weight = golden_data(weights, "router", "BF16", E * H);
    config->router.weight_dtype = MOE4_DTYPE_BF16;
    if (!witness_says(file, "biases", "yes")) return;
    config->router.bias = golden_data(weights, "router_bias", "BF16", E);
    config->router.bias_dtype = MOE4_DTYPE_BF16;
}

static void fill_experts(struct witness_layer *layer)
{
    const golden_file *weights = layer->weights;
    const uint8_t *up_codes = golden_data(weights, "gate_up_codes", "U8", N_STORED * 2 * I * H / 2);
    const uint8_t *up_scales = golden_data(weights, "gate_up_scales", "U8", N_STORED * 2 * I * H / 32);
    const uint8_t *down_codes = golden_data(weights, "down_codes", "U8", N_STORED * H * I / 2);
    const uint8_t *down_scales = golden_data(weights, "down_scales", "U8", N_STORED * H * I / 32);
    const uint16_t *up_bias = golden_data(weights, "gate_up_bias", "BF16", N_STORED * 2 * I);
    const uint16_t *down_bias = golden_data(weights, "down_bias", "BF16", N_STORED * H);
    const int has_bias = witness_says(layer->file, "biases", "yes");
    for (int64_t e = 0; e < N_STORED; e++)
        layer->experts[e] = (moe4_expert){
            .gate_up = {up_codes + e * 2 * I * H / 2, up_scales + e * 2 * I * H / 32, 0, 0,
                        has_bias ? up_bias + e * 2 * I : NULL, MOE4_DTYPE_BF16},
            .down = {down_codes + e * H * I / 2, down_scales + e * H * I / 32, 0, 0,
                     has_bias ? down_bias + e * H : NULL, MOE4_DTYPE_BF16},
        };
}

static struct witness_layer layer_read(const char *name)
{
    struct witness_layer layer = {.weights = witness_open("layer_weights"), .file = witness_open(name)};
    fill_config(&layer);
    fill_experts(&layer);
    return layer;
}

static void layer_close(struct witness_layer *layer)
{
    golden_file_close(layer->file);
    golden_file_close(layer->weights);
}

static moe4_batch batch_of(struct buffers *buffers, moe4_context *context, const moe4_layer *layer, const void *x,
                           int32_t top_k)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    batch.n_tokens = T;
    batch.x = x;
    if (moe4_workspace_bytes(context, layer, batch.compute, T, top_k, &batch.workspace_bytes))
        fail_msg("%s", moe4_context_message(context));
    batch.workspace = buffers_allocate(buffers, batch.workspace_bytes);
    return batch;
}

/* The witness has none of our roundings: of weights, intermediate and gemm2 rows once each, which a row of two slots
 * may well feel all alike. */
static void expect_close(const struct witness_layer *layer, const char *name, const char *tensor, const float *y)
{
    const double *expected = golden_data(layer->file, tensor, "F64", T * H);
    double got[T * H];
    ref_frobenius frobenius;
    for (int i = 0; i < T * H; i++) got[i] = y[i];
    ref_compare(got, expected, T, H, &frobenius);
    if (!(frobenius.overall <= 4.5e-3 && frobenius.worst_row <= 1.2e-2))
        fail_msg("%s: relative Frobenius error %g, in row %d %g", name, frobenius.overall,
                 (int)frobenius.worst_row_index, frobenius.worst_row);
}

static void must(moe4_context *context, const char *name, moe4_status status)
{
    if (status) fail_msg("%s: %s", name, moe4_context_message(context));
}

/* One call with router and experts, or where the witness brings ids and weights with experts alone; for weights that
 * go on the input a second one with what the first has chosen. */
static void check_layer(const char *name, moe4_isa isa)
{
    struct buffers buffers = {BUFFERS_GUARD_BEFORE, NULL};
    struct witness_layer witness = layer_read(name);
    const int32_t A = witness.config.routing.top_k;
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &witness.config, witness.experts);
    moe4_batch batch = batch_of(&buffers, context, layer, golden_data(witness.weights, "x", "BF16", T * H), A);
    batch.token_ids = golden_data(witness.weights, "token_ids", "I32", T);
    float y[T * H], weights[T * 2];
    int32_t ids[T * 2];
    moe4_topk topk = MOE4_TOPK_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    topk.top_k = A;
    topk.ids = ids;
    topk.weights = weights;
    result.y = y;
    result.y_dtype = MOE4_DTYPE_F32;
    result.ids = ids;
    result.weights = weights;
    assert_true(A <= 2);
    if (witness.config.routing.method != MOE4_ROUTING_NONE)
        must(context, name, moe4_forward_router(context, layer, &batch, NULL, &result));
    result.ids = NULL;
    result.weights = NULL;
    if (witness_says(witness.file, "weight_use", "input")) {
        topk.weight_use = MOE4_WEIGHT_ON_INPUT;
        must(context, name, moe4_forward_experts(context, layer, &batch, &topk, &result));
    }
    if (witness.config.routing.method == MOE4_ROUTING_NONE) {
        topk.ids = golden_data(witness.file, "ids", "I32", T * A);
        topk.weights = golden_data(witness.file, "weights", "F32", T * A);
        must(context, name, moe4_forward_experts(context, layer, &batch, &topk, &result));
    }
    expect_close(&witness, name, "output", y);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    layer_close(&witness);
    buffers_release(&buffers);
}

static void whole_layers(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int32_t level = 0; level < n_levels; level++)
        for (size_t i = 0; i < sizeof layer_files / sizeof *layer_files; i++)
            check_layer(layer_files[i], levels[level]);
}

/* ---- Shared experts, fused ---- */

/* ids and weights of the routed experts, then the shared ones with weight 1. */
static void append_shared(const int32_t *ids, const float *weights, int32_t A, int32_t *all_ids, float *all_weights)
{
    const int32_t all = A + N_SHARED;
    for (int t = 0; t < T; t++)
        for (int32_t a = 0; a < all; a++) {
            all_ids[t * all + a] = a < A ? ids[t * A + a] : E + a - A;
            all_weights[t * all + a] = a < A ? weights[t * A + a] : 1.0f;
        }
}

/* DeepSeek-V3's shared experts in the same call: the layer holds them as experts E and E+1, the routing knows only the
 * first E. */
static void shared_experts_as_extra_experts(void **state)
{
    (void)state;
    enum { A = 2, ALL = A + N_SHARED };
    const char *name = "layer_deepseek_v3";
    struct buffers buffers = {BUFFERS_GUARD_BEFORE, NULL};
    struct witness_layer witness = layer_read(name);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    const void *x = golden_data(witness.weights, "x", "BF16", T * H);

    moe4_layer *routed = layer_open(context, &witness.config, witness.experts);
    moe4_batch batch = batch_of(&buffers, context, routed, x, A);
    moe4_result result = MOE4_RESULT_INIT;
    float y[T * H], logits[T * E], weights[T * A], all_weights[T * ALL];
    int32_t ids[T * A], all_ids[T * ALL];
    result.y = y;
    result.y_dtype = MOE4_DTYPE_F32;
    result.logits = logits;
    must(context, name, moe4_forward_router(context, routed, &batch, NULL, &result));
    moe4_layer_destroy(routed);

    moe4_logits given = MOE4_LOGITS_INIT;
    given.logits = logits;
    must(context, name, moe4_route(context, &witness.config.routing, E, T, &given, NULL, ids, weights));
    append_shared(ids, weights, A, all_ids, all_weights);

    moe4_layer_config config = witness.config;
    config.n_experts = N_STORED;
    config.routing = (moe4_routing)MOE4_ROUTING_INIT;
    config.router = (moe4_router){0};
    moe4_layer *layer = layer_open(context, &config, witness.experts);
    batch = batch_of(&buffers, context, layer, x, ALL);
    moe4_topk topk = MOE4_TOPK_INIT;
    topk.top_k = ALL;
    topk.ids = all_ids;
    topk.weights = all_weights;
    result.logits = NULL;
    must(context, name, moe4_forward_experts(context, layer, &batch, &topk, &result));
    expect_close(&witness, name, "output_with_shared", y);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    layer_close(&witness);
    buffers_release(&buffers);
}

/* ---- A layer that changes nothing ---- */

/* H = I, both matrices the identity, no gate, one expert with weight 1. */
static moe4_layer *identity_layer(moe4_context *context, int64_t size)
{
    struct buffers buffers = {BUFFERS_GUARD_BEFORE, NULL};
    uint8_t *codes = buffers_allocate(&buffers, (size_t)(size * size / 2));
    uint8_t *scales = buffers_allocate(&buffers, (size_t)(size * size / 32));
    memset(codes, 0, (size_t)(size * size / 2));
    memset(scales, 127, (size_t)(size * size / 32));
    for (int64_t row = 0; row < size; row++) set_code(codes + row * size / 2, row, 2);
    const moe4_matrix identity = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    const moe4_expert expert = {identity, identity};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = size;
    config.n_experts = 1;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.activation = MOE4_ACTIVATION_IDENTITY;
    moe4_layer *layer = layer_open(context, &config, &expert);
    buffers_release(&buffers);
    return layer;
}

/* Runs T rows of 32 elements through it. */
static void pass(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, const moe4_result *result)
{
    struct buffers buffers = {BUFFERS_GUARD_BEFORE, NULL};
    const int64_t n = batch->n_tokens;
    int32_t *ids = buffers_allocate(&buffers, (size_t)n * sizeof *ids);
    float *weights = buffers_allocate(&buffers, (size_t)n * sizeof *weights);
    moe4_topk topk = MOE4_TOPK_INIT;
    for (int64_t t = 0; t < n; t++) {
        ids[t] = 0;
        weights[t] = 1.0f;
    }
    topk.top_k = 1;
    topk.ids = ids;
    topk.weights = weights;
    must(context, "identity", moe4_workspace_bytes(context, layer, batch->compute, n, 1, &batch->workspace_bytes));
    batch->workspace = buffers_allocate(&buffers, batch->workspace_bytes);
    must(context, "identity", moe4_forward_experts(context, layer, batch, &topk, result));
    buffers_release(&buffers);
}

/* x in f32 comes out as torch rounds it: to bf16 on the way in, then to the format of y. */
static void inputs_and_outputs_round_as_torch(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    golden_file *file = witness_open("passed");
    const int64_t n = golden_find(file, "x")->shape[0];
    for (int32_t level = 0; level < n_levels; level++) {
        moe4_context *context = context_open(levels[level], 1);
        moe4_layer *layer = identity_layer(context, 32);
        static const struct {
            const char *name, *word;
            moe4_dtype dtype;
        } outputs[] = {
            {"bf16", "BF16", MOE4_DTYPE_BF16}, {"f16", "F16", MOE4_DTYPE_F16}, {"f32", "F32", MOE4_DTYPE_F32}};
        for (int i = 0; i < 3; i++) {
            const size_t bytes = (size_t)(n * 32) * dtype_bytes(outputs[i].dtype);
            void *y = malloc(bytes);
            moe4_batch batch = MOE4_BATCH_INIT;
            moe4_result result = MOE4_RESULT_INIT;
            batch.n_tokens = n;
            batch.x = golden_data(file, "x", "F32", n * 32);
            batch.x_dtype = MOE4_DTYPE_F32;
            result.y = y;
            result.y_dtype = outputs[i].dtype;
            pass(context, layer, &batch, &result);
            assert_memory_equal(y, golden_data(file, outputs[i].name, outputs[i].word, n * 32), bytes);
            free(y);
        }
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
    golden_file_close(file);
}

/* In mxfp8 compute x and then the intermediate are quantised: what torchao makes of x twice.  A sum starts at +0, so
 * that no -0 comes out of one. */
static void mxfp8_quantised_as_torchao(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    golden_file *file = witness_open("mxfp8");
    const int64_t n = golden_find(file, "x")->shape[0];
    uint8_t *codes = malloc((size_t)n * 32), *scales = malloc((size_t)n);
    float *y = malloc((size_t)n * 32 * sizeof *y);
    for (int32_t level = 0; level < n_levels; level++)
        for (int quantised = 0; quantised < 2; quantised++) { /* by us; by the witness */
            moe4_context *context = context_open(levels[level], 1);
            moe4_layer *layer = identity_layer(context, 32);
            moe4_batch batch = MOE4_BATCH_INIT;
            moe4_result result = MOE4_RESULT_INIT;
            batch.n_tokens = n;
            batch.compute = MOE4_COMPUTE_MXFP8;
            batch.x = quantised ? golden_data(file, "codes", "U8", n * 32) : golden_data(file, "x", "BF16", n * 32);
            batch.x_dtype = quantised ? MOE4_DTYPE_F8_E4M3 : MOE4_DTYPE_BF16;
            batch.x_scale = quantised ? golden_data(file, "scales", "U8", n) : NULL;
            result.y = y;
            result.y_dtype = MOE4_DTYPE_F32;
            result.intermediate = codes;
            result.intermediate_scale = scales;
            pass(context, layer, &batch, &result);
            assert_memory_equal(scales, golden_data(file, "again_scales", "U8", n), (size_t)n);
            assert_memory_equal(codes, golden_data(file, "again_codes", "U8", n * 32), (size_t)n * 32);
            assert_memory_equal(y, golden_data(file, "passed", "F32", n * 32), (size_t)n * 32 * sizeof *y);
            moe4_layer_destroy(layer);
            moe4_context_destroy(context);
        }
    free(y);
    free(scales);
    free(codes);
    golden_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_layers),
        cmocka_unit_test(shared_experts_as_extra_experts),
        cmocka_unit_test(inputs_and_outputs_round_as_torch),
        cmocka_unit_test(mxfp8_quantised_as_torchao),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
