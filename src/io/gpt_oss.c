/* gpt-oss as released: stacked experts, gate and up rows interleaved, tensors named model.layers.N.mlp.* */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dims.h"
#include "io/family.h"
#include "io/show.h"

/* The name of a tensor of an MoE layer. */
struct tensor_name {
    char text[96];
};

static const char prefix[] = "model.layers.";
static const char experts[] = ".mlp.experts.";

static const struct role {
    const char *suffix;
    int32_t matrix, part;
} roles[] = {
    {"gate_up_proj_blocks", MATRIX_GATE_UP, PART_CODES}, {"gate_up_proj_scales", MATRIX_GATE_UP, PART_SCALES},
    {"gate_up_proj_bias", MATRIX_GATE_UP, PART_BIAS},    {"down_proj_blocks", MATRIX_DOWN, PART_CODES},
    {"down_proj_scales", MATRIX_DOWN, PART_SCALES},      {"down_proj_bias", MATRIX_DOWN, PART_BIAS},
};
enum { N_ROLES = sizeof roles / sizeof *roles, MAX_LAYERS = 100000 };

/* ---- config.json ------------------------------------------------------------------------------------------------- */

/* Two keys are in use, often both at once. */
static moe4_status read_top_k(const struct config *config, int32_t E, int32_t *top_k)
{
    static const char *const keys[] = {"num_experts_per_tok", "experts_per_token"};
    int64_t most = E < MAX_TOP_K ? E : MAX_TOP_K, value = 0, other;
    moe4_status status = config_integer(config, keys[config_find(config, keys[0]) ? 0 : 1], 1, most, &value);
    *top_k = (int32_t)value;
    if (status != MOE4_OK || !config_find(config, keys[1])) return status;
    status = config_integer(config, keys[1], 1, most, &other);
    if (status == MOE4_OK && other != value)
        status = config_fail(config, MOE4_EFORMAT, keys[1], "%" PRId64 " as %s says", value, keys[0]);
    return status;
}

static moe4_status read_limit(const struct config *config, moe4_param *limit)
{
    double value = 7.0; /* the model's own constant where the config is silent */
    moe4_status status = config_number(config, "swiglu_limit", &value);
    *limit = (moe4_param){MOE4_SAME, (float)value, NULL};
    if (status == MOE4_OK && (!(limit->value > 0.0f) || isinf(limit->value)))
        status = config_fail(config, MOE4_EFORMAT, "swiglu_limit", "a finite number above 0");
    return status;
}

static moe4_status check_quantised(const struct config *config)
{
    static const char key[] = "quantization_config.quant_method";
    const struct json_value *method = config_find(config, key);
    if (method && method->type == JSON_STRING && strcmp(method->text, "mxfp4") == 0) return MOE4_OK;
    return config_fail(config, MOE4_EUNSUPPORTED, key, "\"mxfp4\": other weights are not supported");
}

static moe4_status read_sizes(const struct config *config, struct model *model)
{
    moe4_layer_config *layer = &model->layer;
    int64_t n_layers = 0, n_experts = 0;
    moe4_status status = config_integer(config, "num_hidden_layers", 1, MAX_LAYERS, &n_layers);
    if (status == MOE4_OK) status = config_integer(config, "num_local_experts", 1, MAX_EXPERTS, &n_experts);
    if (status == MOE4_OK) status = family_read_dimension(config, "hidden_size", &layer->hidden_size);
    if (status == MOE4_OK) status = family_read_dimension(config, "intermediate_size", &layer->intermediate_size);
    model->n_layers = (int32_t)n_layers;
    layer->n_experts = (int32_t)n_experts;
    return status;
}

