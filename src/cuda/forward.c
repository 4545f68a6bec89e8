#include "cuda/forward_state.h"

#include "base/checked.h"
#include "context.h"
#include "cuda/device.h"
#include "cuda/stream_few.h"
#include "cuda/tiling.h"
#include "tuning.h"

static void place(struct cuda_forward *f)
{
    char *workspace = f->batch->workspace;
    const struct cuda_workspace_plan *plan = &f->plan;
    f->ids = (int32_t *)(workspace + plan->ids);
    f->weights = (float *)(workspace + plan->weights);
    f->locals = (int32_t *)(workspace + plan->locals);
    const int is_direct = f->result->row_map && !f->is_chunked;
    f->row_map = is_direct ? f->result->row_map : (int32_t *)(workspace + plan->row_map);
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
    if (f->prepared->is_fp8) fp8_place(f);
    const moe4_result *result = f->result;
    if (!f->is_chunked || !(result->intermediate || result->gemm2_rows || result->row_map || result->n_rows)) return;
    f->output_rows = (int64_t *)(workspace + plan->output_rows);
    f->row_output = (int64_t *)(workspace + plan->row_output);
}

/* Bytes of n elements. */
static int64_t bytes_of(int64_t n, moe4_dtype dtype)
{
    return n * (dtype == MOE4_DTYPE_F32 ? 4 : dtype == MOE4_DTYPE_F8_E4M3 || dtype == MOE4_DTYPE_E8M0 ? 1 : 2);
}

const void *row_at(const void *array, int64_t row, int64_t ld, moe4_dtype dtype)
{
    return array ? (const char *)array + bytes_of(row * ld, dtype) : NULL;
}

/* The same of an int32 or float array of the whole batch. */
static void *slots_at(void *array, int64_t first)
{
    return array ? (char *)array + first * 4 : NULL;
}

/* ---- Stages ------------------------------------------------------------------------------------------------------ */

static struct route_outputs route_outputs_of(const struct cuda_forward *f)
{
    const int64_t first = f->first_slot;
    return (struct route_outputs){.ids = f->ids + first,
                                  .weights = f->weights + first,
                                  .locals = f->locals + first,
                                  .row_map = f->row_map + first,
                                  .row_map_copy = f->is_chunked ? slots_at(f->result->row_map, first) : NULL,
                                  .ticket = f->numbers + TICKET,
                                  .ids_copy = slots_at(f->result->ids, first),
                                  .weights_copy = slots_at(f->result->weights, first),
                                  .replay = f->result->replay ? f->result->replay + first : NULL,
                                  .local_of = f->prepared->local_of,
                                  .n_experts = f->layer->E,
                                  .faults = f->context->cuda->faults};
}

static int make_logits(const struct cuda_forward *f)
{
    const moe4_batch *batch = f->batch;
    const struct router_call call = {
        .T = f->T,
        .x = row_at(batch->router_x, f->first_token, batch->ldrouter_x, batch->router_x_dtype),
        .dtype = batch->router_x_dtype,
        .ldx = batch->ldrouter_x,
        .K = f->layer->router_size,
        .weight = f->prepared->router_weight,
        .bias = f->prepared->router_bias,
        .n_experts = f->layer->E,
        .logits = f->logits};
    return router_logits(&call, f->stream);
}

static struct group_call group_call_of(const struct cuda_forward *f)
{
    return (struct group_call){.T = f->T,
                               .top_k = f->A,
                               .L = f->layer->L,
                               .tile_rows = f->tile_rows,
                               .locals = f->locals + f->first_slot,
                               .is_exact = f->prepared->is_exact,
                               .ticket = f->numbers + TICKET,
                               .first = f->first,
                               .counts = f->counts,
                               .row_token = f->row_token,
                               .row_map = f->row_map + f->first_slot,
                               .tiles = f->tiles,
                               .exact_tiles = f->prepared->n_exact ? f->exact_tiles : NULL,
                               .n_tiles = f->numbers + N_TILES,
                               .n_rows = f->numbers + N_ROWS,
                               .claims = f->numbers + N_CLAIMS,
                               .n_rows_copy = f->is_chunked ? NULL : f->result->n_rows,
                               .output_rows = f->output_rows,
                               .row_output = f->row_output,
                               .row_map_copy = f->is_chunked ? slots_at(f->result->row_map, f->first_slot) : NULL};
}

static struct route_logits_call route_call_of(const struct cuda_forward *f)
{
    const moe4_logits *given = f->call->logits;
    return (struct route_logits_call){
        .T = f->T,
        .logits = given ? row_at(given->logits, f->first_token, given->ld, given->dtype) : f->logits,
        .dtype = given ? given->dtype : MOE4_DTYPE_F32,
        .ld = given ? given->ld : f->layer->E,
        .token_ids = f->batch->token_ids ? f->batch->token_ids + f->first_token : NULL,
        .is_after_x = f->is_x_first && given,
        .logits_copy = f->result->logits ? f->result->logits + f->first_token * f->layer->E : NULL,
        .router = f->prepared->router,
        .out = route_outputs_of(f),
        .group = group_call_of(f)};
}

