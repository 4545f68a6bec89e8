/* compressed-tensors, format mxfp4-pack-quantized: a tensor of codes and one of scales for each matrix of each expert.
 */
#include <string.h>

#include "io/family.h"

static const char format_word[] = "mxfp4-pack-quantized";
static const char groups_key[] = "quantization_config.config_groups";

/* The value of a member if it is a number, -1 if it is none. */
static int64_t member_integer(const struct json_value *object, const char *key)
{
    const struct json_value *found = json_member(object, key, strlen(key));
    int64_t value;
    return found && found->type == JSON_NUMBER && json_integer(found->text, found->n_bytes, &value) ? value : -1;
}

static const char *member_text(const struct json_value *object, const char *key)
{
    const struct json_value *found = json_member(object, key, strlen(key));
    return found && found->type == JSON_STRING ? found->text : NULL;
}

static int is_false(const struct json_value *object, const char *key)
{
    const struct json_value *found = json_member(object, key, strlen(key));
    return found && found->type == JSON_FALSE;
}

/* What a group must say of its weights. */
static moe4_status check_group(const struct config *config, const struct json_value *group)
{
    static const char weights_key[] = "weights", inputs_key[] = "input_activations";
    const struct json_value *weights = json_member(group, weights_key, sizeof weights_key - 1);
    const struct json_value *inputs = json_member(group, inputs_key, sizeof inputs_key - 1);
    const char *type = member_text(weights, "type");
    if (member_integer(weights, "num_bits") != 4 || !type || strcmp(type, "float") != 0)
        return config_fail(config, MOE4_EUNSUPPORTED, groups_key, "weights of num_bits 4 and type float");
    if (member_integer(weights, "group_size") != 32)
        return config_fail(config, MOE4_EUNSUPPORTED, groups_key, "weights of group_size 32");
    if (is_false(weights, "symmetric"))
        return config_fail(config, MOE4_EUNSUPPORTED, groups_key, "symmetric weights: zero points are not supported");
    if (is_false(inputs, "dynamic"))
        return config_fail(config, MOE4_EUNSUPPORTED, groups_key,
                           "no static input_activations: input_global_scale is not supported");
    return MOE4_OK;
}

/* The format is that of all groups, or each says its own; groups of other formats are other layers. */
static moe4_status check_groups(const struct config *config)
{
    static const char key[] = "quantization_config.format";
    const struct json_value *groups = config_find(config, groups_key);
    int of_all = config_says(config, key, format_word), n_ours = 0;
    for (const struct json_value *group = groups ? groups->child : NULL; group; group = group->next) {
        const char *format = member_text(group, "format");
        if (format ? strcmp(format, format_word) != 0 : !of_all) continue;
        moe4_status status = check_group(config, group);
        if (status != MOE4_OK) return status;
        n_ours++;
    }
    if (n_ours) return MOE4_OK;
    if (of_all) return config_fail(config, MOE4_EFORMAT, groups_key, "a group of format \"%s\"", format_word);
    return config_fail(config, MOE4_EUNSUPPORTED, key, "\"%s\", here or in config_groups", format_word);
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    static const char *const ignored_keys[] = {"quantization_config.ignore", NULL};
    moe4_status status = check_groups(config);
    if (status == MOE4_OK) status = architecture_read(config, model);
    return status == MOE4_OK ? excluded_read(config, ignored_keys, &model->excluded) : status;
}

static const struct suffix suffixes[] = {
    {"weight_packed", PIECE_CODES},         {"weight_scale", PIECE_SCALES},        {"bias", PIECE_BIAS},
    {"weight", PIECE_UNQUANTISED},          {"weight_shape", PIECE_IGNORED},       {"weight_zero_point", PIECE_REFUSED},
    {"weight_global_scale", PIECE_REFUSED}, {"input_global_scale", PIECE_REFUSED},
};

const struct family family_compressed_tensors = {
    .layout = "compressed-tensors mxfp4-pack-quantized",
    .quant_method = "compressed-tensors",
    .read_config = read_config,
    .storage = STORED_APART,
    .words = &words_transformers,
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
