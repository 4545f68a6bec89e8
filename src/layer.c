#include "layer.h"

#include <string.h>
#include <sys/mman.h>

#include "backend.h"
#include "base/checked.h"
#include "base/convert.h"
#include "base/dims.h"
#include "base/dtype.h"
#include "context.h"

#define MAX_SIZE ((int64_t)1 << 24) /* of H, I and the router's width: products of two stay far below 2^63 */

/* ---- Validation ----------------------------------------------------------------------------------------------- */

static moe4_status validate_size(struct moe4_context *context, const char *name, int64_t size)
{
    if (size < BLOCK_SIZE || size > MAX_SIZE || size % BLOCK_SIZE)
        return context_fail(context, MOE4_EINVAL, "%s is %lld, expected a multiple of %d up to %lld", name,
                            (long long)size, BLOCK_SIZE, (long long)MAX_SIZE);
    return MOE4_OK;
}

static moe4_status validate_shapes(struct moe4_context *context, const moe4_layer_config *config)
{
    moe4_status status = validate_size(context, "hidden_size", config->hidden_size);
    if (!status) status = validate_size(context, "intermediate_size", config->intermediate_size);
    if (status) return status;
    if (config->output_size < 0 || config->output_size > config->hidden_size)
        return context_fail(context, MOE4_EINVAL, "output_size is %lld, expected 0 or up to hidden_size %lld",
                            (long long)config->output_size, (long long)config->hidden_size);
    int64_t stored = config->stored_intermediate_size;
    if (stored && (stored < config->intermediate_size || stored > MAX_SIZE))
        return context_fail(context, MOE4_EINVAL,
                            "stored_intermediate_size is %lld, expected 0 or %lld (intermediate_size) to %lld",
                            (long long)stored, (long long)config->intermediate_size, (long long)MAX_SIZE);
    return MOE4_OK;
}

/* Highest local expert that a map names, or -1. */
static int32_t map_highest(const int32_t *map, int32_t n_experts)
{
    int32_t highest = -1;
    for (int32_t e = 0; e < n_experts; e++)
        if (map[e] > highest) highest = map[e];
    return highest;
}

static int32_t local_count(const moe4_layer_config *config)
{
    if (config->n_local_experts) return config->n_local_experts;
    if (config->expert_map) return map_highest(config->expert_map, config->n_experts) + 1;
    return config->n_experts - config->first_expert;
}

static moe4_status validate_experts(struct moe4_context *context, const moe4_layer_config *config)
{
    int32_t E = config->n_experts, first = config->first_expert;
    if (E < 1 || E > MAX_EXPERTS)
        return context_fail(context, MOE4_EINVAL, "n_experts is %d, expected 1 to %d", E, MAX_EXPERTS);
    if (config->n_local_experts < 0 || config->n_local_experts > E)
        return context_fail(context, MOE4_EINVAL, "n_local_experts is %d, expected 0 to n_experts %d",
                            config->n_local_experts, E);
    if (config->expert_map && first)
        return context_fail(context, MOE4_EINVAL, "first_expert is %d, expected 0 beside an expert_map", first);
    if (first < 0 || first >= E)
        return context_fail(context, MOE4_EINVAL, "first_expert is %d, expected 0 to %d", first, E - 1);
    int32_t L = local_count(config);
    if (!config->expert_map && L > E - first)
        return context_fail(context, MOE4_EINVAL, "first_expert %d + n_local_experts %d is more than n_experts %d",
                            first, L, E);
    if (config->expert_map)
        for (int32_t e = 0; e < E; e++)
            if (config->expert_map[e] < -1 || config->expert_map[e] >= L)
                return context_fail(context, MOE4_EINVAL, "expert_map[%d] is %d, expected -1 to %d", e,
                                    config->expert_map[e], L - 1);
    if (L < 1) return context_fail(context, MOE4_EINVAL, "expert_map names no local expert");
    return MOE4_OK;
}

