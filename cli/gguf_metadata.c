#include "gguf_metadata.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "gguf_output.h"
#include "memory.h"
#include "message.h"
#include "words.h"

static const struct {
    const char *family, *word;
} architectures[] = {
    {"gpt-oss", "gpt-oss"},    {"DeepSeek-V4", "deepseek4"}, {"DeepSeek-V3", "deepseek2"},
    {"Kimi-K2", "deepseek2"},  {"Kimi-K3", "kimi-k3"},       {"Kimi-Linear", "kimi-linear"},
    {"Qwen3 MoE", "qwen3moe"}, {"Qwen3-Next", "qwen3next"},  {"Qwen3.5 MoE", "qwen35moe"},
    {"GLM-4 MoE", "glm4moe"},  {"GLM-5", "glm-dsa"},         {"MiniMax-M2", "minimax-m2"},
    {"Ling", "bailingmoe"},    {"Ling 2", "bailingmoe2"},    {"Kimi", "kimi-linear"},
    {"MiniMax", "minimax-m2"},
};

const char *gguf_architecture(const char *family)
{
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; ++i)
        if (!strcmp(architectures[i].family, family)) return architectures[i].word;
    return NULL;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

static moe4_gguf_value *value_add(struct gguf_metadata *metadata, const char *key, moe4_gguf_type type)
{
    int32_t i = metadata->n_values++;
    snprintf(metadata->keys[i], sizeof metadata->keys[i], "%s", key);
    metadata->values[i] = (moe4_gguf_value){.key = metadata->keys[i], .type = type};
    return &metadata->values[i];
}

/* The same with a key of the architecture. */
static moe4_gguf_value *value_of_model(struct gguf_metadata *metadata, const char *key, moe4_gguf_type type)
{
    char whole[sizeof metadata->keys[0]];
    snprintf(whole, sizeof whole, "%s.%s", metadata->architecture, key);
    return value_add(metadata, whole, type);
}

static void put_integer(struct gguf_metadata *metadata, const char *key, int64_t value)
{
    value_of_model(metadata, key, MOE4_GGUF_U32)->u32 = (uint32_t)value;
}

static void put_real(struct gguf_metadata *metadata, const char *key, float value)
{
    value_of_model(metadata, key, MOE4_GGUF_F32)->f32 = value;
}

void gguf_metadata_text(struct gguf_metadata *metadata, const char *key, const char *text)
{
    value_add(metadata, key, MOE4_GGUF_STRING)->text = text;
}

/* ---- The model --------------------------------------------------------------------------------------------------- */

/* expert_gating_func of a routing method, 0 where it has none; *normalised is expert_weights_norm. */
static uint32_t gating_of(moe4_routing_method method, uint32_t *normalised)
{
    *normalised = method != MOE4_ROUTING_DEFAULT && method != MOE4_ROUTING_SIGMOID;
    switch (method) {
    case MOE4_ROUTING_DEFAULT:
    case MOE4_ROUTING_RENORMALIZE: return 1;
    case MOE4_ROUTING_DEEPSEEK_V3:
    case MOE4_ROUTING_MINIMAX2:
    case MOE4_ROUTING_SIGMOID_RENORM:
    case MOE4_ROUTING_SIGMOID: return 2;
    case MOE4_ROUTING_HASH:
    case MOE4_ROUTING_SQRT_SOFTPLUS: return 4;
    default: return 0;
    }
}

static int put_routing(struct gguf_metadata *metadata, const moe4_routing *routing)
{
    uint32_t normalised, gating = gating_of(routing->method, &normalised);
    if (!gating) return fail("routing %s: GGUF has no word for it", routing_word(routing->method));
    put_integer(metadata, "expert_used_count", routing->top_k);
    put_integer(metadata, "expert_gating_func", gating);
    value_of_model(metadata, "expert_weights_norm", MOE4_GGUF_BOOL)->u32 = normalised;
    if (routing->scaling_factor != 0) put_real(metadata, "expert_weights_scale", routing->scaling_factor);
    if (routing->n_group) {
        put_integer(metadata, "expert_group_count", routing->n_group);
        put_integer(metadata, "expert_group_used_count", routing->topk_group);
    }
    return EXIT_OK;
}

static void put_activation(struct gguf_metadata *metadata, const moe4_layer_config *config)
{
    if (config->activation != MOE4_ACTIVATION_SITU) return;
    put_real(metadata, "activation.situ_beta", config->alpha.value);
    if (config->beta.presence != MOE4_ABSENT) put_real(metadata, "activation.situ_linear_beta", config->beta.value);
}