static int route_by_logits(const struct cuda_forward *f)
{
    const int error = f->call->logits ? 0 : make_logits(f);
    if (error || f->is_few) return error;
    const struct route_logits_call call = route_call_of(f);
    return (f->is_routed_at_once ? route_logits_at_once : route_logits)(&call, f->stream);
}

static int route_stage(const struct cuda_forward *f)
{
    if (!f->call->topk) return route_by_logits(f);
    if (f->is_few) return 0;
    struct route_given_call call = {.T = f->T,
                                    .topk = *f->call->topk,
                                    .is_after_x = f->is_x_first,
                                    .out = route_outputs_of(f),
                                    .group = group_call_of(f)};
    call.topk.ids += f->first_token * call.topk.ld_ids;
    call.topk.weights = row_at(call.topk.weights, f->first_token, call.topk.ld_weights, call.topk.weights_dtype);
    return (f->is_routed_at_once ? route_given_at_once : route_given)(&call, f->stream);
}

/* Once a call, when all tokens are routed. */
static int number_stage(const struct cuda_forward *f)
{
    const int32_t T = (int32_t)f->batch->n_tokens;
    const struct number_call call = {.T = {0, T, T, f->batch->n_tokens_device},
                                     .top_k = f->A,
                                     .L = f->layer->L,
                                     .locals = f->locals,
                                     .output_rows = f->output_rows,
                                     .n_rows = f->result->n_rows};
    return f->output_rows ? number_rows(&call, f->stream) : 0;
}

static int group_stage(const struct cuda_forward *f)
{
    if (f->is_routed_at_once) return 0;
    const struct group_call call = group_call_of(f);
    return group_rows(&call, f->stream);
}

static int x_stage(const struct cuda_forward *f)
{
    return f->is_x_first || f->is_few ? 0 : rows_convert_stage(f);
}

struct gemm_call gemm_call_of(const struct cuda_forward *f, const struct cuda_matrix *matrix)
{
    return (struct gemm_call){.weights = matrix->packed,
                              .bias = matrix->bias,
                              .unit = matrix->unit,
                              .params = f->prepared->params,
                              .n_tiles = matrix->n_tiles,
                              .n_steps = matrix->n_steps,
                              .K = (int32_t)matrix->K,
                              .token_tiles = f->tiles,
                              .n_token_tiles = f->numbers + N_TILES,
                              .tile_rows = f->tile_rows};
}

static int run_few(const struct cuda_forward *f, const struct stream_call *stream, moe4_activation activation,
                   int32_t n_blocks)
{
    const struct cuda_matrix *matrix = stream->next_weights ? &f->prepared->gate_up : &f->prepared->down;
    struct one_call call = {.stream = *stream,
                            .tile_base = matrix->tile_base,
                            .route = route_call_of(f),
                            .topk = f->call->topk ? *f->call->topk : (moe4_topk){0},
                            .is_down = !stream->next_weights,
                            .quantizes_x = is_mxfp8(f)};
    call.route.router.n_experts = f->layer->E; /* where the caller routes, the layer may have no router */
    call.route.router.top_k = f->A;
    if (f->batch->n_tokens == 1)
        return (f->prepared->is_fp8 ? fp8_one : gemm_one)(&call, activation, n_blocks, f->stream);
    return (f->prepared->is_fp8 ? fp8_few : gemm_few)(&call, activation, n_blocks, f->stream);
}

int32_t block_count(const struct cuda_forward *f, int32_t n_tiles)
{
    const int64_t items = f->plan.max_tiles * n_tiles;
    return items < f->prepared->n_multiprocessors ? (int32_t)items : f->prepared->n_multiprocessors;
}

int32_t mean_rows(const struct cuda_forward *f)
{
    return (int32_t)ceil_div(f->plan.chunk_tokens * f->A, f->layer->L);
}

/* The experts' GEMM by whichever kernel holds their weights; `next` follows it on the same rows. */
static int run_gemm(const struct cuda_forward *f, struct gemm_call *call, const struct cuda_matrix *next,
                    moe4_activation activation)
{
    const int32_t n_blocks = block_count(f, call->n_tiles);
    const struct cuda_level *level = f->prepared->level;
    struct stream_call stream = {.gemm = *call, .quantizes = next && is_quantized_at_once(f)};
    if (next) stream.next_weights = next->packed, stream.next_tiles = next->n_tiles, stream.next_steps = next->n_steps;
    int error = f->is_few        ? run_few(f, &stream, activation, n_blocks)
                : f->is_streamed ? level->gemm_stream(&stream, activation, n_blocks, f->stream)
                                 : level->gemm(call, activation, n_blocks, f->stream);
    if (error || !f->prepared->n_exact) return error;
    call->token_tiles = f->exact_tiles;
    call->n_token_tiles = f->numbers + N_EXACT_TILES;
    return gemm_exact(call, activation, 16 * n_blocks, f->stream);
}