static moe4_status validate_router(struct moe4_context *context, const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    if (!router->weight) {
        if (router->bias) return context_fail(context, MOE4_EINVAL, "router.bias is given, but no router.weight");
        return MOE4_OK;
    }
    if (config->routing.method == MOE4_ROUTING_NONE)
        return context_fail(context, MOE4_EINVAL, "router.weight is given, but routing.method is none");
    if (!dtype_is_float(router->weight_dtype))
        return context_fail(context, MOE4_EINVAL, "router.weight_dtype is %s, expected f32, f16 or bf16",
                            dtype_name(router->weight_dtype));
    if (router->bias && !dtype_is_float(router->bias_dtype))
        return context_fail(context, MOE4_EINVAL, "router.bias_dtype is %s, expected f32, f16 or bf16",
                            dtype_name(router->bias_dtype));
    if (router->hidden_size < 0 || router->hidden_size > MAX_SIZE)
        return context_fail(context, MOE4_EINVAL, "router.hidden_size is %lld, expected 0 to %lld",
                            (long long)router->hidden_size, (long long)MAX_SIZE);
    return MOE4_OK;
}

moe4_status layer_validate(struct moe4_context *context, const moe4_layer_config *config)
{
    if ((unsigned)config->compute > MOE4_COMPUTE_INT8)
        return context_fail(context, MOE4_EINVAL, "config.compute is %d, expected bf16, mxfp8, fp8 or int8",
                            config->compute);
    moe4_status status = activation_validate(context, config);
    if (!status) status = validate_experts(context, config);
    if (!status) status = route_validate(context, &config->routing, config->n_experts);
    if (!status) status = validate_router(context, config);
    if (!status) status = validate_shapes(context, config);
    return status;
}

/* ---- Construction --------------------------------------------------------------------------------------------- */

static void *allocate(struct moe4_context *context, const char *what, size_t bytes)
{
    void *memory = memory_allocate_zeroed(&context->allocator, bytes);
    if (!memory) context_fail_memory(context, what, bytes);
    return memory;
}

static size_t params_bytes(const struct moe4_layer *layer)
{
    return (size_t)layer->L * sizeof *layer->params;
}

static size_t map_bytes(const struct moe4_layer *layer)
{
    return (size_t)layer->E * sizeof *layer->local_of;
}

static size_t router_weight_bytes(const struct moe4_layer *layer)
{
    return (size_t)layer->E * (size_t)layer->router_size * sizeof *layer->router_weight;
}

static size_t router_bias_bytes(const struct moe4_layer *layer)
{
    return (size_t)layer->E * sizeof *layer->router_bias;
}

static moe4_status create_map(struct moe4_context *context, struct moe4_layer *layer, const moe4_layer_config *config)
{
    if (!(layer->local_of = allocate(context, "the expert map", map_bytes(layer)))) return MOE4_ENOMEM;
    for (int32_t e = 0; e < layer->E; e++) {
        int32_t local = config->expert_map ? config->expert_map[e] : e - config->first_expert;
        layer->local_of[e] = local >= 0 && local < layer->L ? local : -1;
    }
    return MOE4_OK;
}

static moe4_status create_params(struct moe4_context *context, struct moe4_layer *layer,
                                 const moe4_layer_config *config)
{
    moe4_status status = activation_validate_values(context, config, layer->L);
    if (status) return status;
    if (!(layer->params = allocate(context, "activation parameters", params_bytes(layer)))) return MOE4_ENOMEM;
    for (int32_t l = 0; l < layer->L; l++) layer->params[l] = activation_resolve(config, l);
    return MOE4_OK;
}

static moe4_status create_routing(struct moe4_context *context, struct moe4_layer *layer,
                                  const moe4_layer_config *config)
{
    layer->router.top_k = config->routing.top_k;
    if (config->routing.method == MOE4_ROUTING_NONE) return MOE4_OK;
    moe4_status status = route_store_bytes(context, &config->routing, layer->E, &layer->router_store_bytes);
    if (status) return status;
    layer->router_store = allocate(context, "the router's bias and table", layer->router_store_bytes);
    if (!layer->router_store) return MOE4_ENOMEM;
    return route_init(context, &layer->router, &config->routing, layer->E, layer->router_store);
}

