#include "cuda/forward.h"

#include "base/checked.h"
#include "context.h"
#include "cuda/device.h"
#include "cuda/prepared.h"

/* ---- Workspace --------------------------------------------------------------------------------------------------- */

/* Appends count * item_bytes at a multiple of 256 to the plan; its offset, or SIZE_MAX once anything has wrapped. */
static size_t reserve(struct cuda_workspace_plan *plan, int64_t count, size_t item_bytes)
{
    size_t offset = plan->total, bytes;
    if (!size_multiply((size_t)count, item_bytes, &bytes) || !size_add(bytes, 255, &bytes) ||
        !size_add(offset, bytes / 256 * 256, &plan->total))
        plan->total = SIZE_MAX;
    return offset;
}

/* Single numbers on the device. */
enum { TICKET, N_TILES, N_EXACT_TILES, N_ROWS, N_NUMBERS };

moe4_status cuda_forward_plan(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                              int32_t top_k, struct cuda_workspace_plan *plan)
{
    int64_t rows;
    if (n_tokens > INT32_MAX || !i64_multiply(n_tokens, top_k, &rows) || rows > INT32_MAX)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld with top_k %d, expected up to %d routed rows",
                            (long long)n_tokens, top_k, INT32_MAX);
    *plan = (struct cuda_workspace_plan){.n_rows = rows};
    plan->max_tiles = (layer->L < rows ? layer->L : rows) + rows / MAX_TOKENS;
    plan->ldz = round_up(layer->output_size, 8);
    plan->ids = reserve(plan, rows, sizeof(int32_t));
    plan->weights = reserve(plan, rows, sizeof(float));
    plan->locals = reserve(plan, rows, sizeof(int32_t));
    plan->row_map = reserve(plan, rows, sizeof(int32_t));
    plan->first = reserve(plan, layer->L, sizeof(int32_t));
    plan->counts = reserve(plan, layer->L, sizeof(int32_t));
    plan->row_token = reserve(plan, rows, sizeof(int32_t));
    plan->tiles = reserve(plan, plan->max_tiles, sizeof(struct token_tile));
    plan->exact_tiles = reserve(plan, plan->max_tiles, sizeof(struct token_tile));
    plan->numbers = reserve(plan, N_NUMBERS, sizeof(int32_t));
    plan->logits = reserve(plan, layer->router_size ? n_tokens : 0, (size_t)layer->E * sizeof(float));
    plan->x = reserve(plan, n_tokens, (size_t)layer->H * sizeof(uint16_t));
    plan->intermediate = reserve(plan, rows, (size_t)layer->I * sizeof(uint16_t));
    plan->z = reserve(plan, rows, (size_t)plan->ldz * sizeof(uint16_t));
    if (plan->total == SIZE_MAX)
        return context_fail(context, MOE4_EINVAL, "the workspace of %lld tokens does not fit the address space",
                            (long long)n_tokens);
    return MOE4_OK;
}

struct cuda_forward {
    struct moe4_context *context;
    const struct moe4_layer *layer;
    const struct cuda_prepared *prepared;
    const struct forward_call *call;
    const moe4_batch *batch;
    const moe4_result *result;
    struct cuda_workspace_plan plan;
    struct token_count T;
    int32_t A;
    int weights_on_input;
    cuda_stream stream;

    int32_t *ids, *locals, *row_map, *first, *counts, *row_token, *numbers;
    float *weights, *logits;
    struct token_tile *tiles, *exact_tiles;
    uint16_t *converted, *intermediate, *z;
};

