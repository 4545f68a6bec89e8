#include "cuda/prepared.h"

#include <string.h>

#include "backend.h"
#include "context.h"
#include "cpu/route_method.h"
#include "cuda/arena.h"
#include "cuda/device.h"
#include "cuda/fill.h"

/* Routed rows of a chunk: T = 8192 with 16 experts a token is one, and every expert of the largest models has work for
 * the tensor cores in it, so that reading all weights once a chunk costs nothing; yet the buffers of a huge batch stay
 * at a few gigabytes. */
enum { CHUNK_ROWS = 131072 };

/* ---- Sizes ------------------------------------------------------------------------------------------------------ */

static void init_matrix(struct cuda_matrix *matrix, struct cuda_row_order order, int64_t K)
{
    *matrix = (struct cuda_matrix){.order = order, .rows = cuda_stored_rows(&order), .K = K};
    matrix->n_tiles = (int32_t)cuda_tile_count(&matrix->order);
    matrix->n_steps = (int32_t)cuda_step_count(K);
    matrix->expert_bytes = (size_t)matrix->n_tiles * (size_t)matrix->n_steps * CUDA_STEP_BYTES;
}

/* ---- What routing needs ------------------------------------------------------------------------------------------ */

static moe4_routing_method method_of(const struct router *router)
{
    moe4_routing_method method = MOE4_ROUTING_NONE;
    while (router->method && route_method_of(method) != router->method) method++;
    return method;
}

static void init_router(struct cuda_prepared *prepared, const struct moe4_layer *layer)
{
    const struct router *router = &layer->router;
    prepared->router = (struct device_router){.method = method_of(router),
                                              .n_experts = layer->E,
                                              .top_k = router->top_k,
                                              .n_group = router->n_group,
                                              .topk_group = router->topk_group,
                                              .renormalize = router->renormalize,
                                              .scale = router->scale,
                                              .vocab_size = router->vocab_size};
}

/* ---- Allocation -------------------------------------------------------------------------------------------------- */

/* All but the parts: what routing and the epilogues need of the layer's config. */
static moe4_status allocate_small(struct moe4_context *context, struct moe4_layer *layer)
{
    struct cuda_prepared *prepared = layer->prepared;
    const size_t router_bytes = (size_t)layer->router_size * sizeof(float);
    const struct router *router = &layer->router;
    struct arena arena = {0};
    size_t params = arena_reserve(&arena, layer->L, sizeof *prepared->params),
           local_of = arena_reserve(&arena, layer->E, sizeof(int32_t));
    size_t bias = arena_reserve(&arena, layer->E, sizeof(float));
    size_t table = arena_reserve(&arena, router->vocab_size, (size_t)router->top_k * sizeof(int32_t));
    size_t weight = arena_reserve(&arena, layer->E, router_bytes),
           router_bias = arena_reserve(&arena, layer->E, sizeof(float));
    if (arena.total == SIZE_MAX)
        return context_fail(context, MOE4_EINVAL, "a router of %d experts does not fit the address space", layer->E);
    char *memory = prepared->memory = device_allocate(arena.total);
    if (!memory)
        return context_fail(context, MOE4_ENOMEM, "out of device memory: %zu bytes for a layer's routing", arena.total);
    prepared->params = (struct activation_params *)(memory + params);
    prepared->local_of = (int32_t *)(memory + local_of);
    if (router->bias) prepared->router.bias = (float *)(memory + bias);
    if (router->table) prepared->router.table = (int32_t *)(memory + table);
    prepared->router_weight = (float *)(memory + weight);
    prepared->router_bias = (float *)(memory + router_bias);
    return MOE4_OK;
}

static struct layer_part tiles_part(const char *name, struct cuda_matrix *matrix, int32_t L)
{
    return (struct layer_part){.name = name,
                               .dtype = "U8",
                               .rank = 3,
                               .shape = {L, matrix->n_tiles, (int64_t)matrix->n_steps * CUDA_STEP_BYTES},
                               .slot = (void **)&matrix->packed};
}

static struct layer_part bias_part(const char *name, struct cuda_matrix *matrix, int32_t L)
{
    return (struct layer_part){.name = name,
                               .dtype = "F32",
                               .rank = 3,
                               .shape = {L, matrix->n_tiles, CUDA_TILE_ROWS},
                               .slot = (void **)&matrix->bias};
}

static struct layer_part unit_part(const char *name, struct cuda_matrix *matrix, int32_t L)
{
    return (struct layer_part){.name = name, .dtype = "F32", .rank = 1, .shape = {L}, .slot = (void **)&matrix->unit};
}

static struct layer_part tile_base_part(const char *name, struct cuda_matrix *matrix, int32_t L)
{
    return (struct layer_part){
        .name = name, .dtype = "U8", .rank = 2, .shape = {L, matrix->n_tiles}, .slot = (void **)&matrix->tile_base};
}

moe4_status cuda_prepared_list_parts(struct moe4_context *context, const struct moe4_layer *layer,
                                     struct layer_part *parts, int32_t *n_parts)
{
    struct cuda_prepared *prepared = layer->prepared;
    const struct layer_part all[] = {
        tiles_part("gate_up.tiles", &prepared->gate_up, layer->L),
        tiles_part("down.tiles", &prepared->down, layer->L),
        bias_part("gate_up.bias", &prepared->gate_up, layer->L),
        bias_part("down.bias", &prepared->down, layer->L),
        unit_part("gate_up.unit", &prepared->gate_up, layer->L),
        unit_part("down.unit", &prepared->down, layer->L),
        {.name = "is_exact", .dtype = "U8", .rank = 1, .shape = {layer->L}, .slot = (void **)&prepared->is_exact},
        tile_base_part("gate_up.tile_base", &prepared->gate_up, layer->L), /* the last two: fp8 only */
        tile_base_part("down.tile_base", &prepared->down, layer->L),
    };
    *n_parts = sizeof all / sizeof *all - (prepared->is_fp8 ? 0 : 2);
    memcpy(parts, all, sizeof all);
    return layer_size_parts(context, layer, parts, *n_parts);
}

