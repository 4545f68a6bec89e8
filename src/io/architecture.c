/* What config.json says of a model, whoever quantised it: one row a model_type for what differs, one list of keys for
 * what is only spelled differently. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/dims.h"
#include "io/routing_choice.h"

static const struct router_names router_of_gate = {
    .weight = "gate.weight",
    .selection_bias = {"gate.e_score_correction_bias", "e_score_correction_bias", "gate.expert_bias", "expert_bias"},
};
static const struct router_names router_of_gpt_oss = {.weight = "router.weight", .bias = "router.bias"};
static const struct router_names router_of_deepseek_v4 = {
    .weight = "gate.weight",
    .selection_bias = {"gate.bias", "gate.e_score_correction_bias"},
    .hash_table = {"gate.tid2eid"},
};

static const char intermediate[] = "intermediate_size", moe_intermediate[] = "moe_intermediate_size";

/* What a config may leave out, and where models differ. */
static const struct architecture {
    const char *model_type, *name;
    const char *intermediate_key; /* of the experts' size */
    const char *activation;       /* where hidden_act is absent; NULL = it must be there */
    enum score score;
    int renormalize;
    const struct router_names *router;
} architectures[] = {
    {"gpt_oss", "gpt-oss", intermediate, "gpt-oss", SCORE_SOFTMAX, RENORMALIZE_YES, &router_of_gpt_oss},
    {"kimi_k3", "Kimi-K3", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_YES, &router_of_gate},
    {"kimi_linear", "Kimi-Linear", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_YES, &router_of_gate},
    {"kimi_k2", "Kimi-K2", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_YES, &router_of_gate},
    {"qwen2_moe", "Qwen2 MoE", moe_intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_UNSAID, &router_of_gate},
    {"qwen3_moe", "Qwen3 MoE", moe_intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_UNSAID, &router_of_gate},
    {"qwen3_next", "Qwen3-Next", moe_intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_YES, &router_of_gate},
    {"qwen3_vl_moe", "Qwen3-VL MoE", moe_intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_YES, &router_of_gate},
    {"qwen3_5_moe", "Qwen3.5 MoE", moe_intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_YES, &router_of_gate},
    {"deepseek_v3", "DeepSeek-V3", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"deepseek_v32", "DeepSeek-V3.2", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"deepseek_v4", "DeepSeek-V4", moe_intermediate, "silu", SCORE_SQRT_SOFTPLUS, RENORMALIZE_YES,
     &router_of_deepseek_v4},
    {"deepseek_v41", "DeepSeek-V4.1", moe_intermediate, "silu", SCORE_SQRT_SOFTPLUS, RENORMALIZE_YES,
     &router_of_deepseek_v4},
    {"glm4_moe", "GLM-4 MoE", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"glm_moe_dsa", "GLM-5", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"minimax_m2", "MiniMax-M2", intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_YES, &router_of_gate},
    {"minimax_m3", "MiniMax-M3", intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_YES, &router_of_gate},
    {"bailing_moe", "Ling", moe_intermediate, NULL, SCORE_UNSAID, RENORMALIZE_UNSAID, &router_of_gate},
    {"bailing_moe_v2", "Ling 2", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"bailing_moe_v3", "Ling 3", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"bailing_moe_linear", "Ling Linear", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"bailing_hybrid", "Ling hybrid", moe_intermediate, NULL, SCORE_SIGMOID, RENORMALIZE_UNSAID, &router_of_gate},
    {"mixtral", "Mixtral", intermediate, NULL, SCORE_SOFTMAX, RENORMALIZE_YES, &router_of_gate},
};
enum { N_ARCHITECTURES = sizeof architectures / sizeof *architectures };

/* ---- Words that several models use ------------------------------------------------------------------------------- */

static const char *const keys_experts[] = {"n_routed_experts", "num_experts", "num_local_experts", NULL};
static const char *const keys_top_k[] = {"num_experts_per_tok", "num_experts_per_token", "experts_per_token",
                                         "moe_topk", NULL};
static const char *const keys_shared[] = {"n_shared_experts", "num_shared_experts", NULL};
static const char *const keys_extra[] = {"num_nextn_predict_layers", "num_mtp_modules", NULL};
static const char *const keys_latent[] = {"routed_expert_hidden_size", "moe_latent_size", NULL};
static const char *const keys_group[] = {"n_group", "num_expert_group", NULL};
static const char *const keys_topk_group[] = {"topk_group", NULL};
static const char *const keys_score[] = {"scoring_func", "score_function", "moe_router_activation_func", NULL};
static const char *const keys_renormalize[] = {"norm_topk_prob", "moe_renormalize", NULL};
static const char *const keys_has_bias[] = {"use_routing_bias", "moe_router_enable_expert_bias", NULL};
static const char *const keys_activation[] = {"hidden_act", "hidden_activation", NULL};

/* ---- Sizes ------------------------------------------------------------------------------------------------------- */

