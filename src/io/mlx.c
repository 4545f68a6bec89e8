/* MLX, mode mxfp4: one stacked tensor a projection, eight codes to a 32-bit word, lowest first: the usual bytes. */
#include "io/family.h"

/* MLX writes its own words beside other loaders' quantization_config. */
static const char *const bits_keys[] = {"quantization.bits", "quantization_config.bits", NULL};
static const char *const mode_keys[] = {"quantization.mode", "quantization_config.mode", NULL};
static const char *const size_keys[] = {"quantization.group_size", "quantization_config.group_size", NULL};

static int is_mlx(const struct config *config)
{
    if (config->kind != CONFIG_JSON) return 0;
    return config_present(config, bits_keys[0]) ||
           (!config_present(config, "quantization_config.quant_method") && config_present(config, bits_keys[1]));
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    const char *mode_key = config_key(config, mode_keys);
    int64_t bits, group_size;
    if (!config_says(config, mode_key, "mxfp4"))
        return config_fail(config, MOE4_EUNSUPPORTED, mode_key,
                           "\"mxfp4\": affine weights, with their .biases, are not supported");
    moe4_status status = config_integer_of(config, bits_keys, 4, 4, &bits);
    if (status == MOE4_OK) status = config_integer_of(config, size_keys, 32, 32, &group_size);
    return status == MOE4_OK ? architecture_read(config, model) : status;
}

static const struct suffix suffixes[] = {
    {"weight", PIECE_CODES}, {"scales", PIECE_SCALES}, {"bias", PIECE_BIAS}, {"biases", PIECE_REFUSED}};

static const struct words words = {
    .prefixes = {"model.", "language_model.model.", "model.language_model.", "language_model.", ""},
    .stem = "layers.",
    .extra_stem = "mtp.",
    .blocks = {".mlp.", ".block_sparse_moe.", ".ffn.", ".feed_forward."},
    .experts = {"experts.", "switch_mlp."},
};

const struct family family_mlx = {
    .layout = "MLX mxfp4",
    .recognise = is_mlx,
    .read_config = read_config,
    .storage = STORED_STACKED,
    .words = &words,
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes,
    .n_suffixes = sizeof suffixes / sizeof *suffixes,
};
