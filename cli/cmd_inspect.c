/* moe4 inspect: what a checkpoint holds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "command.h"
#include "message.h"
#include "model.h"
#include "options.h"
#include "report.h"
#include "tensor.h"

struct inspect {
    const char *path;
    int json;
    moe4_context *context;
};

/* Bytes of a layer's MXFP4 weights: 17 for every 32 of 3*H*I weights an expert. */
static int64_t weight_bytes(const moe4_layer_config *config)
{
    int32_t n_matrices = config->gate_up == MOE4_GATE_UP_NONE ? 2 : 3;
    return config->n_experts * (n_matrices * config->hidden_size * config->intermediate_size / 32 * 17);
}

/* Whether a tensor's name has the layer's number as a component after one that numbers layers. */
static int tensor_is_of_layer(const char *name, int32_t layer)
{
    static const char *const components[] = {"layers.", "block.", "blk."};
    for (size_t i = 0; i < sizeof components / sizeof *components; ++i) {
        const char *found = strstr(name, components[i]);
        if (!found) continue;
        char *end;
        long number = strtol(found + strlen(components[i]), &end, 10);
        return *end == '.' && number == layer;
    }
    return 0;
}

static struct human param_text(const moe4_param *param)
{
    struct human result = {"per expert"};
    if (param->presence == MOE4_ABSENT) snprintf(result.text, sizeof result.text, "none");
    if (param->presence == MOE4_SAME) snprintf(result.text, sizeof result.text, "%g", param->value);
    return result;
}

static json_t *param_json(const moe4_param *param)
{
    return param->presence == MOE4_SAME     ? json_real(param->value)
           : param->presence == MOE4_ABSENT ? json_null()
                                            : json_string("per expert");
}

/* ---- JSON
 * ------------------------------------------------------------------------------------------------------------ */

static json_t *tensors_json(const moe4_tensors *tensors, int32_t layer)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < moe4_tensors_count(tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        if (!tensor_is_of_layer(tensor->name, layer)) continue;
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:I}", "name", tensor->name, "dtype", tensor->dtype,
                                              "shape", json_integers(tensor->shape, tensor->rank), "bytes",
                                              (json_int_t)tensor->n_bytes));
    }
    return list;
}

static json_t *layer_json(const struct model *model)
{
    const moe4_layer_config *config = model->config;
    json_t *router = config->router.weight
                         ? json_pack("{s:s, s:b}", "weight_dtype", dtype_word(config->router.weight_dtype), "bias",
                                     config->router.bias != NULL)
                         : json_null();
    return json_pack("{s:i, s:i, s:i, s:I, s:I, s:s, s:s, s:o, s:o, s:o, s:s, s:o, s:I, s:o}", "layer", model->layer,
                     "n_experts", config->n_experts, "top_k", config->routing.top_k, "hidden_size",
                     (json_int_t)config->hidden_size, "intermediate_size", (json_int_t)config->intermediate_size,
                     "gate_up", gate_up_name(config->gate_up), "activation", activation_name(config->activation),
                     "alpha", param_json(&config->alpha), "beta", param_json(&config->beta), "limit",
                     param_json(&config->limit), "routing", routing_name(config->routing.method), "router", router,
                     "weight_bytes", (json_int_t)weight_bytes(config), "tensors",
                     tensors_json(moe4_checkpoint_tensors(model->checkpoint), model->layer));
}

/* ---- Text
 * ------------------------------------------------------------------------------------------------------------- */