static moe4_status read_config(const struct config *config, struct model *model)
{
    moe4_layer_config *layer = &model->layer;
    *layer = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    layer->gate_up = MOE4_GATE_UP_INTERLEAVED;
    layer->activation = MOE4_ACTIVATION_SWIGLU_OAI;
    layer->alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
    layer->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
    layer->routing.method = MOE4_ROUTING_RENORMALIZE;
    moe4_status status = check_quantised(config);
    if (status == MOE4_OK) status = read_sizes(config, model);
    if (status == MOE4_OK) status = read_top_k(config, layer->n_experts, &layer->routing.top_k);
    if (status == MOE4_OK) status = read_limit(config, &layer->limit);
    return status;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* What follows model.layers.N.mlp.experts. in a name, and N; NULL for any other name. */
static const char *expert_suffix(const char *name, int32_t *layer_number)
{
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) return NULL;
    const char *digits = name + sizeof prefix - 1;
    size_t n_digits = strspn(digits, "0123456789");
    const char *rest = digits + n_digits;
    if (n_digits < 1 || n_digits > 9 || strncmp(rest, experts, sizeof experts - 1) != 0) return NULL;
    *layer_number = (int32_t)strtol(digits, NULL, 10);
    return rest + sizeof experts - 1;
}

static moe4_status classify(moe4_context *context, const moe4_tensor *tensor, int32_t *layer_number)
{
    *layer_number = -1;
    const char *suffix = expert_suffix(tensor->name, layer_number);
    if (!suffix) return MOE4_OK;
    for (int i = 0; i < N_ROLES; i++)
        if (strcmp(roles[i].suffix, suffix) == 0) return MOE4_OK;
    int dequantised = strcmp(suffix, "gate_up_proj") == 0 || strcmp(suffix, "down_proj") == 0;
    return context_fail(context, dequantised ? MOE4_EUNSUPPORTED : MOE4_EFORMAT,
                        "%s: tensor \"%s\": %s %s, expected only *_blocks, *_scales and *_bias of MXFP4 experts",
                        show_file(tensor->file).text, show_name(tensor->name).text,
                        dequantised ? "dequantised weights," : "unknown expert tensor,",
                        show_type(tensor->dtype, tensor->rank, tensor->shape).text);
}

static struct tensor_name layer_tensor(int32_t layer_number, const char *middle, const char *suffix)
{
    struct tensor_name name;
    snprintf(name.text, sizeof name.text, "%s%" PRId32 "%s%s", prefix, layer_number, middle, suffix);
    return name;
}

static moe4_status plan_role(moe4_context *context, struct plan *plan, int32_t index)
{
    const struct role *role = &roles[index];
    const moe4_layer_config *layer = &plan->model->layer;
    int64_t H = layer->hidden_size, I = layer->intermediate_size;
    int64_t rows = role->matrix == MATRIX_GATE_UP ? 2 * I : H, K = role->matrix == MATRIX_GATE_UP ? H : I;
    const int64_t leading[] = {layer->n_experts, rows};
    struct tensor_name name = layer_tensor(plan->layer_number, experts, role->suffix);
    const moe4_tensor *tensor;
    moe4_status status =
        role->part == PART_BIAS
            ? family_find_tensor(context, plan->tensors, name.text, "BF16", 2, leading, &tensor)
            : family_find_packed(context, plan->tensors, name.text, role->part, 2, leading, K, &tensor);
    if (status == MOE4_OK) family_plan_stacked(plan, index, role->matrix, role->part, tensor);
    return status;
}

static moe4_status plan_layer(moe4_context *context, struct plan *plan)
{
    const moe4_layer_config *layer = &plan->model->layer;
    const int64_t shape[] = {layer->n_experts, layer->hidden_size};
    struct tensor_name weight = layer_tensor(plan->layer_number, ".mlp.router.", "weight");
    struct tensor_name bias = layer_tensor(plan->layer_number, ".mlp.router.", "bias");
    moe4_status status =
        family_find_tensor(context, plan->tensors, weight.text, "BF16", 2, shape, &plan->router_weight);
    if (status == MOE4_OK)
        status = family_find_tensor(context, plan->tensors, bias.text, "BF16", 1, shape, &plan->router_bias);
    for (int32_t i = 0; i < N_ROLES && status == MOE4_OK; i++) status = plan_role(context, plan, i);
    plan->router_weight_dtype = plan->router_bias_dtype = plan->bias_dtype = MOE4_DTYPE_BF16;
    return status;
}

const struct family family_gpt_oss = {
    .model_type = "gpt_oss",
    .name = "gpt-oss",
    .layout = "gpt-oss released",
    .n_slices = N_ROLES,
    .read_config = read_config,
    .classify = classify,
    .plan_layer = plan_layer,
};
