/* Every layout, as tests/data/families/generate.py wrote it: each byte of each expert against the formula it comes
 * from, and what the config says of router and activation. */
#include "io_helpers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "io/layer_reader.h"

enum { E = 4, A = 2, WIDTH = 64, I = 32, LATENT = 32, VOCAB = 10 };

/* ---- The formulas ------------------------------------------------------------------------------------------------ */

enum { GATE, UP, DOWN };

static int code_at(int e, int m, int r, int k)
{
    return (7 * e + 5 * m + 3 * r + k + k / 32) % 16;
}

static int scale_at(int e, int m, int r, int b)
{
    return 100 + (17 * e + 31 * m + 5 * r + 3 * b) % 50;
}

static float bias_at(int e, int m, int r)
{
    return (float)(e - m + r % 8) / 4.0f;
}

static float router_at(int e, int h)
{
    return (float)((e + 3 * h) % 17 - 8) / 8.0f;
}

static float selection_at(int e)
{
    return (float)(e - 2) / 16.0f;
}

/* ---- The layouts ------------------------------------------------------------------------------------------------- */

enum { NO_BIAS = 0, LOGIT_BIAS = 1, SELECTION_BIAS = 2 };

static const struct layout {
    const char *path;
    int32_t layer;
    const char *family, *layout;
    int64_t H;
    moe4_gate_up gate_up;
    moe4_activation activation;
    float alpha, beta, limit; /* 0 = absent */
    moe4_routing_method method;
    int32_t n_group, topk_group;
    float scaling_factor;
    int router_bias, expert_bias;
} layouts[] = {
    {"openai", 1, "gpt-oss", "gpt-oss original", WIDTH, MOE4_GATE_UP_INTERLEAVED, MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1,
     7, MOE4_ROUTING_RENORMALIZE, 0, 0, 0, LOGIT_BIAS, 1},
    {"modelopt_stacked", 1, "gpt-oss", "modelopt, gpt-oss names", WIDTH, MOE4_GATE_UP_INTERLEAVED,
     MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1, 7, MOE4_ROUTING_RENORMALIZE, 0, 0, 0, LOGIT_BIAS, 1},
    {"mlx", 1, "gpt-oss", "MLX mxfp4", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1, 7,
     MOE4_ROUTING_RENORMALIZE, 0, 0, 0, LOGIT_BIAS, 1},
    {"qwen3", 1, "Qwen3 MoE", "compressed-tensors mxfp4-pack-quantized", WIDTH, MOE4_GATE_UP_GATE_FIRST,
     MOE4_ACTIVATION_SILU, 0, 0, 0, MOE4_ROUTING_RENORMALIZE, 0, 0, 0, NO_BIAS, 0},
    {"ling", 1, "Ling 2", "compressed-tensors mxfp4-pack-quantized", WIDTH, MOE4_GATE_UP_GATE_FIRST,
     MOE4_ACTIVATION_SILU, 0, 0, 0, MOE4_ROUTING_DEEPSEEK_V3, 2, 1, 2.5f, SELECTION_BIAS, 0},
    {"deepseek_v3", 1, "DeepSeek-V3", "compressed-tensors mxfp4-pack-quantized", WIDTH, MOE4_GATE_UP_GATE_FIRST,
     MOE4_ACTIVATION_SILU, 0, 0, 0, MOE4_ROUTING_DEEPSEEK_V3, 2, 2, 2.5f, SELECTION_BIAS, 0},
    {"minimax_m3", 1, "MiniMax-M3", "compressed-tensors mxfp4-pack-quantized", WIDTH, MOE4_GATE_UP_GATE_FIRST,
     MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1, 7, MOE4_ROUTING_MINIMAX2, 0, 0, 2, SELECTION_BIAS, 0},
    {"kimi_k3", 1, "Kimi-K3", "compressed-tensors mxfp4-pack-quantized", LATENT, MOE4_GATE_UP_GATE_FIRST,
     MOE4_ACTIVATION_SITU, 4, 25, 0, MOE4_ROUTING_MINIMAX2, 0, 0, 2.5f, SELECTION_BIAS, 0},
    {"deepseek_v4", 0, "DeepSeek-V4", "DeepSeek-V4 released", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0,
     0, 10, MOE4_ROUTING_HASH, 0, 0, 1.5f, NO_BIAS, 0},
    {"deepseek_v4", 1, "DeepSeek-V4", "DeepSeek-V4 released", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0,
     0, 10, MOE4_ROUTING_SQRT_SOFTPLUS, 0, 0, 1.5f, SELECTION_BIAS, 0},
    {"deepseek_v4", 2, "DeepSeek-V4", "DeepSeek-V4 released", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0,
     0, 10, MOE4_ROUTING_SQRT_SOFTPLUS, 0, 0, 1.5f, SELECTION_BIAS, 0},
    {"deepseek_v41", 1, "DeepSeek-V4.1", "DeepSeek-V4 released", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU,
     0, 0, 10, MOE4_ROUTING_SQRT_SOFTPLUS, 0, 0, 1.5f, SELECTION_BIAS, 0},
    {"quark", 1, "Qwen3 MoE", "AMD Quark", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 0,
     MOE4_ROUTING_RENORMALIZE, 0, 0, 0, NO_BIAS, 0},
    {"modelopt", 1, "Qwen3 MoE", "modelopt", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 0,
     MOE4_ROUTING_RENORMALIZE, 0, 0, 0, NO_BIAS, 0},
    {"gguf/gpt-oss.gguf", 1, "gpt-oss", "GGUF", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1,
     7, MOE4_ROUTING_RENORMALIZE, 0, 0, 0, LOGIT_BIAS, 1},
    {"gguf/deepseek2.gguf", 1, "DeepSeek-V3", "GGUF", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 0,
     MOE4_ROUTING_DEEPSEEK_V3, 2, 1, 2.5f, SELECTION_BIAS, 0},
    {"gguf/deepseek4.gguf", 0, "DeepSeek-V4", "GGUF", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 0,
     MOE4_ROUTING_HASH, 0, 0, 1.5f, NO_BIAS, 0},
    {"gguf/deepseek4.gguf", 1, "DeepSeek-V4", "GGUF", WIDTH, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 10,
     MOE4_ROUTING_SQRT_SOFTPLUS, 0, 0, 1.5f, SELECTION_BIAS, 0},
    {"gguf/kimi-k3-00001-of-00002.gguf", 1, "Kimi-K3", "GGUF", LATENT, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SITU, 4,
     25, 0, MOE4_ROUTING_MINIMAX2, 0, 0, 2.5f, SELECTION_BIAS, 0},
    {"gguf/kimi-k3-00002-of-00002.gguf", 1, "Kimi-K3", "GGUF", LATENT, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SITU, 4,
     25, 0, MOE4_ROUTING_MINIMAX2, 0, 0, 2.5f, SELECTION_BIAS, 0},
};
enum { N_LAYOUTS = sizeof layouts / sizeof *layouts };

