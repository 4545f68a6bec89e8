#include "storage.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "message.h"

const char *const storage_words[] = {"gpt-oss",
                                     "gpt-oss-original",
                                     "compressed-tensors",
                                     "deepseek-v4",
                                     "quark",
                                     "modelopt",
                                     "mlx",
                                     "gguf",
                                     "gguf-fused",
                                     NULL};

static const char *const proj_words[] = {"gate_proj", "up_proj", "down_proj"};
static const char *const fused_words[] = {"gate_up_proj_", "down_proj_"}, *const mlp_words[] = {"mlp1_", "mlp2_"};
static const char *const mlx_words[] = {"gate_proj.", "up_proj.", "down_proj."};

static const struct storage storages[] = {
    [STORAGE_GPT_OSS] = {ARRANGED_FUSED, fused_words, {"blocks", "scales", "bias"}, {"U8", "U8"}, 0, "gpt_oss"},
    [STORAGE_ORIGINAL] =
        {ARRANGED_FUSED, mlp_words, {"weight.blocks", "weight.scales", "bias"}, {"U8", "U8"}, 0, "gpt_oss"},
    [STORAGE_COMPRESSED_TENSORS] =
        {ARRANGED_APART, NULL, {".weight_packed", ".weight_scale", ".bias"}, {"U8", "U8"}, 2, NULL},
    [STORAGE_DEEPSEEK_V4] = {ARRANGED_APART, NULL, {".weight", ".scale", ".bias"}, {"I8", "F8_E8M0"}, 2, "deepseek_v4"},
    [STORAGE_QUARK] = {ARRANGED_APART, NULL, {".weight", ".weight_scale", ".bias"}, {"U8", "U8"}, 2, NULL},
    [STORAGE_MODELOPT] = {ARRANGED_APART, NULL, {".weight", ".weight_scale", ".bias"}, {"U8", "U8"}, 2, NULL},
    [STORAGE_MLX] = {ARRANGED_SPLIT, mlx_words, {"weight", "scales", "bias"}, {"U32", "U8"}, 8, NULL},
};

static const char quantization_key[] = "quantization_config", kept_key[] = "moe4_source_quantization_config";
static const char mlx_key[] = "quantization";

const struct storage *storage_find(storage_kind kind, const json_t *config)
{
    int is_released = kind == STORAGE_MODELOPT && config_is_model(config, "gpt_oss"); /* under its own names */
    return &storages[is_released ? STORAGE_GPT_OSS : kind];
}

const char *storage_base(storage_kind kind, const json_t *config, int32_t layer, char *base, size_t bytes)
{
    static const char experts[] = "experts.", others[] = "switch_mlp.";
    size_t stem = strlen(base) - strlen(experts);
    if (kind == STORAGE_ORIGINAL) snprintf(base, bytes, "block.%d.mlp.", layer);
    if (kind == STORAGE_MLX && !config_is_model(config, "gpt_oss")) snprintf(base + stem, bytes - stem, "%s", others);
    return base;
}

json_t *storage_config_read(const char *folder)
{
    char path[PATH_MAX];
    json_error_t error;
    struct stat info;
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (!stat(path, &info) && !S_ISREG(info.st_mode)) { /* a pipe would be waited for */
        fail("%s: not a regular file", path);
        return NULL;
    }
    json_t *config = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (config && json_is_object(config)) return config;
    fail("%s: %s", path, config ? "is no object" : error.text);
    json_decref(config);
    return NULL;
}

const json_t *config_member(const json_t *config, const char *key)
{
    const json_t *found = json_object_get(config, key);
    return found ? found : json_object_get(json_object_get(config, "text_config"), key);
}

int config_is_model(const json_t *config, const char *model_type)
{
    const json_t *const places[] = {config, json_object_get(config, "text_config")};
    for (int i = 0; i < 2; ++i) {
        const char *word = json_string_value(json_object_get(places[i], "model_type"));
        if (word && !strncmp(word, model_type, strlen(model_type))) return 1;
    }
    return 0;
}

/* ---- What a config says of a layout ------------------------------------------------------------------------------ */

static json_t *compressed_tensors_config(void)
{
    return json_pack("{s:s, s:s, s:s, s:[], s:{s:{s:[s], s:s, s:n, s:n, s:{s:i, s:s, s:s, s:i, s:b, s:b, s:s}}}}",
                     "quant_method", "compressed-tensors", "format", "mxfp4-pack-quantized", "quantization_status",
                     "compressed", "ignore", "config_groups", "group_0", "targets", "re:.*\\.experts\\.[0-9]+\\..*",
                     "format", "mxfp4-pack-quantized", "input_activations", "output_activations", "weights", "num_bits",
                     4, "type", "float", "strategy", "group", "group_size", 32, "symmetric", 1, "dynamic", 0,
                     "scale_dtype", "torch.uint8");
}

/* Nothing is quantised but what the one pattern matches. */
static json_t *quark_config(void)
{
    return json_pack("{s:s, s:{s:n, s:n}, s:{s:{s:{s:s, s:s, s:i, s:s, s:i, s:b}, s:n}}, s:[], s:{s:s, s:s}}",
                     "quant_method", "quark", "global_quant_config", "weight", "input_tensors", "layer_quant_config",
                     "*.experts*", "weight", "dtype", "fp4", "qscheme", "per_group", "group_size", 32, "scale_format",
                     "e8m0", "ch_axis", -1, "is_dynamic", 0, "input_tensors", "exclude", "export", "pack_method",
                     "reorder", "weight_format", "real_quantized");
}

