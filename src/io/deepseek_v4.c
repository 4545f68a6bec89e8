/* DeepSeek-V4 as released: routed experts in MXFP4, each matrix a tensor of codes (I8) and one of scales (F8_E8M0), all
 * other weights in FP8.  Multi-token prediction layers come after the model's own. */
#include <string.h>

#include "io/family.h"

/* The FP8 of other models is another format. */
static int is_deepseek_v4(const struct config *config)
{
    static const char word[] = "deepseek_v4", key[] = "model_type";
    const struct json_value *const places[] = {config->root, config->section};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const struct json_value *type = json_member(places[i], key, sizeof key - 1);
        if (type && type->type == JSON_STRING && strncmp(type->text, word, sizeof word - 1) == 0) return 1;
    }
    return 0;
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    static const char key[] = "expert_dtype", scale_key[] = "quantization_config.scale_fmt";
    if (!config_says(config, key, "fp4"))
        return config_fail(config, MOE4_EUNSUPPORTED, key, "\"fp4\": experts in FP8 are not supported");
    if (config_present(config, scale_key) && !config_says(config, scale_key, "ue8m0"))
        return config_fail(config, MOE4_EUNSUPPORTED, scale_key, "\"ue8m0\"");
    return architecture_read(config, model);
}

static const struct suffix suffixes[] = {{"weight", PIECE_CODES}, {"scale", PIECE_SCALES}, {"bias", PIECE_BIAS}};

static const struct words words = {
    .prefixes = {"", "model.", "language_model.", "language_model.model.", "model.language_model."},
    .stem = "layers.",
    .extra_stem = "mtp.",
    .blocks = {".ffn.", ".mlp."},
    .experts = {"experts."},
};

const struct family family_deepseek_v4 = {
    .layout = "DeepSeek-V4 released",
    .quant_method = "fp8",
    .recognise = is_deepseek_v4,
    .read_config = read_config,
    .storage = STORED_APART,
    .words = &words,
    .projections = {&projections_w, &projections_proj},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
