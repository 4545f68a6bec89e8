/* AMD Quark: codes and scales apart for each matrix of each expert; layers of other precisions may lie beside, told
 * apart by the types of their tensors. */
#include <string.h>

#include "io/family.h"

static const struct json_value *member(const struct json_value *object, const char *key)
{
    return json_member(object, key, strlen(key));
}

static int member_says(const struct json_value *object, const char *key, const char *word)
{
    const struct json_value *found = member(object, key);
    return found && found->type == JSON_STRING && strcmp(found->text, word) == 0;
}

/* The description of weights in a config of one or many layers: an object, or a list of one. */
static const struct json_value *weight_of(const struct json_value *layers)
{
    const struct json_value *weight = member(layers, "weight");
    return weight && weight->type == JSON_ARRAY ? weight->child : weight;
}

/* Checks one description; *n_fp4 counts those of FP4. */
static moe4_status check_weight(const struct config *config, const char *key, const struct json_value *weight,
                                int *n_fp4)
{
    const struct json_value *size = weight ? member(weight, "group_size") : NULL;
    int64_t group_size = 0;
    if (!weight || !member_says(weight, "dtype", "fp4")) return MOE4_OK;
    if (size && size->type == JSON_NUMBER && !json_integer(size->text, size->n_bytes, &group_size)) group_size = 0;
    if (!member_says(weight, "qscheme", "per_group") || group_size != 32)
        return config_fail(config, MOE4_EUNSUPPORTED, key, "fp4 weights of qscheme per_group and group_size 32");
    if (!member_says(weight, "scale_format", "e8m0"))
        return config_fail(config, MOE4_EUNSUPPORTED, key, "fp4 weights of scale_format e8m0");
    *n_fp4 += 1;
    return MOE4_OK;
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    static const char global_key[] = "quantization_config.global_quant_config";
    static const char layers_key[] = "quantization_config.layer_quant_config";
    static const char *const excluded_keys[] = {"quantization_config.exclude", NULL};
    static const char pack_key[] = "quantization_config.export.pack_method";
    const struct json_value *layers = config_find(config, layers_key);
    int n_fp4 = 0;
    moe4_status status = check_weight(config, global_key, weight_of(config_find(config, global_key)), &n_fp4);
    for (const struct json_value *layer = layers ? layers->child : NULL; layer && status == MOE4_OK;
         layer = layer->next)
        status = check_weight(config, layers_key, weight_of(layer), &n_fp4);
    if (status != MOE4_OK) return status;
    if (!n_fp4) return config_fail(config, MOE4_EUNSUPPORTED, global_key, "weights of dtype fp4, here or in layers");
    if (config_present(config, pack_key) && !config_says(config, pack_key, "reorder") &&
        !config_says(config, pack_key, "order"))
        return config_fail(config, MOE4_EUNSUPPORTED, pack_key, "\"reorder\"");
    status = architecture_read(config, model);
    return status == MOE4_OK ? excluded_read(config, excluded_keys, &model->excluded) : status;
}

static const struct suffix suffixes[] = {
    {"weight", PIECE_CODES},         {"weight_scale", PIECE_SCALES},       {"bias", PIECE_BIAS},
    {"input_scale", PIECE_IGNORED},  {"weight_zero_point", PIECE_REFUSED}, {"weight_scale_2", PIECE_REFUSED},
    {"output_scale", PIECE_IGNORED},
};

const struct family family_quark = {
    .layout = "AMD Quark",
    .quant_method = "quark",
    .read_config = read_config,
    .storage = STORED_APART,
    .words = &words_transformers,
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