static moe4_status read_sizes(const struct config *config, const struct architecture *architecture, struct model *model)
{
    static const char *const keys_vocab[] = {"vocab_size", NULL};
    moe4_layer_config *layer = &model->layer;
    int64_t n_layers = 0, n_experts = 0, n_extra = 0, n_shared = 0, width = 0;
    moe4_status status = config_integer(config, "num_hidden_layers", 1, MAX_LAYERS, &n_layers);
    if (status == MOE4_OK) status = config_integer_of(config, keys_experts, 1, MAX_EXPERTS, &n_experts);
    if (status == MOE4_OK) status = family_read_dimension(config, "hidden_size", &width);
    if (status == MOE4_OK)
        status = family_read_dimension(config, architecture->intermediate_key, &layer->intermediate_size);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_extra, 0, MAX_LAYERS, &n_extra);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_shared, 0, MAX_EXPERTS, &n_shared);
    if (status == MOE4_OK) status = config_optional_integer(config, keys_vocab, 1, INT32_MAX, &model->vocab_size);
    layer->hidden_size = model->router_size = width;
    const char *latent = config_key(config, keys_latent);
    if (status == MOE4_OK && config_present(config, latent))
        status = family_read_dimension(config, latent, &layer->hidden_size);
    model->n_layers = (int32_t)n_layers;
    model->n_extra_layers = (int32_t)n_extra;
    model->n_shared_experts = (int32_t)n_shared;
    layer->n_experts = (int32_t)n_experts;
    return status;
}

/* ---- Activation -------------------------------------------------------------------------------------------------- */

/* A parameter from the config.  `absent` is its value where the config is silent; 0 = then it is absent, NAN = then it
 * is missing. */
static moe4_status read_param(const struct config *config, const char *key, double absent, moe4_param *param)
{
    const struct json_value *found = config_find(config, key);
    double value = absent;
    if (!found && absent == 0.0) return MOE4_OK;
    if (!found && isnan(absent)) return config_fail(config, MOE4_EFORMAT, key, "a number");
    moe4_status status = config_number(config, key, &value);
    *param = (moe4_param){MOE4_SAME, (float)value, NULL};
    if (status == MOE4_OK && (!(param->value > 0.0f) || isinf(param->value)))
        status = config_fail(config, MOE4_EFORMAT, key, "a finite number above 0");
    return status;
}

/* swiglu_limit may be null: no limit. */
static moe4_status read_limit(const struct config *config, moe4_layer_config *layer)
{
    return config_present(config, "swiglu_limit") ? read_param(config, "swiglu_limit", 0.0, &layer->limit) : MOE4_OK;
}

/* gpt-oss says hidden_act "silu" and means its own; its constants are the model's where the config is silent. */
static moe4_status read_gpt_oss(const struct config *config, moe4_layer_config *layer)
{
    layer->alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
    layer->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
    return read_param(config, "swiglu_limit", 7.0, &layer->limit);
}

static moe4_status read_swiglu_oai(const struct config *config, moe4_layer_config *layer)
{
    layer->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
    moe4_status status = read_param(config, "swiglu_alpha", NAN, &layer->alpha);
    return status == MOE4_OK ? read_param(config, "swiglu_limit", NAN, &layer->limit) : status;
}

static moe4_status read_situ(const struct config *config, moe4_layer_config *layer)
{
    moe4_status status = read_param(config, "activation_situ_beta", NAN, &layer->alpha);
    if (status != MOE4_OK || !config_present(config, "activation_situ_linear_beta")) return status;
    return read_param(config, "activation_situ_linear_beta", NAN, &layer->beta);
}

static const struct activation {
    const char *word;
    moe4_activation activation;
    moe4_status (*read)(const struct config *config, moe4_layer_config *layer); /* its parameters */
} activations[] = {
    {"silu", MOE4_ACTIVATION_SILU, read_limit},
    {"swish", MOE4_ACTIVATION_SILU, read_limit},
    {"swigluoai", MOE4_ACTIVATION_SWIGLU_OAI, read_swiglu_oai},
    {"situ", MOE4_ACTIVATION_SITU, read_situ},
    {"gelu", MOE4_ACTIVATION_GEGLU, read_limit},
    {"gelu_pytorch_tanh", MOE4_ACTIVATION_GEGLU_TANH, read_limit},
    {"gpt-oss", MOE4_ACTIVATION_SWIGLU_OAI, read_gpt_oss},
};

static moe4_status read_activation(const struct config *config, const struct architecture *architecture,
                                   moe4_layer_config *layer)
{
    const char *key = config_key(config, keys_activation), *word = architecture->activation;
    moe4_status status = MOE4_OK;
    if (architecture->router != &router_of_gpt_oss && (!word || config_present(config, key)))
        status = config_string(config, key, &word);
    if (status != MOE4_OK) return status;
    for (size_t i = 0; i < sizeof activations / sizeof *activations; i++) {
        if (strcmp(activations[i].word, word) != 0) continue;
        layer->activation = activations[i].activation;
        return activations[i].read(config, layer);
    }
    return config_fail(config, MOE4_EUNSUPPORTED, key, "silu, swigluoai, situ, gelu or gelu_pytorch_tanh");
}

/* ---- Routing ----------------------------------------------------------------------------------------------------- */