static moe4_checkpoint *open_family(struct fixture *fixture, const char *name)
{
    char path[512];
    moe4_checkpoint *checkpoint;
    snprintf(path, sizeof path, "%s/families/%s", TEST_DATA, name);
    if (moe4_checkpoint_open(&fixture->test.context, path, &checkpoint) != MOE4_OK)
        fail_msg("%s: %s", name, fixture->test.context.message);
    return checkpoint;
}

/* ---- Weights ----------------------------------------------------------------------------------------------------- */

/* Row `row` of a matrix [rows, K] against row r of m. */
static void check_row(const struct layout *layout, const moe4_matrix *matrix, int64_t row, int64_t K, int e, int m,
                      int r)
{
    const uint8_t *codes = matrix->codes + row * K / 2, *scales = matrix->scales + row * K / 32;
    for (int k = 0; k < K; k++) {
        int code = codes[k / 2] >> (k % 2 * 4) & 15;
        if (code != code_at(e, m, r, k) || scales[k / 32] != scale_at(e, m, r, k / 32))
            fail_msg("%s: expert %d, matrix %d, row %d, column %d: code %d, scale %d", layout->path, e, m, r, k, code,
                     scales[k / 32]);
    }
    if (!layout->expert_bias) {
        assert_null(matrix->bias);
        return;
    }
    assert_true(load_f32(matrix->bias, matrix->bias_dtype, row) == bias_at(e, m, r));
}

static void check_expert(const struct layout *layout, int e, const moe4_expert *expert)
{
    int interleaved = layout->gate_up == MOE4_GATE_UP_INTERLEAVED;
    for (int r = 0; r < I; r++)
        for (int m = GATE; m <= UP; m++)
            check_row(layout, &expert->gate_up, interleaved ? 2 * r + m : m * I + r, layout->H, e, m, r);
    for (int r = 0; r < layout->H; r++) check_row(layout, &expert->down, r, I, e, DOWN, r);
}

