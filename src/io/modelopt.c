/* NVIDIA modelopt, separate experts (its gpt-oss exports are in gpt_oss.c).  What it says of the quantisation is in
 * config.json or in the hf_quant_config.json beside it. */
#include <string.h>

#include "io/family.h"

static const char *const algorithm_keys[] = {"quantization_config.quant_algo", "quantization.quant_algo", NULL};

/* Checks what is said of one or all layers in MXFP4: blocks of 32. */
static moe4_status check_group_size(const struct config *config, const char *key, const struct json_value *size)
{
    int64_t group_size = 0;
    if (!size || size->type == JSON_NULL) return MOE4_OK;
    if (size->type == JSON_NUMBER && json_integer(size->text, size->n_bytes, &group_size) && group_size == 32)
        return MOE4_OK;
    return config_fail(config, MOE4_EUNSUPPORTED, key, "group_size 32 where layers are in MXFP4");
}

/* MIXED_PRECISION names each layer's algorithm; at least one must be ours.  Which tensors are, their types tell. */
static moe4_status check_mixed(const struct config *config)
{
    static const char *const keys[] = {"quantization_config.quantized_layers", "quantization.quantized_layers", NULL};
    static const char algorithm_word[] = "quant_algo", size_word[] = "group_size";
    const char *key = config_key(config, keys);
    const struct json_value *layers = config_present(config, key);
    int n_ours = 0;
    if (!layers || layers->type != JSON_OBJECT)
        return config_fail(config, MOE4_EFORMAT, key, "an object of layers, as MIXED_PRECISION has");
    for (const struct json_value *layer = layers->child; layer; layer = layer->next) {
        const struct json_value *algorithm = json_member(layer, algorithm_word, sizeof algorithm_word - 1);
        if (!algorithm || algorithm->type != JSON_STRING || !strstr(algorithm->text, "MXFP4")) continue;
        moe4_status status = check_group_size(config, key, json_member(layer, size_word, sizeof size_word - 1));
        if (status != MOE4_OK) return status;
        n_ours++;
    }
    return n_ours ? MOE4_OK : config_fail(config, MOE4_EUNSUPPORTED, key, "a layer in MXFP4");
}

moe4_status modelopt_read_config(const struct config *config, struct model *model)
{
    static const char *const size_keys[] = {"quantization_config.group_size", "quantization.group_size", NULL};
    static const char *const excluded_keys[] = {"quantization_config.ignore", "quantization_config.exclude_modules",
                                                "quantization.ignore", "quantization.exclude_modules", NULL};
    const char *key = config_key(config, algorithm_keys), *algorithm, *size_key = config_key(config, size_keys);
    moe4_status status = config_string(config, key, &algorithm);
    if (status != MOE4_OK) return status;
    if (strcmp(algorithm, "MIXED_PRECISION") == 0)
        status = check_mixed(config);
    else if (strstr(algorithm, "MXFP4"))
        status = check_group_size(config, size_key, config_find(config, size_key));
    else
        status = config_fail(config, MOE4_EUNSUPPORTED, key, "one of MXFP4, or MIXED_PRECISION");
    if (status == MOE4_OK) status = architecture_read(config, model);
    return status == MOE4_OK ? excluded_read(config, excluded_keys, &model->excluded) : status;
}

static int is_modelopt(const struct config *config)
{
    return config_says(config, "quantization_config.quant_method", "modelopt") ||
           (config->beside && config_present(config, "quantization.quant_algo"));
}

static const struct suffix suffixes[] = {
    {"weight", PIECE_CODES},        {"weight_scale", PIECE_SCALES},    {"bias", PIECE_BIAS},
    {"input_scale", PIECE_IGNORED}, {"weight_scale_2", PIECE_REFUSED}, {"pre_quant_scale", PIECE_REFUSED},
};

const struct family family_modelopt = {
    .layout = "modelopt",
    .recognise = is_modelopt,
    .read_config = modelopt_read_config,
    .storage = STORED_APART,
    .words = &words_transformers,
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
