/* GGUF: what its metadata says of the model, and the names of its tensors. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/dims.h"
#include "io/gguf.h"
#include "io/routing_choice.h"
#include "io/show.h"

/* ---- Metadata as a config ---------------------------------------------------------------------------------------- */

/* A value of the metadata as a node; an array's text is parsed. */
static moe4_status make_node(struct config *config, const struct metadata_pair *pair, const char *key,
                             struct json_value **node)
{
    size_t n_bytes = strlen(pair->value);
    const char *error;
    size_t error_at;
    *node = arena_allocate(&config->nodes, &config->allocator, sizeof **node);
    if (!*node) return context_fail_memory(config->context, "metadata", sizeof **node);
    **node = (struct json_value){.type = pair->token, .key = key, .text = pair->value, .n_bytes = n_bytes};
    if (pair->token != JSON_ARRAY) return MOE4_OK;
    char *text = arena_copy(&config->nodes, &config->allocator, pair->value, n_bytes);
    if (!text) return context_fail_memory(config->context, "metadata", n_bytes + 1);
    moe4_status status = json_tree(&config->nodes, &config->allocator, text, n_bytes, node, &error, &error_at);
    if (status != MOE4_OK) return context_fail(config->context, status, "%s: cannot keep %s", config->path, key);
    (*node)->key = key;
    return MOE4_OK;
}

/* Keys of the architecture lose its name and go into the section. */
static moe4_status add_pairs(struct config *config, const moe4_tensors *tensors, const char *architecture,
                             struct json_value *section)
{
    size_t length = strlen(architecture);
    struct json_value **tail = &config->root->child, **section_tail = &section->child;
    for (size_t i = 0; i < tensors->n_metadata; i++) {
        const struct metadata_pair *pair = &tensors->metadata[i];
        int ours = strncmp(pair->key, architecture, length) == 0 && pair->key[length] == '.';
        struct json_value ***end = ours ? &section_tail : &tail;
        if (!ours && pair->token == JSON_ARRAY) continue; /* a tokenizer's */
        moe4_status status = make_node(config, pair, ours ? pair->key + length + 1 : pair->key, *end);
        if (status != MOE4_OK) return status;
        *end = &(**end)->next;
    }
    return MOE4_OK;
}

moe4_status gguf_config(moe4_context *context, const moe4_tensors *tensors, struct config *config)
{
    static const char key[] = "general.architecture";
    const char *architecture = moe4_tensors_metadata(tensors, key);
    *config = (struct config){
        .context = context, .kind = CONFIG_GGUF, .path = tensors->files[0].path, .allocator = context->allocator};
    if (!architecture)
        return context_fail(context, MOE4_EFORMAT, "%s: %s is missing", show_file(config->path).text, key);
    struct json_value *nodes = arena_allocate(&config->nodes, &config->allocator, 2 * sizeof *nodes);
    moe4_status status = nodes ? MOE4_OK : context_fail_memory(context, "metadata", 2 * sizeof *nodes);
    if (nodes) {
        nodes[0] = nodes[1] = (struct json_value){.type = JSON_OBJECT};
        config->root = &nodes[0];
        config->section = &nodes[1];
        status = add_pairs(config, tensors, architecture, &nodes[1]);
    }
    if (status != MOE4_OK) config_close(config);
    return status;
}

/* ---- The model --------------------------------------------------------------------------------------------------- */

static const struct router_names router = {
    .weight = "ffn_gate_inp.weight",
    .bias = "ffn_gate_inp.bias",
    .selection_bias = {"exp_probs_b.bias", "exp_probs_b", "exp_probs_b.weight"},
    .hash_table = {"ffn_gate_tid2eid.weight", "ffn_gate_tid2eid"},
};

/* How a file names its router's scores. */
enum gating { GATING_UNSAID, GATING_SOFTMAX, GATING_SIGMOID, GATING_SOFTMAX_WEIGHT, GATING_SQRT_SOFTPLUS, N_GATINGS };

