/* gpt-oss in its two own layouts, both stacked and with gate and up rows interleaved: as released on the hub, and the
 * original files, whose config is flat and names no model. */
#include <string.h>

#include "io/family.h"

static const struct projections interleaved_proj = {
    .items = {{"gate_up_proj_", MATRIX_GATE_UP, HALF_BOTH}, {"down_proj_", MATRIX_DOWN, HALF_BOTH}},
    .count = 2,
    .order = MOE4_GATE_UP_INTERLEAVED,
};
static const struct projections interleaved_mlp = {
    .items = {{"mlp1_", MATRIX_GATE_UP, HALF_BOTH}, {"mlp2_", MATRIX_DOWN, HALF_BOTH}},
    .count = 2,
    .order = MOE4_GATE_UP_INTERLEAVED,
};

static const struct suffix released[] = {{"blocks", PIECE_CODES}, {"scales", PIECE_SCALES}, {"bias", PIECE_BIAS}};
static const struct suffix original[] = {
    {"weight.blocks", PIECE_CODES}, {"weight.scales", PIECE_SCALES}, {"bias", PIECE_BIAS}};
enum { N_SUFFIXES = 3 };

static const struct router_names original_router = {.weight = "gate.weight", .bias = "gate.bias"};

static moe4_status read_original(const struct config *config, struct model *model)
{
    moe4_status status = architecture_read(config, model);
    model->router = &original_router;
    return status;
}

int family_is_original(const struct config *config)
{
    return config->kind == CONFIG_JSON && !config_find(config, "model_type") &&
           !config_find(config, "quantization_config") && config_find(config, "num_experts") &&
           config_find(config, "experts_per_token");
}

static const struct words released_words = {
    .prefixes = {"model.", "", "language_model.model."},
    .stem = "layers.",
    .blocks = {".mlp."},
    .experts = {"experts."},
};

const struct family family_gpt_oss = {
    .layout = "gpt-oss released",
    .quant_method = "mxfp4",
    .read_config = architecture_read,
    .storage = STORED_STACKED,
    .words = &released_words,
    .projections = {&interleaved_proj},
    .suffixes = released,
    .n_suffixes = N_SUFFIXES,
};

static const struct words original_words = {
    .prefixes = {""},
    .stem = "block.",
    .blocks = {".mlp."},
    .experts = {""},
};

const struct family family_openai = {
    .layout = "gpt-oss original",
    .recognise = family_is_original,
    .read_config = read_original,
    .storage = STORED_STACKED,
    .words = &original_words,
    .projections = {&interleaved_mlp},
    .suffixes = original,
    .n_suffixes = N_SUFFIXES,
};

/* modelopt writes gpt-oss under its released names. */
static int is_gpt_oss(const struct config *config)
{
    return config_says(config, "model_type", "gpt_oss") &&
           (config_says(config, "quantization_config.quant_method", "modelopt") || config->beside);
}

const struct family family_modelopt_stacked = {
    .layout = "modelopt, gpt-oss names",
    .recognise = is_gpt_oss,
    .read_config = modelopt_read_config,
    .storage = STORED_STACKED,
    .words = &released_words,
    .projections = {&interleaved_proj},
    .suffixes = released,
    .n_suffixes = N_SUFFIXES,
};