void *cuda_prepared_allocate_part(const struct moe4_layer *layer, size_t bytes)
{
    const struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    void *memory = device_allocate(bytes);
    device_leave(previous);
    return memory;
}

void cuda_prepared_release_part(const struct moe4_layer *layer, void *memory, size_t bytes)
{
    (void)bytes;
    const struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    device_release(memory);
    device_leave(previous);
}

moe4_status cuda_prepared_download_part(struct moe4_context *context, const struct moe4_layer *layer, void *to,
                                        const void *part, size_t bytes)
{
    const struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    moe4_status status = device_download(context, to, part, bytes);
    device_leave(previous);
    return status;
}

moe4_status cuda_prepared_upload_part(struct moe4_context *context, const struct moe4_layer *layer, void *part,
                                      const void *from, size_t bytes)
{
    const struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    moe4_status status = device_upload(context, part, from, bytes, NULL);
    if (!status) status = device_stream_wait(context, NULL);
    device_leave(previous);
    return status;
}

moe4_status cuda_prepared_plan(struct moe4_context *context, struct moe4_layer *layer)
{
    struct cuda_prepared *prepared = memory_allocate_zeroed(&context->allocator, sizeof *prepared);
    if (!prepared) return context_fail_memory(context, "a prepared layer", sizeof *prepared);
    layer->prepared = prepared;
    prepared->device_index = context->cuda->index;
    prepared->is_fp8 = layer->compute == MOE4_COMPUTE_FP8;
    prepared->n_multiprocessors = context->cuda->n_multiprocessors;
    prepared->level = context->cuda->level;
    const struct cuda_row_order gate_up = {activation_has_gate(layer->activation), layer->gate_up, layer->I,
                                           layer->stored_intermediate_size};
    const struct cuda_row_order down = {0, MOE4_GATE_UP_NONE, layer->H, layer->H};
    init_matrix(&prepared->gate_up, gate_up, layer->H);
    init_matrix(&prepared->down, down, layer->I);
    init_router(prepared, layer);
    layer->chunk_rows = CHUNK_ROWS;
    int32_t previous = device_enter(prepared->device_index);
    moe4_status status = allocate_small(context, layer);
    device_leave(previous);
    return status;
}

/* ---- Filling ----------------------------------------------------------------------------------------------------- */

static moe4_status fill_small(struct moe4_context *context, const struct moe4_layer *layer, cuda_stream stream)
{
    const struct cuda_prepared *prepared = layer->prepared;
    const struct router *router = &layer->router;
    const size_t E = (size_t)layer->E;
    const struct {
        const void *to, *from;
        size_t bytes;
    } uploads[] = {
        {prepared->params, layer->params, (size_t)layer->L * sizeof *layer->params},
        {prepared->local_of, layer->local_of, E * sizeof *layer->local_of},
        {prepared->router.bias, router->bias, router->bias ? E * sizeof(float) : 0},
        {prepared->router.table, router->table,
         router->table ? (size_t)router->vocab_size * (size_t)router->top_k * sizeof(int32_t) : 0},
        {prepared->router_weight, layer->router_weight, E * (size_t)layer->router_size * sizeof(float)},
        {prepared->router_bias, layer->router_bias, layer->router_size ? E * sizeof(float) : 0},
    };
    moe4_status status = MOE4_OK;
    for (size_t i = 0; !status && i < sizeof uploads / sizeof *uploads; i++)
        if (uploads[i].bytes)
            status = device_upload(context, (void *)uploads[i].to, uploads[i].from, uploads[i].bytes, stream);
    return status;
}

/* How many experts take the exact kernel.  What a file says of it must be 0 or 1. */
static moe4_status count_exact(struct moe4_context *context, struct cuda_prepared *prepared, int32_t L)
{
    uint8_t *flags = memory_allocate(&context->allocator, (size_t)L);
    if (!flags) return context_fail_memory(context, "the experts' kernels", (size_t)L);
    moe4_status status = device_download(context, flags, prepared->is_exact, (size_t)L);
    for (int32_t l = 0; !status && l < L; l++) {
        if (flags[l] > 1)
            status = context_fail(context, MOE4_EFORMAT, "is_exact[%d] is %d, expected 0 or 1", l, flags[l]);
        prepared->n_exact += flags[l];
    }
    memory_release(&context->allocator, flags, (size_t)L);
    return status;
}

/* Everything that is not in the parts yet, with the experts of a source, or without one. */
static moe4_status complete(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    cuda_stream stream = NULL;
    moe4_status status = device_stream_create(context, &stream);
    if (!status) status = fill_small(context, layer, stream);
    if (!status && source) status = cuda_fill_experts(context, layer, source);
    if (!status) status = device_stream_wait(context, stream);
    if (!status) status = count_exact(context, prepared, layer->L);
    if (stream) device_stream_destroy(stream);
    device_leave(previous);
    return status;
}

moe4_status cuda_prepared_fill(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    return complete(context, layer, source);
}

moe4_status cuda_prepared_check_parts(struct moe4_context *context, struct moe4_layer *layer)
{
    return complete(context, layer, NULL);
}

void cuda_prepared_release(struct moe4_layer *layer)
{
    struct cuda_prepared *prepared = layer->prepared;
    int32_t previous = device_enter(prepared->device_index);
    device_release(prepared->memory);
    device_leave(previous);
    memory_release(&layer->allocator, prepared, sizeof *prepared);
}