/* What files of an architecture leave out. */
static const struct gguf_architecture {
    const char *word; /* general.architecture, or what it begins with */
    const char *name;
    enum gating gating;
    int renormalize;
} architectures[] = {
    {"gpt-oss", "gpt-oss", GATING_SOFTMAX_WEIGHT, RENORMALIZE_YES},
    {"deepseek4", "DeepSeek-V4", GATING_SQRT_SOFTPLUS, RENORMALIZE_YES},
    {"deepseek2", "DeepSeek-V3", GATING_UNSAID, RENORMALIZE_UNSAID},
    {"deepseek", "DeepSeek", GATING_UNSAID, RENORMALIZE_UNSAID},
    {"kimi-k3", "Kimi-K3", GATING_SIGMOID, RENORMALIZE_YES},
    {"kimi", "Kimi", GATING_SIGMOID, RENORMALIZE_YES},
    {"qwen3moe", "Qwen3 MoE", GATING_SOFTMAX, RENORMALIZE_YES},
    {"qwen3next", "Qwen3-Next", GATING_SOFTMAX, RENORMALIZE_YES},
    {"qwen35moe", "Qwen3.5 MoE", GATING_SOFTMAX, RENORMALIZE_YES},
    {"glm4moe", "GLM-4 MoE", GATING_SIGMOID, RENORMALIZE_UNSAID},
    {"glm-dsa", "GLM-5", GATING_SIGMOID, RENORMALIZE_UNSAID},
    {"minimax", "MiniMax", GATING_SIGMOID, RENORMALIZE_YES},
    {"bailingmoe", "Ling", GATING_UNSAID, RENORMALIZE_UNSAID},
};
enum { N_ARCHITECTURES = sizeof architectures / sizeof *architectures };

static int is_gpt_oss(const struct gguf_architecture *architecture)
{
    return architecture == &architectures[0];
}

static moe4_status find_architecture(const struct config *config, const struct gguf_architecture **architecture)
{
    static const char key[] = "general.architecture";
    const char *word;
    moe4_status status = config_string(config, key, &word);
    if (status != MOE4_OK) return status;
    for (int i = 0; i < N_ARCHITECTURES; i++) {
        *architecture = &architectures[i];
        if (strncmp(word, architectures[i].word, strlen(architectures[i].word)) == 0) return MOE4_OK;
    }
    return config_fail(config, MOE4_EUNSUPPORTED, key, "a model that is supported, such as \"gpt-oss\"");
}

static moe4_status read_sizes(const struct config *config, struct model *model)
{
    static const char *const keys_shared[] = {"expert_shared_count", NULL}, *const keys_vocab[] = {"vocab_size", NULL};
    static const char *const keys_extra[] = {"nextn_predict_layers", NULL}, *const keys_hash[] = {"hash_layer_count",
                                                                                                  NULL};
    static const char *const keys_latent[] = {"expert_latent_length", "moe_latent_size", NULL};
    static const char *const keys_intermediate[] = {"expert_feed_forward_length", "feed_forward_length", NULL};
    moe4_layer_config *layer = &model->layer;
    int64_t n_layers = 0, n_experts = 0, n_shared = 0, n_extra = 0, n_hash = 0;
    moe4_status status = config_integer(config, "block_count", 1, MAX_LAYERS, &n_layers);
    if (status == MOE4_OK) status = config_integer(config, "expert_count", 1, MAX_EXPERTS, &n_experts);
    if (status == MOE4_OK) status = family_read_dimension(config, "embedding_length", &model->router_size);
    if (status == MOE4_OK)
        status = family_read_dimension(config, config_key(config, keys_intermediate), &layer->intermediate_size);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_shared, 0, MAX_EXPERTS, &n_shared);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_vocab, 1, INT32_MAX, &model->vocab_size);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_extra, 0, n_layers - 1, &n_extra);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_hash, 0, n_layers, &n_hash);
    const char *latent = config_key(config, keys_latent);
    layer->hidden_size = model->router_size;
    if (status == MOE4_OK && config_present(config, latent))
        status = family_read_dimension(config, latent, &layer->hidden_size);
    model->n_layers = (int32_t)(n_layers - n_extra); /* block_count counts both */
    model->n_extra_layers = (int32_t)n_extra;
    model->n_hash_layers = (int32_t)n_hash;
    model->n_shared_experts = (int32_t)n_shared;
    layer->n_experts = (int32_t)n_experts;
    return status;
}