static moe4_status read_score(const struct config *config, enum score *score)
{
    static const char *const words[N_SCORES] = {"softmax", "sigmoid", "sqrtsoftplus"};
    const char *key = config_key(config, keys_score), *word;
    if (!config_present(config, key) && *score != SCORE_UNSAID) return MOE4_OK;
    moe4_status status = config_string(config, key, &word);
    if (status != MOE4_OK) return status;
    for (int i = 0; i < N_SCORES; i++)
        if (strcmp(words[i], word) == 0) {
            *score = (enum score)i;
            return MOE4_OK;
        }
    return config_fail(config, MOE4_EUNSUPPORTED, key, "softmax, sigmoid or sqrtsoftplus");
}

static moe4_status read_bias(const struct config *config, enum score score, struct model *model)
{
    int has_bias = -1;
    moe4_status status = config_truth(config, config_key(config, keys_has_bias), &has_bias);
    if (config_says(config, "topk_method", "noaux_tc")) has_bias = 1;
    model->selection_bias = score == SCORE_SOFTMAX ? NEED_NONE : NEED_OPTIONAL;
    if (has_bias >= 0) model->selection_bias = has_bias ? NEED_REQUIRED : NEED_NONE;
    return status;
}

static moe4_status read_routing(const struct config *config, const struct architecture *architecture,
                                struct model *model)
{
    static const char *const keys_hash[] = {"num_hash_layers", NULL};
    moe4_routing *routing = &model->layer.routing;
    struct routing_words words = {architecture->score, architecture->renormalize, config_key(config, keys_score),
                                  config_key(config, keys_renormalize), config_key(config, keys_group)};
    int64_t E = model->layer.n_experts, top_k = 0, n_hash = 0;
    moe4_status status = config_integer_of(config, keys_top_k, 1, E < MAX_TOP_K ? E : MAX_TOP_K, &top_k);
    routing->top_k = (int32_t)top_k;
    if (status == MOE4_OK) status = read_score(config, &words.score);
    if (status == MOE4_OK) status = config_truth(config, words.renormalize_key, &words.renormalize);
    if (status == MOE4_OK && words.renormalize == RENORMALIZE_UNSAID)
        status = config_fail(config, MOE4_EFORMAT, words.renormalize_key, "true or false");
    if (status == MOE4_OK) status = routing_read_groups(config, keys_group, keys_topk_group, routing);
    if (status == MOE4_OK && routing->n_group > 1 && config_says(config, "topk_method", "group_limited_greedy"))
        status = config_fail(config, MOE4_EUNSUPPORTED, "topk_method", "noaux_tc with groups");
    if (status == MOE4_OK) status = routing_read_scaling(config, "routed_scaling_factor", 1.0, routing);
    if (status == MOE4_OK) status = read_bias(config, words.score, model);
    if (status == MOE4_OK) status = routing_choose(config, &words, model);
    if (status == MOE4_OK && architecture->router->hash_table[0])
        status = config_optional_integer(config, keys_hash, 0, model->n_layers, &n_hash);
    model->n_hash_layers = (int32_t)n_hash;
    return status;
}

/* ---- All of it --------------------------------------------------------------------------------------------------- */

/* Whether a model_type is a row's own, or that of its text part. */
static int is_type(const struct architecture *architecture, const struct json_value *model_type)
{
    size_t length = strlen(architecture->model_type);
    if (!model_type || model_type->type != JSON_STRING) return 0;
    if (strncmp(model_type->text, architecture->model_type, length) != 0) return 0;
    return !model_type->text[length] || strcmp(model_type->text + length, "_text") == 0;
}

/* By model_type: the whole model's, or if that is not known its text part's. */
static moe4_status find_architecture(const struct config *config, const struct architecture **architecture)
{
    static const char key[] = "model_type";
    const struct json_value *const places[] = {config->root, config->section};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (int i = 0; i < N_ARCHITECTURES; i++) {
            *architecture = &architectures[i];
            if (is_type(*architecture, json_member(places[p], key, sizeof key - 1))) return MOE4_OK;
        }
    *architecture = &architectures[0];
    if (family_is_original(config)) return MOE4_OK;
    const char *model_type;
    moe4_status status = config_string(config, key, &model_type);
    if (status != MOE4_OK) return status;
    return config_fail(config, MOE4_EUNSUPPORTED, key, "a model that is supported, such as \"gpt_oss\"");
}

moe4_status architecture_read(const struct config *config, struct model *model)
{
    const struct architecture *architecture;
    moe4_status status = find_architecture(config, &architecture);
    if (status != MOE4_OK) return status;
    int is_gpt_oss = architecture->router == &router_of_gpt_oss;
    *model =
        (struct model){.name = architecture->name, .layer = MOE4_LAYER_CONFIG_INIT, .router = architecture->router};
    model->router_bias = is_gpt_oss ? NEED_REQUIRED : NEED_NONE;
    model->expert_bias = is_gpt_oss ? NEED_REQUIRED : NEED_OPTIONAL;
    status = read_sizes(config, architecture, model);
    if (status == MOE4_OK) status = read_routing(config, architecture, model);
    if (status == MOE4_OK) status = read_activation(config, architecture, &model->layer);
    return status;
}
