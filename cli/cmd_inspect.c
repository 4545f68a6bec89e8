/* moe4 inspect: what a checkpoint holds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "command.h"
#include "health.h"
#include "message.h"
#include "options.h"
#include "report.h"
#include "support.h"
#include "svg.h"
#include "tensor.h"
#include "words.h"

/* A tensor to show: of experts that have their own, the first stands for all. */
struct shown_tensor {
    const moe4_tensor *tensor;
    moe4_tensor_role role;
    int32_t layer;
};

struct inspect {
    const char *path;
    int json;
    moe4_context *context;
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info;
    struct shown_tensor *shown;
    int64_t n_shown, n_tensors, tensor_bytes;

    int looks_at_weights;
    const char *plot; /* NULL = none */
    int32_t n_threads;
    struct health health;
    int backend;            /* moe4_device that is asked whether it can run the layers; -1 = none */
    struct machine machine; /* that */
};

/* Bytes of a layer's MXFP4 weights: 17 for every 32 of 3*H*I weights an expert. */
static int64_t weight_bytes(const moe4_layer_config *config)
{
    int32_t n_matrices = config->gate_up == MOE4_GATE_UP_NONE ? 2 : 3;
    return config->n_experts * (n_matrices * config->hidden_size * config->intermediate_size / 32 * 17);
}

/* What comes before and after the expert's number in a name; the number is -1 where all experts share a tensor. */
struct expert_name {
    const char *before, *after;
    long number;
};

static struct expert_name expert_name(const char *name)
{
    static const char word[] = "experts.";
    char *end;
    const char *found = strstr(name, word);
    long number = found ? strtol(found + sizeof word - 1, &end, 10) : -1;
    if (!found || end == found + sizeof word - 1 || *end != '.') return (struct expert_name){name, "", -1};
    return (struct expert_name){found + sizeof word - 1, end, number};
}

/* Whether a tensor is one expert's, of many that are alike. */
static int is_numbered(const struct shown_tensor *shown)
{
    int is_expert = shown->role == MOE4_ROLE_EXPERT || shown->role == MOE4_ROLE_UNUSED;
    return is_expert && expert_name(shown->tensor->name).number >= 0;
}

struct label {
    char text[256];
};

/* The name, with * for the number of an expert. */
static struct label tensor_text(const struct shown_tensor *shown)
{
    struct label result;
    const char *name = shown->tensor->name;
    struct expert_name parts = expert_name(name);
    if (is_numbered(shown))
        snprintf(result.text, sizeof result.text, "%.*s*%s", (int)(parts.before - name), name, parts.after);
    else
        snprintf(result.text, sizeof result.text, "%s", name);
    return result;
}

/* Tensors that this one stands for. */
static int32_t tensor_count(const struct shown_tensor *shown, const moe4_layer_config *config)
{
    return is_numbered(shown) ? config->n_experts : 1;
}

static const char *role_word(moe4_tensor_role role)
{
    static const char *const words[] = {[MOE4_ROLE_OTHER] = "other",
                                        [MOE4_ROLE_EXPERT] = "expert",
                                        [MOE4_ROLE_ROUTER] = "router",
                                        [MOE4_ROLE_SHARED_EXPERT] = "shared expert",
                                        [MOE4_ROLE_LATENT] = "latent projection",
                                        [MOE4_ROLE_UNUSED] = "unused"};
    return words[role];
}