static int gate_up_stage(const struct cuda_forward *f)
{
    if (f->prepared->is_fp8 && !f->is_few) return fp8_gate_up_stage(f);
    struct gemm_call call = gemm_call_of(f, &f->prepared->gate_up);
    const int takes_x = is_direct(f) || f->is_few;
    call.x = takes_x ? x_of(f) : f->converted;
    call.ldx = takes_x ? f->batch->ldx : f->layer->H;
    call.row_source = f->row_token;
    call.out = f->intermediate;
    call.ldout = f->layer->I;
    call.columns = (int32_t)f->layer->I;
    return run_gemm(f, &call, &f->prepared->down, f->layer->activation);
}

static int down_stage(const struct cuda_forward *f)
{
    if (f->prepared->is_fp8 && !f->is_few) return fp8_down_stage(f);
    struct gemm_call call = gemm_call_of(f, &f->prepared->down);
    call.x = f->intermediate;
    call.ldx = f->layer->I;
    call.tiles_are_old = 1;
    call.out = f->z;
    call.ldout = f->plan.ldz;
    call.columns = (int32_t)f->layer->output_size;
    return run_gemm(f, &call, NULL, MOE4_ACTIVATION_IDENTITY);
}

/* ---- Which kernels ----------------------------------------------------------------------------------------------- */

static int32_t best_tile_rows(const struct cuda_forward *f)
{
    if (!f->prepared->level->gemm_stream) return MAX_TOKENS;
    return choose_tile_rows(mean_rows(f), f->prepared->gate_up.n_steps, f->prepared->down.n_steps);
}

static int is_streamed(const struct cuda_forward *f)
{
    return f->prepared->level->gemm_stream && f->tile_rows == STREAM_ROWS &&
           stream_slots(f->prepared->gate_up.n_steps) && stream_slots(f->prepared->down.n_steps);
}

/* Whether x, and v' of all that a block of down multiplies, fit beside the shortest rings of the kernels for few
 * tokens.
 */
static int few_fit(const struct cuda_forward *f)
{
    const struct cuda_matrix *gate_up = &f->prepared->gate_up, *down = &f->prepared->down;
    const int32_t T = (int32_t)f->batch->n_tokens, is_fp8 = f->prepared->is_fp8;
    const int32_t rings = STREAM_LEAST_STAGES * STREAM_RING_BYTES, room = FEW_SHARED_BYTES - STREAM_SLACK - rings;
    const int32_t n_segments = few_segments(T * f->A, down->n_tiles, block_count(f, down->n_tiles));
    struct device_router router = f->prepared->router;
    router.n_experts = f->layer->E; /* where the caller routes, the layer may have no router */
    return few_rows_bytes(gate_up->n_steps, T, is_fp8) + few_choice_bytes(&router, f->layer->L) <= room &&
           few_rows_bytes(down->n_steps, T, is_fp8) * n_segments <= room && T * f->layer->E * 4 <= rings;
}

/* Whether gate/up routes the tokens.  Each slot of a single one may be a token tile. */
static int is_few(const struct cuda_forward *f)
{
    const int64_t T = f->batch->n_tokens;
    const int is_chosen =
        f->call->topk ? f->A <= (T == 1 ? f->layer->L : FEW_REPEATS) : f->prepared->router.method != MOE4_ROUTING_HASH;
    if (!f->is_streamed || !f->is_routed_at_once || !is_chosen || f->A > ONE_TOP_K || f->prepared->n_exact) return 0;
    if (T == 1) return f->prepared->is_fp8 ? fp8_quantises_late(f) : is_bf16(f);
    return T <= FEW_TOKENS && T * f->A <= FEW_SLOTS && (f->prepared->is_fp8 ? fp8_leaves_bf16(f) : is_bf16(f)) &&
           few_fit(f);
}

/* By what was measured (moe4_tune), else by rules that are good everywhere. */
static void choose_kernels(struct cuda_forward *f)
{
    const int32_t rows = tuning_find(f->context, f->layer, f->batch->compute, f->batch->n_tokens, f->A).tile_tokens;
    if (f->prepared->is_fp8) {
        fp8_choose_kernels(f, rows);
    } else {
        f->tile_rows = rows ? rows : best_tile_rows(f);
        f->is_streamed = is_streamed(f);
    }
    f->is_routed_at_once = f->prepared->level->isa == MOE4_ISA_SM_90A && !f->is_chunked &&
                           is_routed_at_once((int32_t)f->plan.chunk_tokens, f->A, &f->prepared->router, f->layer->L);
    f->is_few = is_few(f);
    f->is_x_first = !f->is_few && !f->is_chunked && !f->weights_on_input &&
                    (f->prepared->is_fp8 ? fp8_takes_tokens(f) : !is_direct(f));
}