static void place(struct cuda_forward *f)
{
    char *workspace = f->batch->workspace;
    const struct cuda_workspace_plan *plan = &f->plan;
    f->ids = (int32_t *)(workspace + plan->ids);
    f->weights = (float *)(workspace + plan->weights);
    f->locals = (int32_t *)(workspace + plan->locals);
    f->row_map = f->result->row_map ? f->result->row_map : (int32_t *)(workspace + plan->row_map);
    f->first = (int32_t *)(workspace + plan->first);
    f->counts = (int32_t *)(workspace + plan->counts);
    f->row_token = (int32_t *)(workspace + plan->row_token);
    f->tiles = (struct token_tile *)(workspace + plan->tiles);
    f->exact_tiles = (struct token_tile *)(workspace + plan->exact_tiles);
    f->numbers = (int32_t *)(workspace + plan->numbers);
    f->logits = (float *)(workspace + plan->logits);
    f->converted = (uint16_t *)(workspace + plan->x);
    f->intermediate = (uint16_t *)(workspace + plan->intermediate);
    f->z = (uint16_t *)(workspace + plan->z);
}

/* ---- Stages ------------------------------------------------------------------------------------------------------ */

static struct route_outputs route_outputs_of(const struct cuda_forward *f)
{
    return (struct route_outputs){.ids = f->ids,
                                  .weights = f->weights,
                                  .locals = f->locals,
                                  .row_map = f->row_map,
                                  .ticket = f->numbers + TICKET,
                                  .ids_copy = f->result->ids,
                                  .weights_copy = f->result->weights,
                                  .replay = f->result->replay,
                                  .local_of = f->prepared->local_of,
                                  .n_experts = f->layer->E,
                                  .faults = f->context->cuda->faults};
}

static int make_logits(const struct cuda_forward *f)
{
    const struct router_call call = {.T = f->T,
                                     .x = f->batch->router_x,
                                     .dtype = f->batch->router_x_dtype,
                                     .ldx = f->batch->ldrouter_x,
                                     .K = f->layer->router_size,
                                     .weight = f->prepared->router_weight,
                                     .bias = f->prepared->router_bias,
                                     .n_experts = f->layer->E,
                                     .logits = f->logits};
    return router_logits(&call, f->stream);
}

static int route_stage(const struct cuda_forward *f)
{
    if (f->call->topk) {
        const struct route_given_call call = {f->T, *f->call->topk, route_outputs_of(f)};
        return route_given(&call, f->stream);
    }
    const moe4_logits *given = f->call->logits;
    int error = given ? 0 : make_logits(f);
    const struct route_logits_call call = {.T = f->T,
                                           .logits = given ? given->logits : f->logits,
                                           .dtype = given ? given->dtype : MOE4_DTYPE_F32,
                                           .ld = given ? given->ld : f->layer->E,
                                           .token_ids = f->batch->token_ids,
                                           .logits_copy = f->result->logits,
                                           .router = f->prepared->router,
                                           .out = route_outputs_of(f)};
    return error ? error : route_logits(&call, f->stream);
}

static int group_stage(const struct cuda_forward *f)
{
    const struct group_call call = {.T = f->T,
                                    .top_k = f->A,
                                    .L = f->layer->L,
                                    .locals = f->locals,
                                    .is_exact = f->prepared->is_exact,
                                    .ticket = f->numbers + TICKET,
                                    .first = f->first,
                                    .counts = f->counts,
                                    .row_token = f->row_token,
                                    .row_map = f->row_map,
                                    .tiles = f->tiles,
                                    .exact_tiles = f->exact_tiles,
                                    .n_tiles = f->numbers + N_TILES,
                                    .n_rows = f->numbers + N_ROWS,
                                    .n_rows_copy = f->result->n_rows};
    return group_rows(&call, f->stream);
}

static int is_mxfp8(const struct cuda_forward *f)
{
    return f->batch->compute == MOE4_COMPUTE_MXFP8;
}

/* Whether the GEMM can gather the caller's x as it is. */
static int is_direct(const struct cuda_forward *f)
{
    return !is_mxfp8(f) && f->batch->x_dtype == MOE4_DTYPE_BF16 && !f->weights_on_input && f->batch->ldx % 8 == 0 &&
           (uintptr_t)f->batch->x % 16 == 0;
}