/* One look at every tensor: what there is to show of MoE layers, and the size of all. */
static int collect_tensors(struct inspect *inspect)
{
    const moe4_tensors *tensors = moe4_checkpoint_tensors(inspect->checkpoint);
    inspect->n_tensors = moe4_tensors_count(tensors);
    inspect->shown = malloc((size_t)(inspect->n_tensors + 1) * sizeof *inspect->shown);
    if (!inspect->shown) return fail("out of memory for %lld tensors", (long long)inspect->n_tensors);
    for (int64_t i = 0; i < inspect->n_tensors; ++i) {
        struct shown_tensor shown = {.tensor = moe4_tensors_get(tensors, i)};
        inspect->tensor_bytes += shown.tensor->n_bytes;
        shown.role = moe4_checkpoint_role(inspect->checkpoint, shown.tensor, &shown.layer);
        if (shown.role == MOE4_ROLE_OTHER) continue;
        if (is_numbered(&shown) && expert_name(shown.tensor->name).number > 0) continue;
        inspect->shown[inspect->n_shown++] = shown;
    }
    return EXIT_OK;
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

static json_t *tensors_json(const struct inspect *inspect, int32_t layer, const moe4_layer_config *config)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < inspect->n_shown; ++i) {
        const struct shown_tensor *shown = &inspect->shown[i];
        const moe4_tensor *tensor = shown->tensor;
        if (shown->layer != layer) continue;
        int32_t count = tensor_count(shown, config);
        json_t *object = json_object();
        json_put_text(object, "name", tensor_text(shown).text);
        json_put_text(object, "role", role_word(shown->role));
        json_put_text(object, "dtype", tensor->dtype);
        json_put_integers(object, "shape", tensor->shape, tensor->rank);
        json_put_integer(object, "count", count);
        json_put_integer(object, "bytes", count * tensor->n_bytes);
        json_array_append_new(list, object);
    }
    return list;
}

static json_t *router_json(const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    const moe4_routing *routing = &config->routing;
    if (router->weight_dtype == MOE4_DTYPE_NONE) return json_null();
    json_t *object = json_object();
    json_put_text(object, "weight_dtype", dtype_word(router->weight_dtype));
    json_put_truth(object, "bias", router->bias_dtype != MOE4_DTYPE_NONE);
    json_put_truth(object, "selection_bias", routing->correction_bias_dtype != MOE4_DTYPE_NONE);
    json_put_integer(object, "hidden_size", router->hidden_size ? router->hidden_size : config->hidden_size);
    json_put_real(object, "scaling_factor", routing->scaling_factor != 0.0f ? routing->scaling_factor : 1.0f);
    json_put_integer(object, "n_group", routing->n_group);
    json_put_integer(object, "topk_group", routing->topk_group);
    return object;
}

static json_t *layer_json(const struct inspect *inspect, int32_t layer, const moe4_layer_config *config)
{
    json_t *object = json_object();
    json_put_integer(object, "layer", layer);
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
    json_object_set_new(object, "router", router_json(config));
    json_put_integer(object, "weight_bytes", weight_bytes(config));
    json_object_set_new(object, "tensors", tensors_json(inspect, layer, config));
    return object;
}

/* ---- Text -------------------------------------------------------------------------------------------------------- */

static void print_tensors(const struct inspect *inspect, int32_t layer, const moe4_layer_config *config)
{
    for (int64_t i = 0; i < inspect->n_shown; ++i) {
        const struct shown_tensor *shown = &inspect->shown[i];
        const moe4_tensor *tensor = shown->tensor;
        if (shown->layer != layer) continue;
        int32_t count = tensor_count(shown, config);
        printf("    %-52s %-7s %-20s %8s", tensor_text(shown).text, tensor->dtype,
               shape_show(tensor->rank, tensor->shape).text, human_bytes((double)count * (double)tensor->n_bytes).text);
        if (count > 1) printf(" in %d", count);
        printf(shown->role > MOE4_ROLE_ROUTER ? "  (%s: not run)\n" : "\n", role_word(shown->role));
    }
}

static void print_router(const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    const moe4_routing *routing = &config->routing;
    report_field("router", "%s, %s weights%s%s", routing_word(routing->method), dtype_word(router->weight_dtype),
                 router->bias_dtype ? ", bias" : "", routing->correction_bias_dtype ? ", selection bias" : "");
    if (routing->n_group > 1) report_field("groups", "%d of %d", routing->topk_group, routing->n_group);
    if (routing->scaling_factor != 0.0f) report_field("factor", "%g of all weights", (double)routing->scaling_factor);
    if (router->hidden_size)
        report_field("latent", "experts see %lld, the router %lld", (long long)config->hidden_size,
                     (long long)router->hidden_size);
}