/* ---- Config ------------------------------------------------------------------------------------------------------ */

static void check_param(const struct layout *layout, const char *name, const moe4_param *param, float value)
{
    if (param->presence != (value == 0.0f ? MOE4_ABSENT : MOE4_SAME) || (value != 0.0f && param->value != value))
        fail_msg("%s: %s is %g, expected %g", layout->path, name, (double)param->value, (double)value);
}

static void check_table(const moe4_routing *routing)
{
    assert_int_equal(routing->vocab_size, VOCAB);
    for (int t = 0; t < VOCAB; t++)
        for (int a = 0; a < A; a++) {
            int index = t * A + a;
            int64_t id = routing->hash_table_dtype == MOE4_DTYPE_I64 ? ((const int64_t *)routing->hash_table)[index]
                                                                     : ((const int32_t *)routing->hash_table)[index];
            assert_int_equal(id, (t + 3 * a) % E);
        }
}

static void check_routing(const struct layout *layout, const moe4_layer_config *config)
{
    const moe4_routing *routing = &config->routing;
    const moe4_router *router = &config->router;
    assert_int_equal(routing->method, layout->method);
    assert_int_equal(routing->top_k, A);
    assert_int_equal(routing->n_group, layout->n_group);
    assert_int_equal(routing->topk_group, layout->topk_group);
    assert_true(routing->scaling_factor == layout->scaling_factor);
    assert_int_equal(router->hidden_size, layout->H == WIDTH ? 0 : WIDTH);
    assert_int_equal(routing->correction_bias != NULL, layout->router_bias == SELECTION_BIAS);
    assert_int_equal(router->bias != NULL, layout->router_bias == LOGIT_BIAS);
    assert_int_equal(routing->hash_table != NULL, layout->method == MOE4_ROUTING_HASH);
    for (int e = 0; e < E; e++) {
        for (int h = 0; h < WIDTH; h++)
            assert_true(load_f32(router->weight, router->weight_dtype, e * WIDTH + h) == router_at(e, h));
        if (router->bias) assert_true(load_f32(router->bias, router->bias_dtype, e) == selection_at(e));
        if (routing->correction_bias)
            assert_true(load_f32(routing->correction_bias, routing->correction_bias_dtype, e) == selection_at(e));
    }
    if (routing->hash_table) check_table(routing);
}

static void check_config(const struct layout *layout, const moe4_layer_config *config)
{
    assert_int_equal(config->n_experts, E);
    assert_int_equal(config->hidden_size, layout->H);
    assert_int_equal(config->intermediate_size, I);
    assert_int_equal(config->gate_up, layout->gate_up);
    assert_int_equal(config->activation, layout->activation);
    check_param(layout, "alpha", &config->alpha, layout->alpha);
    check_param(layout, "beta", &config->beta, layout->beta);
    check_param(layout, "limit", &config->limit, layout->limit);
    check_routing(layout, config);
}

/* The expert as the reader's source copies it, a few bytes at a time, into memory of ours. */
static moe4_expert copied_expert(moe4_context *context, moe4_layer_reader *reader, int32_t e, uint8_t *memory)
{
    enum { MOST = 1000 };
    const moe4_expert_source source = moe4_layer_reader_source(context, reader);
    moe4_expert expert;
    assert_int_equal(source.describe(source.user, e, &expert), MOE4_OK);
    moe4_matrix *matrices[] = {&expert.gate_up, &expert.down};
    for (int part = 0; part < N_MATRICES * N_PARTS; part++) {
        moe4_matrix *matrix = matrices[part / N_PARTS];
        const int64_t n_bytes = reader->plan.part_bytes[part / N_PARTS][part % N_PARTS];
        for (int64_t first = 0; first < n_bytes; first += MOST) {
            const int64_t n = n_bytes - first < MOST ? n_bytes - first : MOST;
            assert_int_equal(source.copy(source.user, e, (moe4_part)part, first, n, memory + first), MOE4_OK);
        }
        if (part % N_PARTS == PART_CODES) matrix->codes = memory;
        if (part % N_PARTS == PART_SCALES) matrix->scales = memory;
        if (part % N_PARTS == PART_BIAS && n_bytes) matrix->bias = memory;
        memory += n_bytes;
    }
    return expert;
}