static int quantize_x(const struct cuda_forward *f)
{
    const struct quantize_call call = {.T = f->T,
                                       .x = f->batch->x,
                                       .dtype = f->batch->x_dtype,
                                       .ldx = f->batch->ldx,
                                       .columns = f->layer->H,
                                       .x_scale = f->batch->x_scale,
                                       .ldx_scale = f->batch->ldx_scale,
                                       .weights = f->weights_on_input ? f->weights : NULL,
                                       .out = f->converted};
    return quantize_rows(&call, f->stream);
}

/* v' in mxfp8 compute, in place. */
static int quantize_stage(const struct cuda_forward *f)
{
    if (!is_mxfp8(f)) return 0;
    const struct quantize_call call = {.T = f->T,
                                       .n_rows = f->numbers + N_ROWS,
                                       .x = f->intermediate,
                                       .dtype = MOE4_DTYPE_BF16,
                                       .ldx = f->layer->I,
                                       .columns = f->layer->I,
                                       .out = f->intermediate,
                                       .codes = f->result->intermediate,
                                       .scales = f->result->intermediate_scale};
    return quantize_rows(&call, f->stream);
}

static int convert_stage(const struct cuda_forward *f)
{
    if (is_mxfp8(f)) return quantize_x(f);
    if (is_direct(f)) return 0;
    const struct convert_call call = {.T = f->T,
                                      .x = f->batch->x,
                                      .dtype = f->batch->x_dtype,
                                      .ldx = f->batch->ldx,
                                      .columns = f->layer->H,
                                      .weights = f->weights_on_input ? f->weights : NULL,
                                      .out = f->converted};
    return convert_rows(&call, f->stream);
}

static struct gemm_call gemm_call_of(const struct cuda_forward *f, const struct cuda_matrix *matrix)
{
    return (struct gemm_call){.weights = matrix->packed,
                              .bias = matrix->bias,
                              .unit = matrix->unit,
                              .params = f->prepared->params,
                              .n_tiles = matrix->n_tiles,
                              .n_steps = matrix->n_steps,
                              .K = (int32_t)matrix->K,
                              .token_tiles = f->tiles,
                              .n_token_tiles = f->numbers + N_TILES};
}

/* The experts' GEMM by whichever kernel holds their weights. */
static int run_gemm(const struct cuda_forward *f, struct gemm_call *call, moe4_activation activation)
{
    int64_t items = f->plan.max_tiles * call->n_tiles;
    int32_t n_blocks = items < f->prepared->n_multiprocessors ? (int32_t)items : f->prepared->n_multiprocessors;
    int error = gemm(call, activation, n_blocks, f->stream);
    if (error || !f->prepared->n_exact) return error;
    call->token_tiles = f->exact_tiles;
    call->n_token_tiles = f->numbers + N_EXACT_TILES;
    return gemm_exact(call, activation, 16 * n_blocks, f->stream);
}

static int gate_up_stage(const struct cuda_forward *f)
{
    struct gemm_call call = gemm_call_of(f, &f->prepared->gate_up);
    call.x = is_direct(f) ? f->batch->x : f->converted;
    call.ldx = is_direct(f) ? f->batch->ldx : f->layer->H;
    call.row_source = f->row_token;
    call.out = f->intermediate;
    call.ldout = f->layer->I;
    call.columns = (int32_t)f->layer->I;
    return run_gemm(f, &call, f->layer->activation);
}

static int down_stage(const struct cuda_forward *f)
{
    struct gemm_call call = gemm_call_of(f, &f->prepared->down);
    call.x = f->intermediate;
    call.ldx = f->layer->I;
    call.tiles_are_old = 1;
    call.out = f->z;
    call.ldout = f->plan.ldz;
    call.columns = (int32_t)f->layer->output_size;
    return run_gemm(f, &call, MOE4_ACTIVATION_IDENTITY);
}