static void print_layer(const struct inspect *inspect, int32_t layer, const moe4_layer_config *config)
{
    report_title("Layer %d", layer);
    report_field("experts", "%d, %d a token, MXFP4, %s", config->n_experts, config->routing.top_k,
                 human_bytes((double)weight_bytes(config)).text);
    report_field("sizes", "hidden %lld, intermediate %lld, gate and up rows %s", (long long)config->hidden_size,
                 (long long)config->intermediate_size, gate_up_word(config->gate_up));
    report_field("activation", "%s, alpha %s, beta %s, limit %s", activation_word(config->activation),
                 param_text(&config->alpha).text, param_text(&config->beta).text, param_text(&config->limit).text);
    print_router(config);
    print_tensors(inspect, layer, config);
}

static void print_model(const struct inspect *inspect)
{
    const moe4_checkpoint_info *info = &inspect->info;
    report_title("%s", inspect->path);
    report_field("model", "%s, layout \"%s\", MoE layers here: %d of %d", info->family, info->layout,
                 info->n_moe_layers, info->n_model_layers);
    if (info->n_extra_layers)
        report_field("prediction", "%s more, numbered from %d", human_plural(info->n_extra_layers, "layer").text,
                     info->n_model_layers);
    if (info->n_other_layers)
        report_field("others", "%s of MoE in another precision: not run",
                     human_plural(info->n_other_layers, "layer").text);
    if (info->n_shared_experts)
        report_field("beside", "%s a layer: run runs the routed part only",
                     human_plural(info->n_shared_experts, "shared expert").text);
    report_field("tensors", "%lld, %s", (long long)inspect->n_tensors, human_bytes((double)inspect->tensor_bytes).text);
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

/* Reads a layer's weights and says what they look like, as text or into the last of `layers`. */
static int inspect_weights(struct inspect *inspect, moe4_layer_reader *reader, int32_t layer, json_t *layers)
{
    struct health *health = &inspect->health;
    int code = health_scan(health, inspect->context, reader, layer, inspect->n_threads);
    if (code) return code;
    const struct layer_health *found = &health->layers[health->n_layers - 1];
    if (inspect->json)
        json_object_set_new(json_array_get(layers, json_array_size(layers) - 1), "health", health_layer_json(found));
    else
        health_report_layer(found);
    return EXIT_OK;
}

/* Says whether the machine can run a layer, likewise. */
static void inspect_support(const struct inspect *inspect, const moe4_layer_config *config, json_t *layers)
{
    if (inspect->json)
        json_object_set_new(json_array_get(layers, json_array_size(layers) - 1), "runs",
                            support_layer_json(&inspect->machine, config));
    else
        support_layer_print(&inspect->machine, config);
}

/* Describes one layer, as text or into `layers`, and adds up its weights. */
static int inspect_layer(struct inspect *inspect, int32_t layer, json_t *layers, int64_t *total_bytes)
{
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer_reader *reader;
    if (!inspect->looks_at_weights) options.router = MOE4_ROUTER_SKIP;
    if (moe4_layer_reader_open(inspect->context, inspect->checkpoint, layer, &options, &reader) != MOE4_OK)
        return fail_library(inspect->context);
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    *total_bytes += weight_bytes(config);
    if (inspect->json)
        json_array_append_new(layers, layer_json(inspect, layer, config));
    else
        print_layer(inspect, layer, config);
    if (inspect->backend >= 0) inspect_support(inspect, config, layers);
    int code = inspect->looks_at_weights ? inspect_weights(inspect, reader, layer, layers) : EXIT_OK;
    moe4_layer_reader_close(reader);
    return code;
}

static void report_model(const struct inspect *inspect, json_t *layers, int64_t expert_bytes)
{
    const moe4_checkpoint_info *info = &inspect->info;
    json_t *object = json_object();
    json_put_text(object, "path", inspect->path);
    json_put_text(object, "family", info->family);
    json_put_text(object, "layout", info->layout);
    json_put_integer(object, "n_model_layers", info->n_model_layers);
    json_put_integer(object, "n_moe_layers", info->n_moe_layers);
    json_put_integer(object, "n_extra_layers", info->n_extra_layers);
    json_put_integer(object, "n_other_layers", info->n_other_layers);
    json_put_integer(object, "n_shared_experts", info->n_shared_experts);
    json_put_integer(object, "model_hidden_size", info->model_hidden_size);
    json_put_integer(object, "n_tensors", inspect->n_tensors);
    json_put_integer(object, "bytes", inspect->tensor_bytes);
    json_put_integer(object, "expert_weight_bytes", expert_bytes);
    json_object_set(object, "layers", layers);
    if (inspect->backend >= 0) json_object_set_new(object, "machine", support_machine_json(&inspect->machine));
    if (inspect->looks_at_weights) json_object_set_new(object, "health", health_json(&inspect->health));
    report_json(object);
}

/* The end of a report for people. */
static void report_total(const struct inspect *inspect, int64_t expert_bytes)
{
    report_title("All layers");
    report_field("total", "%s of expert weights in %s", human_bytes((double)expert_bytes).text,
                 human_plural(inspect->info.n_moe_layers, "layer").text);
    if (inspect->looks_at_weights)
        health_report(&inspect->health);
    else
        report_field("health", "not looked at; --health reads the weights");
}

static int inspect_layers(struct inspect *inspect)
{
    int64_t expert_bytes = 0;
    int code = collect_tensors(inspect);
    if (!code && !inspect->json) print_model(inspect);
    if (!code && !inspect->json && inspect->backend >= 0) support_machine_print(&inspect->machine);
    json_t *layers = json_array();
    for (int32_t i = 0; !code && i < inspect->info.n_moe_layers; ++i)
        code = inspect_layer(inspect, moe4_checkpoint_layer_number(inspect->checkpoint, i), layers, &expert_bytes);
    health_finish(&inspect->health);
    if (!code && inspect->plot) code = health_plot(&inspect->health, inspect->path, inspect->plot);
    if (!code && inspect->json)
        report_model(inspect, layers, expert_bytes);
    else if (!code)
        report_total(inspect, expert_bytes);
    json_decref(layers);
    return code;
}

int cmd_inspect(int argc, char **argv)
{
    struct inspect inspect = {.backend = -1};
    const struct option options[] = {
        option_operand("PATH", &inspect.path,
                       "a checkpoint: folder with config.json and *.safetensors, or a .gguf file"),
        option_flag("--health", &inspect.looks_at_weights, "read all expert weights and say whether they look healthy"),
        option_text("--plot", "FILE", &inspect.plot, "draw the scales of all layers as SVG; reads the weights too"),
        option_word("--backend", backend_words, &inspect.backend,
                    "also say whether this machine's CPU or GPU can run the layers"),
        option_flag("--json", &inspect.json, "report as one JSON object"),
    };
    const struct usage usage = {"inspect", "Shows the MoE layers of a checkpoint.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info device = MOE4_CONTEXT_INFO_INIT;
    inspect.info = (moe4_checkpoint_info)MOE4_CHECKPOINT_INFO_INIT;
    if (inspect.plot && (code = svg_check(inspect.plot))) return code;
    if (inspect.plot) inspect.looks_at_weights = 1;
    code = context_open_simple(inspect.looks_at_weights ? 0 : 1, &inspect.context, &device);
    inspect.n_threads = device.n_threads;
    if (!code && inspect.backend >= 0)
        code = machine_open(&(struct machine_choice){.device = (moe4_device)inspect.backend}, &inspect.machine);
    if (!code && moe4_checkpoint_open(inspect.context, inspect.path, &inspect.checkpoint) != MOE4_OK)
        code = fail_library(inspect.context);
    if (!code && moe4_checkpoint_describe(inspect.checkpoint, &inspect.info) != MOE4_OK)
        code = fail_library(inspect.context);
    if (!code) code = inspect_layers(&inspect);
    free(inspect.shown);
    health_release(&inspect.health);
    moe4_checkpoint_close(inspect.checkpoint);
    machine_close(&inspect.machine);
    moe4_context_destroy(inspect.context);
    return code;
}