static void test_layouts(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    for (int i = 0; i < N_LAYOUTS; i++) {
        const struct layout *layout = &layouts[i];
        moe4_checkpoint *checkpoint = open_family(fixture, layout->path);
        moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
        moe4_layer_reader *reader;
        moe4_expert expert;
        assert_int_equal(moe4_checkpoint_describe(checkpoint, &info), MOE4_OK);
        assert_string_equal(info.family, layout->family);
        assert_string_equal(info.layout, layout->layout);
        assert_int_equal(info.n_model_layers, 2);
        assert_int_equal(info.model_hidden_size, WIDTH);
        if (moe4_layer_reader_open(context, checkpoint, layout->layer, NULL, &reader) != MOE4_OK)
            fail_msg("%s: %s", layout->path, context->message);
        check_config(layout, moe4_layer_reader_config(reader));
        for (int e = 0; e < E; e++) {
            assert_int_equal(moe4_layer_reader_read(context, reader, e, &expert), MOE4_OK);
            check_expert(layout, e, &expert);
            if (!moe4_layer_reader_source(context, reader).copy) continue; /* GGUF */
            uint8_t *memory = malloc((size_t)reader->expert_bytes);
            expert = copied_expert(context, reader, e, memory);
            check_expert(layout, e, &expert);
            free(memory);
        }
        moe4_layer_reader_close(reader);
        moe4_checkpoint_close(checkpoint);
    }
}

/* A range of experts reads those and no others. */
static void test_local_ranges(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.first_expert = 2;
    options.n_experts = 2;
    for (int i = 0; i < N_LAYOUTS; i++) {
        moe4_checkpoint *checkpoint = open_family(fixture, layouts[i].path);
        moe4_layer_reader *reader;
        moe4_expert expert;
        assert_int_equal(moe4_layer_reader_open(context, checkpoint, layouts[i].layer, &options, &reader), MOE4_OK);
        for (int l = 1; l >= 0; l--) {
            assert_int_equal(moe4_layer_reader_read(context, reader, l, &expert), MOE4_OK);
            check_expert(&layouts[i], 2 + l, &expert);
        }
        moe4_layer_reader_close(reader);
        moe4_checkpoint_close(checkpoint);
    }
}

/* A router that is only checked: the same words and types, no pointers. */
static void test_skipped_routers(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.router = MOE4_ROUTER_SKIP;
    for (int i = 0; i < N_LAYOUTS; i++) {
        moe4_checkpoint *checkpoint = open_family(fixture, layouts[i].path);
        moe4_layer_reader *whole, *skipping;
        assert_int_equal(moe4_layer_reader_open(context, checkpoint, layouts[i].layer, NULL, &whole), MOE4_OK);
        assert_int_equal(moe4_layer_reader_open(context, checkpoint, layouts[i].layer, &options, &skipping), MOE4_OK);
        const moe4_layer_config *read = moe4_layer_reader_config(whole), *checked = moe4_layer_reader_config(skipping);
        assert_null(checked->router.weight);
        assert_null(checked->router.bias);
        assert_null(checked->routing.correction_bias);
        assert_null(checked->routing.hash_table);
        assert_int_not_equal(checked->router.weight_dtype, MOE4_DTYPE_NONE);
        assert_int_equal(checked->router.weight_dtype, read->router.weight_dtype);
        assert_int_equal(checked->router.bias_dtype, read->router.bias_dtype);
        assert_int_equal(checked->routing.correction_bias_dtype, read->routing.correction_bias_dtype);
        assert_int_equal(checked->routing.method, read->routing.method);
        assert_int_equal(checked->n_local_experts, E);
        moe4_layer_reader_close(whole);
        moe4_layer_reader_close(skipping);
        moe4_checkpoint_close(checkpoint);
    }
}

/* Keys tell layers and ranges apart, and are the same twice. */
static void test_keys(void **state)
{
    struct fixture *fixture = *state;
    char keys[3][33];
    static const int32_t layers[] = {1, 1, 2};
    moe4_checkpoint *checkpoint = open_family(fixture, "deepseek_v4");
    for (int i = 0; i < 3; i++) {
        moe4_layer_reader *reader;
        assert_int_equal(moe4_layer_reader_open(&fixture->test.context, checkpoint, layers[i], NULL, &reader), MOE4_OK);
        assert_int_equal(moe4_layer_reader_key(reader, keys[i]), MOE4_OK);
        moe4_layer_reader_close(reader);
    }
    assert_string_equal(keys[0], keys[1]);
    assert_string_not_equal(keys[0], keys[2]);
    moe4_checkpoint_close(checkpoint);
}