static int output_stage(const struct cuda_forward *f)
{
    const struct copy_call copies[] = {
        {f->intermediate, f->layer->I, f->layer->I, f->numbers + N_ROWS, is_mxfp8(f) ? NULL : f->result->intermediate},
        {f->z, f->plan.ldz, f->layer->output_size, f->numbers + N_ROWS, f->result->gemm2_rows},
    };
    int error = 0;
    for (int i = 0; !error && i < 2; i++)
        if (copies[i].to) error = copy_rows(&copies[i], f->stream);
    return error;
}

static int combine_stage(const struct cuda_forward *f)
{
    if (!f->result->y) return 0;
    const struct combine_call call = {.T = f->T,
                                      .z = f->z,
                                      .ldz = f->plan.ldz,
                                      .row_map = f->row_map,
                                      .ids = f->prepared->router.method == MOE4_ROUTING_HASH && !f->call->topk ? f->ids
                                                                                                               : NULL,
                                      .weights = f->weights_on_input ? NULL : f->weights,
                                      .top_k = f->A,
                                      .columns = f->layer->output_size,
                                      .y = f->result->y,
                                      .dtype = f->result->y_dtype,
                                      .ldy = f->result->ldy,
                                      .write = f->result->write};
    return combine_rows(&call, f->stream);
}

static moe4_status run(const struct cuda_forward *f)
{
    static const struct {
        const char *name;
        int (*run)(const struct cuda_forward *f);
    } stages[] = {{"routing", route_stage},   {"grouping", group_stage},      {"conversion of x", convert_stage},
                  {"gate/up", gate_up_stage}, {"quantising", quantize_stage}, {"down", down_stage},
                  {"outputs", output_stage},  {"combine", combine_stage}};
    moe4_status status = MOE4_OK;
    for (size_t i = 0; !status && i < sizeof stages / sizeof *stages; i++)
        status = device_check(f->context, stages[i].run(f), stages[i].name);
    return status;
}

moe4_status cuda_forward(struct moe4_context *context, const struct moe4_layer *layer, const struct forward_call *call)
{
    struct cuda_forward f = {.context = context,
                             .layer = layer,
                             .prepared = layer->prepared,
                             .call = call,
                             .batch = call->batch,
                             .result = call->result,
                             .T = {(int32_t)call->batch->n_tokens, call->batch->n_tokens_device},
                             .A = call->top_k,
                             .weights_on_input = call->topk && call->topk->weight_use == MOE4_WEIGHT_ON_INPUT,
                             .stream = call->batch->stream};
    if (f.prepared->device_index != context->cuda->index)
        return context_fail(context, MOE4_EINVAL, "the layer is on device %d, the context on device %d",
                            f.prepared->device_index, context->cuda->index);
    moe4_status status = cuda_forward_plan(context, layer, call->batch->n_tokens, call->top_k, &f.plan);
    if (status) return status;
    place(&f);
    int32_t previous = device_enter(context->cuda->index);
    status = run(&f);
    device_leave(previous);
    return status;
}

/* ---- Deferred ---------------------------------------------------------------------------------------------------- */

moe4_status cuda_combine(struct moe4_context *context, const moe4_deferred *d, const moe4_result *result)
{
    if (d->n_tokens > INT32_MAX)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected up to %d", (long long)d->n_tokens,
                            INT32_MAX);
    const struct deferred_call call = {.T = {(int32_t)d->n_tokens, d->n_tokens_device},
                                       .z = d->gemm2_rows,
                                       .n_rows = d->n_rows,
                                       .row_map = d->row_map,
                                       .weights = d->weights,
                                       .top_k = d->top_k,
                                       .columns = d->output_size,
                                       .scale = d->scale == 0.0f ? 1.0f : d->scale,
                                       .addend = d->addend,
                                       .addend_dtype = d->addend_dtype,
                                       .ld_addend = d->ld_addend,
                                       .y = result->y,
                                       .dtype = result->y_dtype,
                                       .ldy = result->ldy,
                                       .write = result->write,
                                       .faults = context->cuda->faults};
    int32_t previous = device_enter(context->cuda->index);
    moe4_status status = device_check(context, combine_deferred_rows(&call, d->stream), "combine");
    device_leave(previous);
    return status;
}