static json_t *quantization_config(storage_kind kind)
{
    switch (kind) {
    case STORAGE_GPT_OSS:
        return json_pack("{s:s, s:[s,s,s,s]}", "quant_method", "mxfp4", "modules_to_not_convert",
                         "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head");
    case STORAGE_COMPRESSED_TENSORS: return compressed_tensors_config();
    case STORAGE_QUARK: return quark_config();
    case STORAGE_MODELOPT:
        return json_pack("{s:s, s:s, s:i, s:[s,s,s,s,s,s]}", "quant_method", "modelopt", "quant_algo", "MXFP4",
                         "group_size", 32, "ignore", "*self_attn*", "*shared_expert*", "*router*", "*.gate",
                         "*embed_tokens*", "*lm_head*");
    case STORAGE_MLX: return json_pack("{s:i, s:i, s:s}", "group_size", 32, "bits", 4, "mode", "mxfp4");
    default:
        return json_pack("{s:s, s:s, s:s, s:[i,i]}", "quant_method", "fp8", "fmt", "e4m3", "scale_fmt", "ue8m0",
                         "weight_block_size", 128, 128);
    }
}

/* Whether a kept quantization_config is one of this layout. */
static int is_of_storage(const json_t *quantization, storage_kind kind)
{
    static const char *const keys[] = {"quant_method", "mode"};
    json_t *ours = quantization_config(kind);
    int same = quantization != NULL;
    for (int i = 0; i < 2; ++i) {
        const json_t *a = json_object_get(quantization, keys[i]), *b = json_object_get(ours, keys[i]);
        same = same && (a ? b && json_equal(a, b) : !b);
    }
    json_decref(ours);
    return same;
}

int storage_has_config(storage_kind kind, const json_t *config)
{
    return is_of_storage(config_member(config, kind == STORAGE_MLX ? mlx_key : quantization_key), kind);
}

/* OpenAI's own config: flat, and of other words. */
static json_t *original_config(const json_t *source)
{
    static const char *const keys[][2] = {{"num_hidden_layers", "num_hidden_layers"},
                                          {"num_experts", "num_local_experts"},
                                          {"experts_per_token", "num_experts_per_tok"},
                                          {"vocab_size", "vocab_size"},
                                          {"hidden_size", "hidden_size"},
                                          {"intermediate_size", "intermediate_size"},
                                          {"swiglu_limit", "swiglu_limit"}};
    json_t *config = json_object();
    for (size_t i = 0; i < sizeof keys / sizeof *keys; ++i) {
        const json_t *value = config_member(source, keys[i][1]);
        if (value) json_object_set_new(config, keys[i][0], json_deep_copy(value));
    }
    return config;
}

static json_t *take_member(json_t *config, const char *key)
{
    json_t *value = json_incref(json_object_get(config, key));
    json_object_del(config, key);
    return value;
}

/* Puts the words of a layout in the place of those that the config has. */
static void config_change(json_t *config, storage_kind kind)
{
    json_t *kept = take_member(config, kept_key), *mlx = take_member(config, mlx_key);
    json_t *top = take_member(config, quantization_key);
    json_t *nested = take_member(json_object_get(config, "text_config"), quantization_key);
    json_t *old = mlx ? mlx : top ? top : nested;
    int comes_back = is_of_storage(kept, kind);
    json_object_set_new(config, kind == STORAGE_MLX ? mlx_key : quantization_key,
                        comes_back ? json_incref(kept) : quantization_config(kind));
    if (!comes_back && old) json_object_set(config, kept_key, kept ? kept : old);
    json_decref(kept);
    json_decref(mlx);
    json_decref(top);
    json_decref(nested);
}

/* In the text part, which goes before the top, if it has the key already. */
static void set_member(json_t *config, const char *key, json_t *value)
{
    json_t *section = json_object_get(config, "text_config");
    json_object_set_new(json_object_get(section, key) ? section : config, key, value);
}

json_t *storage_config(storage_kind kind, const json_t *source)
{
    const char *needed = storages[kind].model_type;
    if (needed && !config_is_model(source, needed)) {
        const char *word = json_string_value(json_object_get(source, "model_type"));
        fail(
            "model_type \"%s\": the layout %s would lose its activation and router parameters: those of %s are implied",
            word ? word : "none", storage_words[kind], needed);
        return NULL;
    }
    if (kind == STORAGE_ORIGINAL) return original_config(source);
    json_t *config = json_deep_copy(source);
    config_change(config, kind);
    if (kind == STORAGE_DEEPSEEK_V4) set_member(config, "expert_dtype", json_string("fp4"));
    return config;
}

const char *projection_word(const char *block_path, enum projection_role role)
{
    static const char *const short_words[] = {"w1", "w3", "w2"};
    int is_short = strstr(block_path, ".ffn.") || strstr(block_path, ".block_sparse_moe.");
    return (is_short ? short_words : proj_words)[role];
}
