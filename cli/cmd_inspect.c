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
#include "words.h"

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

static void put_param(json_t *object, const char *key, const moe4_param *param)
{
    if (param->presence == MOE4_ABSENT)
        json_object_set_new(object, key, json_null());
    else if (param->presence == MOE4_SAME)
        json_put_real(object, key, param->value);
    else
        json_put_text(object, key, "per expert");
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static json_t *tensors_json(const moe4_tensors *tensors, int32_t layer)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < moe4_tensors_count(tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        if (!tensor_is_of_layer(tensor->name, layer)) continue;
        json_t *object = json_object();
        json_put_text(object, "name", tensor->name);
        json_put_text(object, "dtype", tensor->dtype);
        json_put_integers(object, "shape", tensor->shape, tensor->rank);
        json_put_integer(object, "bytes", tensor->n_bytes);
        json_array_append_new(list, object);
    }
    return list;
}

static json_t *router_json(const moe4_router *router)
{
    if (!router->weight) return json_null();
    json_t *object = json_object();
    json_put_text(object, "weight_dtype", dtype_word(router->weight_dtype));
    json_put_truth(object, "bias", router->bias != NULL);
    return object;
}

static json_t *layer_json(const struct model *model)
{
    const moe4_layer_config *config = model->config;
    json_t *object = json_object();
    json_put_integer(object, "layer", model->layer);
    json_put_integer(object, "n_experts", config->n_experts);
    json_put_integer(object, "top_k", config->routing.top_k);
    json_put_integer(object, "hidden_size", config->hidden_size);
    json_put_integer(object, "intermediate_size", config->intermediate_size);
    json_put_text(object, "gate_up", gate_up_word(config->gate_up));
    json_put_text(object, "activation", activation_word(config->activation));
    put_param(object, "alpha", &config->alpha);
    put_param(object, "beta", &config->beta);
    put_param(object, "limit", &config->limit);
    json_put_text(object, "routing", routing_word(config->routing.method));
    json_object_set_new(object, "router", router_json(&config->router));
    json_put_integer(object, "weight_bytes", weight_bytes(config));
    json_object_set_new(object, "tensors", tensors_json(moe4_checkpoint_tensors(model->checkpoint), model->layer));
    return object;
}

/* ---- Text -------------------------------------------------------------------------------------------------------- */

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
                 (long long)config->intermediate_size, gate_up_word(config->gate_up));
    report_field("activation", "%s, alpha %s, beta %s, limit %s", activation_word(config->activation),
                 param_text(&config->alpha).text, param_text(&config->beta).text, param_text(&config->limit).text);
    if (config->router.weight)
        report_field("router", "%s, %s weights%s", routing_word(config->routing.method),
                     dtype_word(config->router.weight_dtype), config->router.bias ? ", bias" : "");
    else
        report_field("router", "%s, no weights", routing_word(config->routing.method));
    print_tensors(moe4_checkpoint_tensors(model->checkpoint), model->layer);
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

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
    if (!code && inspect->json) {
        json_t *object = json_object();
        json_put_text(object, "path", inspect->path);
        json_put_text(object, "family", info->family);
        json_put_text(object, "layout", info->layout);
        json_put_integer(object, "n_model_layers", info->n_model_layers);
        json_put_integer(object, "n_moe_layers", info->n_moe_layers);
        json_put_integer(object, "n_tensors", n_tensors);
        json_put_integer(object, "bytes", tensor_bytes);
        json_put_integer(object, "expert_weight_bytes", expert_bytes);
        json_object_set(object, "layers", layers);
        report_json(object);
    } else if (!code) {
        report_field("total", "%s of expert weights in %s", human_bytes((double)expert_bytes).text,
                     human_plural(info->n_moe_layers, "layer").text);
    }
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
