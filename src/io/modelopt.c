/* NVIDIA modelopt, separate experts (its gpt-oss exports are in gpt_oss.c).  What it says of the quantisation is in
 * config.json or in the hf_quant_config.json beside it. */
#include <string.h>

#include "io/family.h"

static const char *const algorithm_keys[] = {"quantization_config.quant_algo", "quantization.quant_algo", NULL};

moe4_status modelopt_read_config(const struct config *config, struct model *model)
{
    static const char *const size_keys[] = {"quantization_config.group_size", "quantization.group_size", NULL};
    const char *key = config_key(config, algorithm_keys), *algorithm, *size_key = config_key(config, size_keys);
    int64_t group_size = 32;
    moe4_status status = config_string(config, key, &algorithm);
    if (status != MOE4_OK) return status;
    if (!strstr(algorithm, "MXFP4")) return config_fail(config, MOE4_EUNSUPPORTED, key, "one of MXFP4");
    status = config_optional_integer(config, size_keys, 1, INT32_MAX, &group_size);
    if (status == MOE4_OK && group_size != 32) status = config_fail(config, MOE4_EUNSUPPORTED, size_key, "32");
    return status == MOE4_OK ? architecture_read(config, model) : status;
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
    .prefixes = {"model.", "language_model.model.", "model.language_model.", "language_model.", ""},
    .stem = "layers.",
    .extra_stem = "mtp.",
    .blocks = {".mlp.", ".block_sparse_moe.", ".ffn.", ".feed_forward."},
    .experts = {"experts."},
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