static moe4_status create_router_weights(struct moe4_context *context, struct moe4_layer *layer,
                                         const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    if (!router->weight) return MOE4_OK;
    layer->router_size = router->hidden_size ? router->hidden_size : layer->H;
    if (!(layer->router_weight = allocate(context, "the router's weights", router_weight_bytes(layer))) ||
        !(layer->router_bias = allocate(context, "the router's bias", router_bias_bytes(layer))))
        return MOE4_ENOMEM;
    for (int64_t i = 0; i < layer->E * layer->router_size; i++)
        layer->router_weight[i] = load_f32(router->weight, router->weight_dtype, i);
    for (int32_t e = 0; router->bias && e < layer->E; e++)
        layer->router_bias[e] = load_f32(router->bias, router->bias_dtype, e);
    return MOE4_OK;
}

moe4_status layer_create(struct moe4_context *context, const moe4_layer_config *config, struct moe4_layer **result)
{
    struct moe4_layer *layer = allocate(context, "a layer", sizeof *layer);
    if (!layer) return MOE4_ENOMEM;
    layer->allocator = context->allocator;
    layer->backend = context->backend;
    layer->H = config->hidden_size;
    layer->I = config->intermediate_size;
    layer->output_size = config->output_size ? config->output_size : layer->H;
    layer->stored_intermediate_size = config->stored_intermediate_size ? config->stored_intermediate_size : layer->I;
    layer->E = config->n_experts;
    layer->L = local_count(config);
    layer->first_expert = config->first_expert;
    layer->gate_up = config->gate_up;
    layer->activation = config->activation;
    layer->compute = config->compute;
    layer->alpha = config->alpha.presence;
    layer->beta = config->beta.presence;
    layer->limit = config->limit.presence;
    layer->method = config->routing.method;

    moe4_status status = create_map(context, layer, config);
    if (!status) status = create_params(context, layer, config);
    if (!status) status = create_routing(context, layer, config);
    if (!status) status = create_router_weights(context, layer, config);
    if (status) {
        layer_destroy(layer);
        return status;
    }
    *result = layer;
    return MOE4_OK;
}

static moe4_status check_matrix(struct moe4_context *context, const moe4_matrix *matrix, int64_t K, int32_t l,
                                const char *name)
{
    if (!matrix->codes || !matrix->scales)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.%s is NULL", l, name,
                            matrix->codes ? "scales" : "codes");
    if (matrix->codes_row_bytes && matrix->codes_row_bytes < K / 2)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.codes_row_bytes is %lld, expected at least %lld", l,
                            name, (long long)matrix->codes_row_bytes, (long long)K / 2);
    if (matrix->scales_row_bytes && matrix->scales_row_bytes < K / BLOCK_SIZE)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.scales_row_bytes is %lld, expected at least %lld", l,
                            name, (long long)matrix->scales_row_bytes, (long long)K / BLOCK_SIZE);
    if (matrix->bias && !dtype_is_float(matrix->bias_dtype))
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.bias_dtype is %s, expected f32, f16 or bf16", l, name,
                            dtype_name(matrix->bias_dtype));
    return MOE4_OK;
}

moe4_status layer_source_failed(struct moe4_context *context, int32_t l, moe4_status status)
{
    return context->message[0] ? status : context_fail(context, status, "expert %d: its source failed", l);
}

static moe4_status ask_source(struct moe4_context *context, const struct moe4_layer *layer,
                              moe4_status (*ask)(void *user, int32_t local_expert, moe4_expert *expert), void *user,
                              int32_t l, moe4_expert *expert)
{
    *expert = (moe4_expert){0};
    context->message[0] = '\0';
    moe4_status status = ask(user, l, expert);
    if (status) return layer_source_failed(context, l, status);
    status = check_matrix(context, &expert->gate_up, layer->H, l, "gate_up");
    if (!status) status = check_matrix(context, &expert->down, layer->I, l, "down");
    return status;
}

