#include "known_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "message.h"
#include "words.h"

static const char mlp[] = ".mlp.", sparse[] = ".block_sparse_moe.", gate[] = "gate.";
static const char routed[] = "n_routed_experts", num[] = "num_experts", local[] = "num_local_experts";
static const char moe[] = "moe_intermediate_size", plain[] = "intermediate_size";
static const char correction[] = "gate.e_score_correction_bias";

/* The families of both config.json and GGUF; where they differ in name, both. */
static const struct known_model known_models[] = {
    {"gpt-oss", "gpt_oss", "model.", mlp, NULL, local, plain, "router.", ""},
    {"DeepSeek-V4", "deepseek_v4", "", ".ffn.", "mtp.", routed, moe, gate, "gate.bias"},
    {"DeepSeek-V3", "deepseek_v3", "model.", mlp, NULL, routed, moe, gate, correction},
    {"Kimi-K3", "kimi_k3", "model.", sparse, NULL, num, moe, gate, correction},
    {"Kimi", "kimi_linear", "model.", sparse, NULL, num, moe, gate, correction},
    {"Qwen3 MoE", "qwen3_moe", "model.", mlp, NULL, num, moe, gate, ""},
    {"Qwen3-Next", "qwen3_next", "model.", mlp, NULL, num, moe, gate, ""},
    {"Qwen3.5 MoE", "qwen3_5_moe", "model.", mlp, NULL, num, moe, gate, ""},
    {"GLM-4 MoE", "glm4_moe", "model.", mlp, NULL, routed, moe, gate, correction},
    {"GLM-5", "glm_moe_dsa", "model.", mlp, NULL, routed, moe, gate, correction},
    {"MiniMax", "minimax_m2", "model.", sparse, NULL, local, plain, gate, "e_score_correction_bias"},
    {"Ling", "bailing_moe", "model.", mlp, NULL, num, moe, gate, "gate.expert_bias"},
};

