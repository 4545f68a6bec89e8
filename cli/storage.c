#include "storage.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "message.h"

const char *const storage_words[] = {"gpt-oss", "compressed-tensors", "deepseek-v4", NULL};
const struct storage storages[] = {
    [STORAGE_GPT_OSS] = {1, "_blocks", "_scales", "U8", "U8", "gpt_oss"},
    [STORAGE_COMPRESSED_TENSORS] = {0, "weight_packed", "weight_scale", "U8", "U8", NULL},
    [STORAGE_DEEPSEEK_V4] = {0, "weight", "scale", "I8", "F8_E8M0", "deepseek_v4"},
};

static const char quantization_key[] = "quantization_config", kept_key[] = "moe4_source_quantization_config";

json_t *storage_config_read(const char *folder)
{
    char path[PATH_MAX];
    json_error_t error;
    snprintf(path, sizeof path, "%s/config.json", folder);
    json_t *config = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (config && json_is_object(config)) return config;
    fail("%s: %s", path, config ? "is no object" : error.text);
    json_decref(config);
    return NULL;
}

json_t *storage_config_of_gpt_oss(const struct moe_sizes *sizes)
{
    return json_pack("{s:[s], s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:s}", "architectures", "GptOssForCausalLM",
                     "model_type", "gpt_oss", "hidden_size", (json_int_t)sizes->hidden_size, "intermediate_size",
                     (json_int_t)sizes->intermediate_size, "num_local_experts", (json_int_t)sizes->n_experts,
                     "num_experts_per_tok", (json_int_t)sizes->top_k, "experts_per_token", (json_int_t)sizes->top_k,
                     "num_hidden_layers", (json_int_t)sizes->n_layers, "swiglu_limit", sizes->limit, "hidden_act",
                     "silu");
}

const json_t *config_member(const json_t *config, const char *key)
{
    const json_t *found = json_object_get(config, key);
    return found ? found : json_object_get(json_object_get(config, "text_config"), key);
}

static int is_model(const json_t *config, const char *model_type)
{
    const json_t *const places[] = {config, json_object_get(config, "text_config")};
    for (int i = 0; i < 2; ++i) {
        const char *word = json_string_value(json_object_get(places[i], "model_type"));
        if (word && !strncmp(word, model_type, strlen(model_type))) return 1;
    }
    return 0;
}

static json_t *quantization_config(storage_kind kind)
{
    switch (kind) {
    case STORAGE_GPT_OSS:
        return json_pack("{s:s, s:[s,s,s,s]}", "quant_method", "mxfp4", "modules_to_not_convert",
                         "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head");
    case STORAGE_COMPRESSED_TENSORS:
        return json_pack("{s:s, s:s, s:s, s:[], s:{s:{s:[s], s:s, s:n, s:n, s:{s:i, s:s, s:s, s:i, s:b, s:b, s:s}}}}",
                         "quant_method", "compressed-tensors", "format", "mxfp4-pack-quantized", "quantization_status",
                         "compressed", "ignore", "config_groups", "group_0", "targets", "re:.*\\.experts\\.[0-9]+\\..*",
                         "format", "mxfp4-pack-quantized", "input_activations", "output_activations", "weights",
                         "num_bits", 4, "type", "float", "strategy", "group", "group_size", 32, "symmetric", 1,
                         "dynamic", 0, "scale_dtype", "torch.uint8");
    default:
        return json_pack("{s:s, s:s, s:s, s:[i,i]}", "quant_method", "fp8", "fmt", "e4m3", "scale_fmt", "ue8m0",
                         "weight_block_size", 128, 128);
    }
}

/* Whether a kept quantization_config is one of this layout. */
static int is_of_storage(const json_t *quantization, storage_kind kind)
{
    json_t *ours = quantization_config(kind);
    int same = json_equal(json_object_get(quantization, "quant_method"), json_object_get(ours, "quant_method"));
    json_decref(ours);
    return same;
}

json_t *storage_config(storage_kind kind, const json_t *source)
{
    const char *needed = storages[kind].model_type;
    if (needed && !is_model(source, needed)) {
        const char *word = json_string_value(json_object_get(source, "model_type"));
        fail(
            "model_type \"%s\": the layout %s would lose its activation and router parameters: those of %s are implied",
            word ? word : "none", storage_words[kind], needed);
        return NULL;
    }
    json_t *config = json_deep_copy(source), *old = json_incref(json_object_get(config, quantization_key));
    json_t *kept = json_incref(json_object_get(config, kept_key));
    if (!old) old = json_incref(json_object_get(json_object_get(config, "text_config"), quantization_key));
    json_object_del(json_object_get(config, "text_config"), quantization_key);
    json_object_del(config, kept_key);
    int comes_back = kept && is_of_storage(kept, kind);
    json_object_set_new(config, quantization_key, comes_back ? json_incref(kept) : quantization_config(kind));
    if (!comes_back && old) json_object_set(config, kept_key, kept ? kept : old);
    if (kind == STORAGE_DEEPSEEK_V4) json_object_set_new(config, "expert_dtype", json_string("fp4"));
    json_decref(old);
    json_decref(kept);
    return config;
}

const char *projection_word(const char *block_path, enum projection_role role)
{
    static const char *const words[2][N_PROJECTIONS] = {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}};
    return words[strstr(block_path, ".ffn.") || strstr(block_path, ".block_sparse_moe.")][role];
}