static moe4_status read_gating(const struct config *config, const struct gguf_architecture *architecture,
                               struct routing_words *words)
{
    static const enum score scores[N_GATINGS] = {SCORE_UNSAID, SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SOFTMAX,
                                                 SCORE_SQRT_SOFTPLUS};
    int64_t gating = architecture->gating;
    words->renormalize = architecture->renormalize;
    moe4_status status = MOE4_OK;
    if (config_present(config, words->score_key) || gating == GATING_UNSAID)
        status = config_integer(config, words->score_key, GATING_SOFTMAX, N_GATINGS - 1, &gating);
    if (status == MOE4_OK) status = config_truth(config, words->renormalize_key, &words->renormalize);
    if (gating == GATING_SOFTMAX_WEIGHT) words->renormalize = RENORMALIZE_YES; /* that is what it means */
    if (status == MOE4_OK && words->renormalize == RENORMALIZE_UNSAID)
        status = config_fail(config, MOE4_EFORMAT, words->renormalize_key, "true or false");
    words->score = scores[gating];
    return status;
}

static moe4_status read_routing(const struct config *config, const struct gguf_architecture *architecture,
                                struct model *model)
{
    static const char *const keys_group[] = {"expert_group_count", NULL};
    static const char *const keys_topk_group[] = {"expert_group_used_count", NULL};
    struct routing_words words = {SCORE_UNSAID, RENORMALIZE_UNSAID, "expert_gating_func", "expert_weights_norm",
                                  keys_group[0]};
    moe4_routing *routing = &model->layer.routing;
    int64_t E = model->layer.n_experts, top_k = 0;
    moe4_status status = config_integer(config, "expert_used_count", 1, E < MAX_TOP_K ? E : MAX_TOP_K, &top_k);
    routing->top_k = (int32_t)top_k;
    if (status == MOE4_OK) status = read_gating(config, architecture, &words);
    if (status == MOE4_OK) status = routing_read_groups(config, keys_group, keys_topk_group, routing);
    if (status == MOE4_OK) status = routing_read_scaling(config, "expert_weights_scale", 0.0, routing);
    model->selection_bias = words.score == SCORE_SOFTMAX ? NEED_NONE : NEED_OPTIONAL;
    return status == MOE4_OK ? routing_choose(config, &words, model) : status;
}

/* ---- Activation -------------------------------------------------------------------------------------------------- */

static moe4_status read_positive(const struct config *config, const char *key, moe4_param *param)
{
    double value = 0.0;
    moe4_status status = config_number(config, key, &value);
    *param = (moe4_param){MOE4_SAME, (float)value, NULL};
    if (status == MOE4_OK && (!(param->value > 0.0f) || isinf(param->value)))
        status = config_fail(config, MOE4_EFORMAT, key, "a finite number above 0");
    return status;
}

