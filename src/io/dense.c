/* Checkpoints whose experts are not quantised yet, one tensor a matrix or stacked: they are told apart, described and
 * quantised, but their layers are not ours to run. */
#include "io/family.h"

static int is_dense(const struct config *config)
{
    return config->kind == CONFIG_JSON && !config->beside && !config_present(config, "quantization_config") &&
           !config_present(config, "quantization") && config_present(config, "model_type");
}

static const struct suffix suffixes_apart[] = {{"weight", PIECE_DENSE}, {"bias", PIECE_UNQUANTISED}};
static const struct suffix suffixes_stacked[] = {{"", PIECE_DENSE}, {"_bias", PIECE_UNQUANTISED}};
enum { N_SUFFIXES = 2 };

/* Whether gate and up are interleaved is the model's: nothing of the layer is read by this order. */
static const struct projections fused = {
    .items = {{"gate_up_proj", MATRIX_GATE_UP, HALF_BOTH}, {"down_proj", MATRIX_DOWN, HALF_BOTH}},
    .count = 2,
    .order = MOE4_GATE_UP_GATE_FIRST,
};

static const struct family family_dense_stacked = {
    .layout = "unquantised, stacked",
    .read_config = architecture_read,
    .storage = STORED_STACKED,
    .words = &words_transformers,
    .projections = {&fused},
    .suffixes = suffixes_stacked,
    .n_suffixes = N_SUFFIXES,
};

const struct family family_dense = {
    .layout = "unquantised",
    .recognise = is_dense,
    .or_else = &family_dense_stacked,
    .read_config = architecture_read,
    .storage = STORED_APART,
    .words = &words_transformers,
    .projections = {&projections_proj, &projections_w},
    .suffixes = suffixes_apart,
    .n_suffixes = N_SUFFIXES,
};

int family_is_dense(const struct family *family)
{
    return family == &family_dense || family == &family_dense_stacked;
}