/* ---- What surrounds the routed experts --------------------------------------------------------------------------- */

static void test_roles(void **state)
{
    static const struct {
        const char *path, *tensor;
        moe4_tensor_role role;
        int32_t layer;
    } cases[] = {
        {"kimi_k3", "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale", MOE4_ROLE_EXPERT, 1},
        {"kimi_k3", "language_model.model.layers.1.block_sparse_moe.gate.weight", MOE4_ROLE_ROUTER, 1},
        {"kimi_k3", "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", MOE4_ROLE_ROUTER, 1},
        {"kimi_k3", "language_model.model.layers.1.block_sparse_moe.latent_down_proj.weight", MOE4_ROLE_LATENT, 1},
        {"kimi_k3", "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight",
         MOE4_ROLE_SHARED_EXPERT, 1},
        {"deepseek_v4", "layers.0.ffn.gate.tid2eid", MOE4_ROLE_ROUTER, 0},
        {"deepseek_v4", "mtp.0.ffn.shared_experts.w1.weight", MOE4_ROLE_SHARED_EXPERT, 2},
        {"quark", "model.layers.0.mlp.experts.0.up_proj.weight", MOE4_ROLE_EXPERT, 0},
        {"quark", "model.layers.1.mlp.experts.0.up_proj.input_scale", MOE4_ROLE_UNUSED, 1},
        {"openai", "block.1.mlp.norm.scale", MOE4_ROLE_OTHER, -1},
        {"openai", "block.1.mlp.gate.bias", MOE4_ROLE_ROUTER, 1},
        {"gguf/deepseek2.gguf", "blk.1.ffn_up_shexp.weight", MOE4_ROLE_SHARED_EXPERT, 1},
        {"gguf/deepseek2.gguf", "blk.1.ffn_gate_up_exps.weight", MOE4_ROLE_EXPERT, 1},
        {"gguf/kimi-k3-00001-of-00002.gguf", "blk.1.ffn_latent_down.weight", MOE4_ROLE_LATENT, 1},
        {"gguf/gpt-oss.gguf", "blk.0.attn_norm.weight", MOE4_ROLE_OTHER, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_checkpoint *checkpoint = open_family(*state, cases[i].path);
        const moe4_tensor *tensor = moe4_tensors_find(moe4_checkpoint_tensors(checkpoint), cases[i].tensor);
        int32_t layer;
        assert_non_null(tensor);
        assert_int_equal(moe4_checkpoint_role(checkpoint, tensor, &layer), cases[i].role);
        assert_int_equal(layer, cases[i].layer);
        assert_int_equal(moe4_checkpoint_role(checkpoint, tensor, NULL), cases[i].role);
        moe4_checkpoint_close(checkpoint);
    }
}

static void test_counts(void **state)
{
    static const struct {
        const char *path;
        int32_t n_moe, n_extra, n_other, n_shared;
    } cases[] = {
        {"kimi_k3", 1, 0, 0, 2},      {"deepseek_v4", 3, 1, 0, 1},         {"quark", 1, 0, 1, 0},
        {"deepseek_v41", 1, 1, 0, 1}, {"gguf/deepseek2.gguf", 1, 0, 0, 1}, {"gguf/deepseek4.gguf", 2, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_checkpoint *checkpoint = open_family(*state, cases[i].path);
        moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
        assert_int_equal(moe4_checkpoint_describe(checkpoint, &info), MOE4_OK);
        assert_int_equal(info.n_moe_layers, cases[i].n_moe);
        assert_int_equal(info.n_extra_layers, cases[i].n_extra);
        assert_int_equal(info.n_other_layers, cases[i].n_other);
        assert_int_equal(info.n_shared_experts, cases[i].n_shared);
        moe4_checkpoint_close(checkpoint);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_layouts),         FILE_TEST(test_local_ranges), FILE_TEST(test_keys),
        FILE_TEST(test_skipped_routers), FILE_TEST(test_roles),        FILE_TEST(test_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