moe4_status layer_read_expert(struct moe4_context *context, const struct moe4_layer *layer,
                              const moe4_expert_source *source, int32_t l, moe4_expert *expert)
{
    return ask_source(context, layer, source->read, source->user, l, expert);
}

moe4_status layer_describe_expert(struct moe4_context *context, const struct moe4_layer *layer,
                                  const moe4_expert_source *source, int32_t l, moe4_expert *expert)
{
    return ask_source(context, layer, source->describe, source->user, l, expert);
}

int64_t layer_weight_bytes(const struct moe4_layer *layer)
{
    const int64_t gate_up_rows = activation_has_gate(layer->activation) ? 2 * layer->I : layer->I;
    const int64_t codes = gate_up_rows * layer->H + layer->H * layer->I;
    return layer->L * (codes / 2 + codes / BLOCK_SIZE);
}

moe4_status layer_size_parts(struct moe4_context *context, const struct moe4_layer *layer, struct layer_part *parts,
                             int32_t n_parts)
{
    for (int32_t i = 0; i < n_parts; i++) {
        int64_t n_bytes = strcmp(parts[i].dtype, "F32") == 0 ? 4 : 1;
        for (int32_t d = 0; d < parts[i].rank; d++)
            if (!i64_multiply(n_bytes, parts[i].shape[d], &n_bytes))
                return context_fail(context, MOE4_EINVAL, "%s of %d experts does not fit the address space",
                                    parts[i].name, layer->L);
        parts[i].n_bytes = n_bytes;
    }
    return MOE4_OK;
}

moe4_status layer_allocate_parts(struct moe4_context *context, struct moe4_layer *layer)
{
    struct layer_part parts[MAX_PARTS];
    int32_t n_parts;
    moe4_status status = layer->backend->list_parts(context, layer, parts, &n_parts);
    for (int32_t i = 0; !status && i < n_parts; i++) {
        if (*parts[i].slot) continue;
        *parts[i].slot = layer->backend->allocate_part(layer, (size_t)parts[i].n_bytes);
        if (!*parts[i].slot) status = context_fail_memory(context, parts[i].name, (size_t)parts[i].n_bytes);
    }
    return status;
}

/* Nothing is allocated for a layer whose parts cannot be listed, so there is nothing to say and no context to say it.
 */
static void release_parts(struct moe4_layer *layer)
{
    struct moe4_context nobody;
    struct layer_part parts[MAX_PARTS];
    int32_t n_parts;
    if (layer->backend->list_parts(&nobody, layer, parts, &n_parts)) return;
    for (int32_t i = 0; i < n_parts; i++) {
        size_t from_mapping = (size_t)((char *)*parts[i].slot - (char *)layer->mapping);
        int is_mapped = layer->mapping && from_mapping < layer->mapping_bytes;
        if (*parts[i].slot && !is_mapped) layer->backend->release_part(layer, *parts[i].slot, (size_t)parts[i].n_bytes);
    }
    if (layer->mapping) munmap(layer->mapping, layer->mapping_bytes);
}

void layer_destroy(struct moe4_layer *layer)
{
    if (!layer) return;
    moe4_allocator allocator = layer->allocator;
    if (layer->prepared) {
        release_parts(layer);
        layer->backend->release(layer);
    }
    memory_release(&allocator, layer->router_bias, router_bias_bytes(layer));
    memory_release(&allocator, layer->router_weight, router_weight_bytes(layer));
    memory_release(&allocator, layer->router_store, layer->router_store_bytes);
    memory_release(&allocator, layer->params, params_bytes(layer));
    memory_release(&allocator, layer->local_of, map_bytes(layer));
    memory_release(&allocator, layer, sizeof *layer);
}