/* What the architecture's name says of activations. */
static void imply_activation(struct gguf_metadata *metadata)
{
    moe4_layer_config *implied = &metadata->implied;
    if (!strcmp(metadata->architecture, "gpt-oss")) {
        implied->activation = MOE4_ACTIVATION_SWIGLU_OAI;
        implied->alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
        implied->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
        implied->limit = (moe4_param){MOE4_SAME, 7.0f, NULL};
    } else if (implied->activation != MOE4_ACTIVATION_SITU) {
        implied->activation = MOE4_ACTIVATION_SILU;
        implied->alpha = implied->beta = (moe4_param){.presence = MOE4_ABSENT};
    }
}

/* As layers are read again when all is written, but before anything is. */
static int check_implied(const struct gguf_metadata *metadata, const moe4_layer_config *config, int32_t layer)
{
    moe4_layer_config implied = metadata->implied;
    uint32_t normalised[2];
    if (implied.activation == MOE4_ACTIVATION_SILU && layer < metadata->n_layers) implied.limit = config->limit;
    if (gating_of(config->routing.method, &normalised[0]) == gating_of(implied.routing.method, &normalised[1]) &&
        normalised[0] == normalised[1])
        implied.routing.method = config->routing.method;
    const char *what = layer_config_difference(config, &implied);
    if (!what) return EXIT_OK;
    return fail("layer %d: %s would be lost: GGUF's %s implies another", layer, what, metadata->architecture);
}

int gguf_metadata_begin(struct gguf_metadata *metadata, const moe4_checkpoint_info *info,
                        const moe4_layer_config *config)
{
    *metadata = (struct gguf_metadata){.architecture = gguf_architecture(info->family), .implied = *config};
    if (!metadata->architecture)
        return fail("model %s: GGUF has no architecture for it that is known here", info->family);
    imply_activation(metadata);
    metadata->n_layers = info->n_model_layers + info->n_extra_layers;
    gguf_metadata_text(metadata, "general.architecture", metadata->architecture);
    gguf_metadata_text(metadata, "general.name", info->family);
    gguf_metadata_text(metadata, "moe4.contents", "MoE layers only");
    value_add(metadata, "general.file_type", MOE4_GGUF_U32)->u32 = 38; /* mostly MXFP4 */
    value_add(metadata, "general.quantization_version", MOE4_GGUF_U32)->u32 = 2;
    put_integer(metadata, "block_count", metadata->n_layers);
    if (info->n_extra_layers) put_integer(metadata, "nextn_predict_layers", info->n_extra_layers);
    put_integer(metadata, "embedding_length", info->model_hidden_size);
    if (config->hidden_size != info->model_hidden_size)
        put_integer(metadata, "expert_latent_length", config->hidden_size);
    put_integer(metadata, "expert_count", config->n_experts);
    put_integer(metadata, "expert_feed_forward_length", config->intermediate_size);
    if (info->n_shared_experts) put_integer(metadata, "expert_shared_count", info->n_shared_experts);
    put_activation(metadata, config);
    return put_routing(metadata, &config->routing);
}

/* Limits differ by layer, and layers that choose by hash come first. */
int gguf_metadata_layer(struct gguf_metadata *metadata, const moe4_layer_config *config, int32_t layer)
{
    int has_limit = config->activation == MOE4_ACTIVATION_SILU && config->limit.presence != MOE4_ABSENT;
    int code = check_implied(metadata, config, layer);
    if (config->routing.method == MOE4_ROUTING_HASH && layer >= metadata->n_hash_layers)
        metadata->n_hash_layers = layer + 1;
    if (!code && has_limit && !metadata->limits)
        code = allocate(&metadata->limits, metadata->n_layers, sizeof *metadata->limits, "limits");
    if (!code && has_limit && layer < metadata->n_layers) metadata->limits[layer] = config->limit.value;
    return code;
}

void gguf_metadata_end(struct gguf_metadata *metadata)
{
    if (metadata->n_hash_layers) put_integer(metadata, "hash_layer_count", metadata->n_hash_layers);
    if (!metadata->limits) return;
    moe4_gguf_value *value = value_of_model(metadata, "swiglu_clamp_exp", MOE4_GGUF_F32_ARRAY);
    value->array = metadata->limits;
    value->n_elements = metadata->n_layers;
}

void gguf_metadata_release(struct gguf_metadata *metadata)
{
    free(metadata->limits);
    metadata->limits = NULL;
}