/* One limit a layer; 0 and infinity = none. */
static moe4_status read_limits(const struct config *config, const char *key, const struct json_value *array,
                               struct model *model)
{
    int32_t n_all = model->n_layers + model->n_extra_layers, n = 0;
    size_t bytes = (size_t)n_all * sizeof *model->limits;
    model->limits = memory_allocate_zeroed(&config->allocator, bytes);
    if (!model->limits) return context_fail_memory(config->context, "a list of limits", bytes);
    for (const struct json_value *item = array->child; item; item = item->next, n++) {
        double limit = item->type == JSON_NUMBER ? json_double(item->text, item->n_bytes) : -1.0;
        if (limit < 0.0) return config_fail(config, MOE4_EFORMAT, key, "numbers of 0 or more");
        if (n < n_all) model->limits[n] = isfinite((float)limit) ? (float)limit : 0.0f;
    }
    if (n == n_all) return MOE4_OK;
    return config_fail(config, MOE4_EFORMAT, key, "%" PRId32 " elements, one a layer, not %" PRId32, n_all, n);
}

static moe4_status read_activation(const struct config *config, const struct gguf_architecture *architecture,
                                   struct model *model)
{
    static const char limit_key[] = "swiglu_clamp_exp", situ_key[] = "activation.situ_beta",
                      linear_key[] = "activation.situ_linear_beta";
    moe4_layer_config *layer = &model->layer;
    const struct json_value *limit = config_present(config, limit_key);
    moe4_status status = MOE4_OK;
    layer->activation = MOE4_ACTIVATION_SILU;
    if (is_gpt_oss(architecture)) { /* its constants are nowhere in the file */
        layer->activation = MOE4_ACTIVATION_SWIGLU_OAI;
        layer->alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
        layer->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
        layer->limit = (moe4_param){MOE4_SAME, 7.0f, NULL};
    } else if (config_present(config, situ_key)) {
        layer->activation = MOE4_ACTIVATION_SITU;
        status = read_positive(config, situ_key, &layer->alpha);
        if (status == MOE4_OK && config_present(config, linear_key))
            status = read_positive(config, linear_key, &layer->beta);
    } else if (strcmp(architecture->name, "Kimi-K3") == 0) {
        return config_fail(config, MOE4_EFORMAT, situ_key, "a number above 0");
    }
    if (status != MOE4_OK || !limit) return status;
    return limit->type == JSON_ARRAY ? read_limits(config, limit_key, limit, model)
                                     : read_positive(config, limit_key, &layer->limit);
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    const struct gguf_architecture *architecture;
    moe4_status status = find_architecture(config, &architecture);
    if (status != MOE4_OK) return status;
    *model = (struct model){.name = architecture->name, .layer = MOE4_LAYER_CONFIG_INIT, .router = &router};
    model->router_bias = model->expert_bias = is_gpt_oss(architecture) ? NEED_REQUIRED : NEED_OPTIONAL;
    status = read_sizes(config, model);
    if (status == MOE4_OK) status = read_routing(config, architecture, model);
    if (status == MOE4_OK) status = read_activation(config, architecture, model);
    return status;
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

static int is_gguf(const struct config *config)
{
    return config->kind == CONFIG_GGUF;
}

static const struct projections split = {
    .items = {{"ffn_gate_exps.", MATRIX_GATE_UP, HALF_GATE},
              {"ffn_up_exps.", MATRIX_GATE_UP, HALF_UP},
              {"ffn_down_exps.", MATRIX_DOWN, HALF_BOTH}},
    .count = 3,
    .order = MOE4_GATE_UP_GATE_FIRST,
};
static const struct projections fused = {
    .items = {{"ffn_gate_up_exps.", MATRIX_GATE_UP, HALF_BOTH}, {"ffn_down_exps.", MATRIX_DOWN, HALF_BOTH}},
    .count = 2,
    .order = MOE4_GATE_UP_GATE_FIRST,
};

static const struct suffix suffixes[] = {{"weight", PIECE_BLOCKS}, {"bias", PIECE_BIAS}, {"scale", PIECE_REFUSED}};

static const struct words words = {
    .prefixes = {""},
    .stem = "blk.",
    .blocks = {"."},
    .experts = {""},
};

const struct family family_gguf = {
    .layout = "GGUF",
    .recognise = is_gguf,
    .read_config = read_config,
    .storage = STORED_STACKED,
    .words = &words,
    .projections = {&split, &fused},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
