#include "io/family.h"

#include <string.h>

#include "base/dims.h"

enum { LARGEST_DIMENSION = 1 << 20 };

/* Those that look at more than quant_method first. */
static const struct family *const families[] = {
    &family_gguf,
    &family_openai,
    &family_mlx,
    &family_dense,
    &family_modelopt_stacked,
    &family_modelopt,
    &family_gpt_oss,
    &family_compressed_tensors,
    &family_quark,
    &family_deepseek_v4,
};
enum { N_FAMILIES = sizeof families / sizeof *families };

/* The projections of most models. */
const struct words words_transformers = {
    .prefixes = {"model.", "language_model.model.", "model.language_model.", "language_model.", ""},
    .stem = "layers.",
    .extra_stem = "mtp.",
    .blocks = {".mlp.", ".block_sparse_moe.", ".ffn.", ".feed_forward."},
    .experts = {"experts."},
};

const struct projections projections_proj = {
    .items = {{"gate_proj.", MATRIX_GATE_UP, HALF_GATE},
              {"up_proj.", MATRIX_GATE_UP, HALF_UP},
              {"down_proj.", MATRIX_DOWN, HALF_BOTH}},
    .count = 3,
    .order = MOE4_GATE_UP_GATE_FIRST,
};
const struct projections projections_w = {
    .items = {{"w1.", MATRIX_GATE_UP, HALF_GATE}, {"w3.", MATRIX_GATE_UP, HALF_UP}, {"w2.", MATRIX_DOWN, HALF_BOTH}},
    .count = 3,
    .order = MOE4_GATE_UP_GATE_FIRST,
};

static int is_of(const struct family *family, const struct config *config)
{
    const struct json_value *method = config_find(config, "quantization_config.quant_method");
    if (family->quant_method &&
        (!method || method->type != JSON_STRING || strcmp(method->text, family->quant_method) != 0))
        return 0;
    return !family->recognise || family->recognise(config);
}

moe4_status family_find(const struct config *config, const struct family **family)
{
    for (int i = 0; i < N_FAMILIES; i++) {
        *family = families[i];
        if (is_of(families[i], config)) return MOE4_OK;
    }
    return config_fail(config, MOE4_EUNSUPPORTED, "quantization_config.quant_method",
                       "\"mxfp4\" (gpt-oss), \"compressed-tensors\", \"quark\", \"modelopt\" or \"fp8\" (deepseek_v4): "
                       "other weights are not supported");
}

moe4_status family_read_dimension(const struct config *config, const char *key, int64_t *value)
{
    moe4_status status = config_integer(config, key, BLOCK_SIZE, LARGEST_DIMENSION, value);
    if (status == MOE4_OK && *value % BLOCK_SIZE)
        status = config_fail(config, MOE4_EUNSUPPORTED, key, "a multiple of %d", BLOCK_SIZE);
    return status;
}

void model_release(struct model *model, const moe4_allocator *allocator)
{
    memory_release(allocator, model->limits,
                   ((size_t)model->n_layers + (size_t)model->n_extra_layers) * sizeof *model->limits);
    excluded_release(&model->excluded, allocator);
    model->limits = NULL;
}