static void print_tensors(const moe4_tensors *tensors, int32_t layer)
{
    for (int64_t i = 0; i < moe4_tensors_count(tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        if (tensor_is_of_layer(tensor->name, layer))
            printf("    %-52s %-7s %-20s %8s\n", tensor->name, tensor->dtype,
                   shape_show(tensor->rank, tensor->shape).text, human_bytes((double)tensor->n_bytes).text);
    }
}

static void print_layer(const struct model *model)
{
    const moe4_layer_config *config = model->config;
    report_title("Layer %d", model->layer);
    report_field("experts", "%d, %d a token, MXFP4, %s", config->n_experts, config->routing.top_k,
                 human_bytes((double)weight_bytes(config)).text);
    report_field("sizes", "hidden %lld, intermediate %lld, gate and up rows %s", (long long)config->hidden_size,
                 (long long)config->intermediate_size, gate_up_name(config->gate_up));
    report_field("activation", "%s, alpha %s, beta %s, limit %s", activation_name(config->activation),
                 param_text(&config->alpha).text, param_text(&config->beta).text, param_text(&config->limit).text);
    if (config->router.weight)
        report_field("router", "%s, %s weights%s", routing_name(config->routing.method),
                     dtype_word(config->router.weight_dtype), config->router.bias ? ", bias" : "");
    else
        report_field("router", "%s, no weights", routing_name(config->routing.method));
    print_tensors(moe4_checkpoint_tensors(model->checkpoint), model->layer);
}

/* ---- Command
 * ---------------------------------------------------------------------------------------------------------- */

/* Describes one layer, as text or into `layers`, and adds up its weights. */
static int inspect_layer(const struct inspect *inspect, int32_t layer, json_t *layers, int64_t *total_bytes)
{
    struct model model;
    int code = model_open(inspect->context, inspect->path, layer, (struct integer_pair){0, 0}, &model);
    if (code) return code;
    *total_bytes += weight_bytes(model.config);
    if (inspect->json)
        json_array_append_new(layers, layer_json(&model));
    else
        print_layer(&model);
    model_close(&model);
    return EXIT_OK;
}

static int inspect_layers(const struct inspect *inspect, const moe4_checkpoint *checkpoint,
                          const moe4_checkpoint_info *info)
{
    const moe4_tensors *tensors = moe4_checkpoint_tensors(checkpoint);
    int64_t n_tensors = moe4_tensors_count(tensors), tensor_bytes = 0, expert_bytes = 0;
    for (int64_t i = 0; i < n_tensors; ++i) tensor_bytes += moe4_tensors_get(tensors, i)->n_bytes;
    if (!inspect->json) {
        report_title("%s", inspect->path);
        report_field("model", "%s, layout \"%s\", MoE layers here: %d of %d", info->family, info->layout,
                     info->n_moe_layers, info->n_model_layers);
        report_field("tensors", "%lld, %s", (long long)n_tensors, human_bytes((double)tensor_bytes).text);
    }
    json_t *layers = json_array();
    int code = EXIT_OK;
    for (int32_t i = 0; !code && i < info->n_moe_layers; ++i)
        code = inspect_layer(inspect, moe4_checkpoint_layer_number(checkpoint, i), layers, &expert_bytes);
    if (!code && inspect->json)
        report_json(json_pack("{s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:I, s:O}", "path", inspect->path, "family",
                              info->family, "layout", info->layout, "n_model_layers", info->n_model_layers,
                              "n_moe_layers", info->n_moe_layers, "n_tensors", (json_int_t)n_tensors, "bytes",
                              (json_int_t)tensor_bytes, "expert_weight_bytes", (json_int_t)expert_bytes, "layers",
                              layers));
    else if (!code)
        report_field("total", "%s of expert weights in %s", human_bytes((double)expert_bytes).text,
                     human_plural(info->n_moe_layers, "layer").text);
    json_decref(layers);
    return code;
}

int cmd_inspect(int argc, char **argv)
{
    struct inspect inspect = {0};
    const struct option options[] = {
        option_operand("PATH", &inspect.path, "a checkpoint: folder with config.json and *.safetensors"),
        option_flag("--json", &inspect.json, "report as one JSON object"),
    };
    const struct usage usage = {"inspect", "Shows the MoE layers of a checkpoint.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info device = MOE4_CONTEXT_INFO_INIT;
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    moe4_checkpoint *checkpoint = NULL;
    code = context_open(MOE4_ISA_AUTO, 1, &inspect.context, &device);
    if (!code && moe4_checkpoint_open(inspect.context, inspect.path, &checkpoint) != MOE4_OK)
        code = fail_library(inspect.context);
    if (!code && moe4_checkpoint_describe(checkpoint, &info) != MOE4_OK) code = fail_library(inspect.context);
    if (!code) code = inspect_layers(&inspect, checkpoint, &info);
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(inspect.context);
    return code;
}
