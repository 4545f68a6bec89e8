/* moe4 route: logits to ids and weights. */
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "progress.h"
#include "report.h"
#include "tensor.h"
#include "words.h"

struct route {
    int method; /* index of routing_words */
    int64_t top_k, n_group, topk_group;
    double scale;
    int no_renormalize, json;
    const char *input_file, *output_file;

    moe4_context *context;
    moe4_routing routing;
    int64_t n_tokens, n_experts;
    struct tensor_data logits, bias, token_ids, table;
    int32_t *ids;
    float *weights;
};

static int route_read(struct route *route, const moe4_tensors *tensors)
{
    const struct tensor_want logits = {
        "router_logits", 2, {ANY_SIZE, ANY_SIZE}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16}};
    int code = tensor_load(route->context, tensors, &logits, &route->logits);
    if (code) return code;
    int64_t T = route->n_tokens = route->logits.shape[0], E = route->n_experts = route->logits.shape[1];
    const struct tensor_want bias = {"correction_bias", 1, {E, 0}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16}};
    if (moe4_tensors_find(tensors, bias.name)) code = tensor_load(route->context, tensors, &bias, &route->bias);
    if (code || route->routing.method != MOE4_ROUTING_HASH) return code;
    const struct tensor_want token_ids = {"token_ids", 1, {T, 0}, {MOE4_DTYPE_I32}};
    const struct tensor_want table = {"tid2eid", 2, {ANY_SIZE, route->top_k}, {MOE4_DTYPE_I32, MOE4_DTYPE_I64}};
    code = tensor_load(route->context, tensors, &token_ids, &route->token_ids);
    if (!code) code = tensor_load(route->context, tensors, &table, &route->table);
    return code;
}

static int route_run(struct route *route, double *ms)
{
    int64_t R = route->n_tokens * route->top_k;
    int code = allocate(&route->ids, R, sizeof *route->ids, "expert ids");
    if (!code) code = allocate(&route->weights, R, sizeof *route->weights, "expert weights");
    if (code) return code;
    route->routing.correction_bias = route->bias.data;
    route->routing.correction_bias_dtype = route->bias.dtype;
    route->routing.hash_table = route->table.data;
    route->routing.hash_table_dtype = route->table.dtype;
    route->routing.vocab_size = route->table.shape[0];
    moe4_logits logits = MOE4_LOGITS_INIT;
    logits.logits = route->logits.data;
    logits.dtype = route->logits.dtype;
    double started = seconds_now();
    if (moe4_route(route->context, &route->routing, (int32_t)route->n_experts, route->n_tokens, &logits,
                   route->token_ids.data, route->ids, route->weights) != MOE4_OK)
        return fail_library(route->context);
    *ms = 1000 * (seconds_now() - started);
    return EXIT_OK;
}

static int route_save(const struct route *route)
{
    const struct tensor_output outputs[] = {
        {"topk_ids", MOE4_DTYPE_I32, 2, {route->n_tokens, route->top_k}, route->ids},
        {"topk_weights", MOE4_DTYPE_F32, 2, {route->n_tokens, route->top_k}, route->weights},
    };
    return tensors_save(route->context, route->output_file, outputs, 2);
}

static int route_report(const struct route *route, double ms)
{
    int64_t *load;
    int code = allocate(&load, route->n_experts, sizeof *load, "expert load");
    if (code) return code;
    for (int64_t p = 0; p < route->n_tokens * route->top_k; ++p)
        if (route->ids[p] >= 0) ++load[route->ids[p]];
    if (route->json) {
        json_t *object = json_object();
        json_put_text(object, "method", routing_words[route->method]);
        json_put_integer(object, "tokens", route->n_tokens);
        json_put_integer(object, "n_experts", route->n_experts);
        json_put_integer(object, "top_k", route->top_k);
        json_put_real(object, "ms", ms);
        json_put_text(object, "output", route->output_file);
        json_put_integers(object, "expert_load", load, route->n_experts);
        report_json(object);
    } else {
        report_title("%s, %lld tokens to %lld of %lld experts", routing_words[route->method],
                     (long long)route->n_tokens, (long long)route->top_k, (long long)route->n_experts);
        report_field("time", "%s", human_milliseconds(ms).text);
        report_field("output", "%s", route->output_file);
        report_expert_load(load, (int32_t)route->n_experts);
    }
    free(load);
    return EXIT_OK;
}

static int route_all(struct route *route)
{
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_tensors *tensors = NULL;
    double ms = 0;
    int code = context_open_simple(0, &route->context, &info);
    if (!code && moe4_tensors_open(route->context, route->input_file, &tensors) != MOE4_OK)
        code = fail_library(route->context);
    if (!code) code = route_read(route, tensors);
    if (!code) code = route_run(route, &ms);
    if (!code) code = route_save(route);
    if (!code) code = route_report(route, ms);
    moe4_tensors_close(tensors);
    return code;
}

int cmd_route(int argc, char **argv)
{
    struct route route = {.scale = 1};
    const struct option options[] = {
        option_required(option_word("--method", routing_words, &route.method, "how tokens choose experts")),
        option_required(option_integer("--top-k", "A", &route.top_k, 1, 128, "experts a token")),
        option_integer("--n-group", "G", &route.n_group, 0, 32767, "deepseek_v3: number of groups of experts"),
        option_integer("--topk-group", "g", &route.topk_group, 0, 32767, "deepseek_v3: groups a token may use"),
        option_number("--scale", "S", &route.scale, "multiplies the weights, once (1)"),
        option_flag("--no-renormalize", &route.no_renormalize, "sigmoid_renorm: leave the weights' sum alone"),
        option_required(option_text("--input", "FILE", &route.input_file,
                                    "safetensors file with router_logits [T, E], optionally correction_bias [E], for "
                                    "hash also token_ids [T] and tid2eid [vocabulary, A]")),
        option_required(option_text("--output", "FILE", &route.output_file,
                                    "safetensors file to write topk_ids and topk_weights to")),
        option_flag("--json", &route.json, "report as one JSON object"),
    };
    const struct usage usage = {"route", "Routes tokens: router logits to expert ids and weights.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    if (route.scale == 0) return fail_usage("--scale: 0 would make every weight 0");
    const moe4_routing routing = MOE4_ROUTING_INIT;
    route.routing = routing;
    route.routing.method = (moe4_routing_method)(route.method + 1);
    route.routing.top_k = (int32_t)route.top_k;
    route.routing.n_group = (int32_t)route.n_group;
    route.routing.topk_group = (int32_t)route.topk_group;
    route.routing.scaling_factor = (float)route.scale;
    route.routing.renormalize = route.no_renormalize ? MOE4_RENORMALIZE_NO : MOE4_RENORMALIZE_DEFAULT;
    code = route_all(&route);
    void *const blocks[] = {route.logits.data, route.bias.data, route.token_ids.data,
                            route.table.data,  route.ids,       route.weights};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) free(blocks[i]);
    moe4_context_destroy(route.context);
    return code;
}