/* ---- The call ---------------------------------------------------------------------------------------------------- */

struct stage {
    const char *name;
    int (*run)(const struct cuda_forward *f);
};

static moe4_status run_stages(const struct cuda_forward *f, const struct stage *stages, int32_t n_stages)
{
    moe4_status status = MOE4_OK;
    for (int32_t i = 0; !status && i < n_stages; i++)
        status = device_check(f->context, stages[i].run(f), stages[i].name);
    return status;
}

/* Stages on each chunk of tokens. */
static moe4_status run_chunks(struct cuda_forward *f, const struct stage *stages, int32_t n_stages)
{
    moe4_status status = MOE4_OK;
    const int64_t T = f->batch->n_tokens, most = f->plan.chunk_tokens;
    for (int64_t first = 0; !status && first < T; first += most) {
        const int64_t n = T - first < most ? T - first : most;
        f->T = (struct token_count){(int32_t)first, (int32_t)n, (int32_t)T, f->batch->n_tokens_device};
        f->first_token = first;
        f->first_slot = first * f->A;
        status = run_stages(f, stages, n_stages);
    }
    return status;
}

static moe4_status run(struct cuda_forward *f)
{
    static const struct stage routing[] = {{"routing", route_stage}}, numbering[] = {{"numbering", number_stage}};
    static const struct stage x[] = {{"conversion of x", rows_convert_stage}};
    static const struct stage experts[] = {{"grouping", group_stage},      {"x of routed rows", x_stage},
                                           {"gate/up", gate_up_stage},     {"quantising", rows_quantize_stage},
                                           {"down", down_stage},           {"outputs", rows_output_stage},
                                           {"combine", rows_combine_stage}};
    moe4_status status = f->is_x_first ? run_chunks(f, x, 1) : MOE4_OK;
    if (!status) status = run_chunks(f, routing, 1);
    if (!status) status = run_stages(f, numbering, 1);
    return status ? status : run_chunks(f, experts, sizeof experts / sizeof *experts);
}

moe4_status cuda_check_compute(struct moe4_context *context, moe4_compute compute, moe4_compute arranged)
{
    if (compute == MOE4_COMPUTE_FP8 && context->isa != MOE4_ISA_SM_90A)
        return context_fail(context, MOE4_EUNSUPPORTED, "compute is fp8, whose kernels are of level sm_90a, not %s",
                            context->cuda->level->name);
    if ((compute == MOE4_COMPUTE_FP8) == (arranged == MOE4_COMPUTE_FP8)) return MOE4_OK;
    return context_fail(
        context, MOE4_EUNSUPPORTED, "compute is %s, but the layer's config.compute arranges its weights for %s",
        compute == MOE4_COMPUTE_FP8 ? "fp8" : "bf16 or mxfp8", compute == MOE4_COMPUTE_FP8 ? "bf16 and mxfp8" : "fp8");
}

moe4_status cuda_forward(struct moe4_context *context, const struct moe4_layer *layer, const struct forward_call *call)
{
    struct cuda_forward f = {.context = context,
                             .layer = layer,
                             .prepared = layer->prepared,
                             .call = call,
                             .batch = call->batch,
                             .result = call->result,
                             .A = call->top_k,
                             .weights_on_input = call->topk && call->topk->weight_use == MOE4_WEIGHT_ON_INPUT,
                             .stream = call->batch->stream};
    if (f.prepared->device_index != context->cuda->index)
        return context_fail(context, MOE4_EINVAL, "the layer is on device %d, the context on device %d",
                            f.prepared->device_index, context->cuda->index);
    if (!cuda_level_includes(context->isa, f.prepared->level->isa))
        return context_fail(context, MOE4_EINVAL,
                            "the layer was prepared for kernel %s, which this context's level lacks",
                            f.prepared->level->kernel);
    moe4_status status = cuda_check_compute(context, call->batch->compute, layer->compute);
    if (!status) status = cuda_forward_plan(context, layer, call->batch->n_tokens, call->top_k, &f.plan);
    if (status) return status;
    f.is_chunked = f.plan.chunk_tokens < call->batch->n_tokens;
    place(&f);
    choose_kernels(&f);
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
    const struct deferred_call call = {.T = {0, (int32_t)d->n_tokens, (int32_t)d->n_tokens, d->n_tokens_device},
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