const struct known_model *known_model_find(const char *family)
{
    for (size_t i = 0; i < sizeof known_models / sizeof *known_models; ++i)
        if (!strcmp(known_models[i].family, family)) return &known_models[i];
    return NULL;
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

enum router_part router_part_of(const char *family, const char *name)
{
    static const char *const selection[] = {"exp_probs_b", "e_score_correction_bias", "expert_bias"};
    static const char bias[] = ".bias";
    size_t length = strlen(name);
    if (strstr(name, "tid2eid")) return ROUTER_HASH_TABLE;
    for (int i = 0; i < 3; ++i)
        if (strstr(name, selection[i])) return ROUTER_SELECTION_BIAS;
    if (length < sizeof bias || strcmp(name + length - (sizeof bias - 1), bias) != 0) return ROUTER_WEIGHT;
    return strcmp(family, "DeepSeek-V4") ? ROUTER_BIAS : ROUTER_SELECTION_BIAS;
}

struct block_name known_model_block(const struct known_model *model, int32_t layer, int32_t n_layers)
{
    struct block_name name;
    int is_extra = model->extra_stem && layer >= n_layers;
    snprintf(name.text, sizeof name.text, "%s%s%d%s", model->prefix, is_extra ? model->extra_stem : "layers.",
             is_extra ? layer - n_layers : layer, model->block);
    return name;
}

struct block_name known_model_router(const struct known_model *model, int32_t layer, int32_t n_layers,
                                     enum router_part part)
{
    static const char *const ends[] = {"weight", "bias", "", "tid2eid"};
    struct block_name name = known_model_block(model, layer, n_layers);
    size_t used = strlen(name.text);
    int is_selection = part == ROUTER_SELECTION_BIAS;
    snprintf(name.text + used, sizeof name.text - used, "%s%s", is_selection ? model->selection_bias : model->router,
             ends[part]);
    return name;
}

/* ---- config.json ------------------------------------------------------------------------------------------------- */

static void put_integer(json_t *config, const char *key, int64_t value)
{
    json_object_set_new(config, key, json_integer((json_int_t)value));
}

/* A float as the shortest decimal that reads back as it. */
static void put_real(json_t *config, const char *key, float value)
{
    char text[32];
    for (int digits = 1; digits <= 9; ++digits) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    json_object_set_new(config, key, json_real(strtod(text, NULL)));
}

static void put_sizes(json_t *config, const struct model_facts *facts)
{
    const moe4_layer_config *layer = facts->config;
    put_integer(config, "hidden_size", facts->model_hidden_size);
    put_integer(config, facts->model->intermediate_key, layer->intermediate_size);
    put_integer(config, facts->model->experts_key, layer->n_experts);
    put_integer(config, "num_experts_per_tok", layer->routing.top_k);
    put_integer(config, "num_hidden_layers", facts->n_layers);
    if (layer->hidden_size != facts->model_hidden_size)
        put_integer(config, "routed_expert_hidden_size", layer->hidden_size);
    if (facts->n_extra_layers) put_integer(config, "num_nextn_predict_layers", facts->n_extra_layers);
    if (facts->n_shared_experts) put_integer(config, "n_shared_experts", facts->n_shared_experts);
    if (facts->n_hash_layers) put_integer(config, "num_hash_layers", facts->n_hash_layers);
    if (facts->vocab_size) put_integer(config, "vocab_size", facts->vocab_size);
}

static int put_activation(json_t *config, const moe4_layer_config *layer)
{
    static const char *const words[] = {
        [MOE4_ACTIVATION_SILU] = "silu", [MOE4_ACTIVATION_SWIGLU_OAI] = "swigluoai", [MOE4_ACTIVATION_SITU] = "situ"};
    size_t kind = (size_t)layer->activation;
    const char *word = kind < sizeof words / sizeof *words ? words[kind] : NULL;
    if (!word) return fail("activation %s: config.json has no word for it", activation_word(layer->activation));
    json_object_set_new(config, "hidden_act", json_string(word));
    if (layer->limit.presence) put_real(config, "swiglu_limit", layer->limit.value);
    if (kind == MOE4_ACTIVATION_SWIGLU_OAI) put_real(config, "swiglu_alpha", layer->alpha.value);
    if (kind == MOE4_ACTIVATION_SITU) put_real(config, "activation_situ_beta", layer->alpha.value);
    if (kind == MOE4_ACTIVATION_SITU && layer->beta.presence)
        put_real(config, "activation_situ_linear_beta", layer->beta.value);
    return 0;
}

static int put_routing(json_t *config, const struct model_facts *facts)
{
    static const struct {
        moe4_routing_method method;
        const char *score;
        int normalised;
    } words[] = {{MOE4_ROUTING_DEFAULT, "softmax", 0},     {MOE4_ROUTING_RENORMALIZE, "softmax", 1},
                 {MOE4_ROUTING_DEEPSEEK_V3, "sigmoid", 1}, {MOE4_ROUTING_MINIMAX2, "sigmoid", 1},
                 {MOE4_ROUTING_SIGMOID, "sigmoid", 0},     {MOE4_ROUTING_SIGMOID_RENORM, "sigmoid", 1},
                 {MOE4_ROUTING_HASH, "sqrtsoftplus", 1},   {MOE4_ROUTING_SQRT_SOFTPLUS, "sqrtsoftplus", 1}};
    const moe4_routing *routing = &facts->config->routing;
    size_t i = 0, n = sizeof words / sizeof *words;
    while (i < n && words[i].method != routing->method) ++i;
    if (i == n) return fail("routing %s: config.json has no word for it", routing_word(routing->method));
    json_object_set_new(config, "scoring_func", json_string(words[i].score));
    json_object_set_new(config, "norm_topk_prob", json_boolean(words[i].normalised));
    if (facts->has_selection_bias && !strcmp(words[i].score, "sigmoid"))
        json_object_set_new(config, "topk_method", json_string("noaux_tc"));
    if (routing->scaling_factor != 0) put_real(config, "routed_scaling_factor", routing->scaling_factor);
    if (routing->n_group) {
        put_integer(config, "n_group", routing->n_group);
        put_integer(config, "topk_group", routing->topk_group);
    }
    return 0;
}

/* gpt-oss implies its activation and routing, and says its top_k twice. */
static void put_gpt_oss(json_t *config, const moe4_layer_config *layer)
{
    json_object_set_new(config, "architectures", json_pack("[s]", "GptOssForCausalLM"));
    put_integer(config, "experts_per_token", layer->routing.top_k);
    put_real(config, "swiglu_limit", layer->limit.value);
    json_object_set_new(config, "hidden_act", json_string("silu"));
}

json_t *known_model_config(const struct model_facts *facts)
{
    json_t *config = json_object();
    json_object_set_new(config, "model_type", json_string(facts->model->model_type));
    put_sizes(config, facts);
    if (facts->model == &known_models[0]) {
        put_gpt_oss(config, facts->config);
        return config;
    }
    if (!put_activation(config, facts->config) && !put_routing(config, facts)) return config;
    json_decref(config);
    return NULL;
}
