/* The public functions: validate everything, then one call through the backend. */
#include "moe4/moe4.h"

#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "base/dims.h"
#include "base/dtype.h"
#include "context.h"
#include "layer.h"
#include "supports.h"
#include "tuning.h"

/* Evaluates to the status and returns when it is not MOE4_OK. */
#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        moe4_status try_status = (expression);                                                                         \
        if (try_status) return try_status;                                                                             \
    } while (0)

/* ---- Context
 * --------------------------------------------------------------------------------------------------------- */

static const struct backend *backend_of(moe4_device device)
{
    static const struct backend *const backends[] = {
        [MOE4_DEVICE_CPU] = &backend_cpu,
#ifdef MOE4_HAS_CUDA
        [MOE4_DEVICE_CUDA] = &backend_cuda,
#endif
    };
    return (unsigned)device < sizeof backends / sizeof *backends ? backends[device] : NULL;
}

static moe4_status open_context(struct moe4_context *context, const moe4_context_config *config)
{
    const struct backend *backend = backend_of(config->device);
    if (!backend && config->device == MOE4_DEVICE_CUDA)
        return context_fail(context, MOE4_EUNSUPPORTED, "device is cuda, but this build has no CUDA backend");
    if (!backend)
        return context_fail(context, MOE4_EINVAL, "device is %d, expected cpu (%d) or cuda (%d)", config->device,
                            MOE4_DEVICE_CPU, MOE4_DEVICE_CUDA);
    if (config->device == MOE4_DEVICE_CPU && config->device_index != 0)
        return context_fail(context, MOE4_EINVAL, "device_index is %d, expected 0 on the cpu", config->device_index);
    if (config->allocator && !(config->allocator->allocate && config->allocator->release))
        return context_fail(context, MOE4_EINVAL, "allocator.%s is NULL",
                            config->allocator->allocate ? "release" : "allocate");
    context->backend = backend;
    return context->backend->open(context, config);
}

/* Adopts the config and takes its allocator, from which the context itself comes, if both are of use. */
static void draft_context(struct moe4_context *draft, const moe4_context_config *given, moe4_context_config *config)
{
    static const moe4_context_config defaults = MOE4_CONTEXT_CONFIG_INIT;
    draft->status = adopt_struct(draft, "config", given ? given : &defaults, config, sizeof *config);
    const moe4_allocator *allocator = draft->status ? NULL : config->allocator;
    draft->allocator = allocator && allocator->allocate && allocator->release ? *allocator : memory_default_allocator();
}

moe4_status moe4_context_create(const moe4_context_config *given, moe4_context **result)
{
    if (!result) return MOE4_EINVAL;
    moe4_context draft = {0};
    moe4_context_config config;
    draft_context(&draft, given, &config);
    moe4_context *context = memory_allocate(&draft.allocator, sizeof *context);
    *result = context;
    if (!context) return MOE4_ENOMEM;
    *context = draft;
    if (!context->status) context->status = open_context(context, &config);
    return context->status;
}

void moe4_context_destroy(moe4_context *context)
{
    if (!context) return;
    moe4_allocator allocator = context->allocator;
    tuning_release(context);
    if (context->backend) context->backend->close(context);
    memory_release(&allocator, context, sizeof *context);
}

moe4_status moe4_context_describe(moe4_context *context, moe4_context_info *info)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!info) return context_fail(context, MOE4_EINVAL, "info is NULL");
    if (!is_struct_size(info->size))
        return context_fail(context, MOE4_EINVAL, "info.size is %zu, expected %zu", info->size, sizeof *info);
    moe4_context_info made = MOE4_CONTEXT_INFO_INIT;
    context->backend->describe_context(context, &made);
    fill_struct(info, &made, sizeof made);
    return MOE4_OK;
}

moe4_status moe4_context_check(moe4_context *context)
{
    if (!context) return MOE4_EINVAL;
    return context->status ? context->status : context->backend->check_faults(context);
}

moe4_status moe4_context_clear(moe4_context *context)
{
    if (!context) return MOE4_EINVAL;
    if (!context->status) context->backend->clear_faults(context);
    return context->status;
}

/* ---- Layer
 * ------------------------------------------------------------------------------------------------------------ */

moe4_status moe4_layer_create_from(moe4_context *context, const moe4_layer_config *given,
                                   const moe4_expert_source *source, moe4_layer **result)
{
    if (result) *result = NULL;
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!result || !source || !source->read)
        return context_fail(context, MOE4_EINVAL, "%s is NULL", !result ? "layer" : !source ? "source" : "source.read");
    if (!source->describe != !source->copy)
        return context_fail(context, MOE4_EINVAL, "source.%s is NULL, but source.%s is not",
                            source->copy ? "describe" : "copy", source->copy ? "copy" : "describe");
    moe4_layer_config config;
    TRY(adopt_struct(context, "config", given, &config, sizeof config));
    moe4_query query = MOE4_QUERY_INIT;
    query.config = &config;
    query.compute = config.compute;
    TRY(supports_query(context, &query));

    moe4_layer *layer;
    TRY(layer_create(context, &config, &layer));
    moe4_status status = context->backend->plan(context, layer);
    if (!status) status = layer_allocate_parts(context, layer);
    if (!status) status = context->backend->fill(context, layer, source);
    if (status)
        layer_destroy(layer);
    else
        *result = layer;
    return status;
}

struct expert_array {
    const moe4_expert *experts;
};

static moe4_status read_array(void *user, int32_t local_expert, moe4_expert *expert)
{
    const struct expert_array *array = user;
    *expert = array->experts[local_expert];
    return MOE4_OK;
}

moe4_status moe4_layer_create(moe4_context *context, const moe4_layer_config *config, const moe4_expert *experts,
                              moe4_layer **layer)
{
    if (layer) *layer = NULL;
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!experts) return context_fail(context, MOE4_EINVAL, "experts is NULL");
    struct expert_array array = {experts};
    const moe4_expert_source source = {.read = read_array, .user = &array};
    return moe4_layer_create_from(context, config, &source, layer);
}

void moe4_layer_destroy(moe4_layer *layer)
{
    layer_destroy(layer);
}

moe4_status moe4_layer_describe(const moe4_layer *layer, moe4_layer_info *info)
{
    if (!layer || !info || !is_struct_size(info->size)) return MOE4_EINVAL;
    moe4_layer_info made = {.hidden_size = layer->H,
                            .intermediate_size = layer->I,
                            .output_size = layer->output_size,
                            .n_experts = layer->E,
                            .first_expert = layer->first_expert,
                            .n_local_experts = layer->L,
                            .top_k = layer->router.top_k,
                            .weight_bytes = layer_weight_bytes(layer)};
    layer->backend->describe_layer(layer, &made);
    fill_struct(info, &made, sizeof made);
    return MOE4_OK;
}

/* ---- Forward
 * ------------------------------------------------------------------------------------------------------------ */

moe4_status moe4_workspace_bytes(moe4_context *context, const moe4_layer *layer, moe4_compute compute, int64_t n_tokens,
                                 int32_t top_k, size_t *bytes)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!layer || !bytes) return context_fail(context, MOE4_EINVAL, "%s is NULL", layer ? "bytes" : "layer");
    moe4_query query = MOE4_QUERY_INIT;
    query.compute = compute;
    query.n_tokens = n_tokens;
    TRY(supports_call(context, &query));
    int32_t A = top_k ? top_k : layer->router.top_k;
    if (A < 1 || A > layer->E || A > MAX_TOP_K)
        return context_fail(context, MOE4_EINVAL, "top_k is %d, expected 1 to %d", A,
                            layer->E < MAX_TOP_K ? layer->E : MAX_TOP_K);
    return context->backend->workspace_bytes(context, layer, n_tokens, A, bytes);
}

/* A stride in elements: 0 stands for `columns`, less is refused. */
static moe4_status resolve_stride(moe4_context *context, const char *name, int64_t columns, int64_t *ld)
{
    if (*ld == 0) *ld = columns;
    if (*ld < columns)
        return context_fail(context, MOE4_EINVAL, "%s is %lld, expected at least %lld", name, (long long)*ld,
                            (long long)columns);
    return MOE4_OK;
}

static moe4_status check_batch(moe4_context *context, const moe4_layer *layer, moe4_batch *batch)
{
    if (!batch->x) return context_fail(context, MOE4_EINVAL, "x is NULL");
    TRY(resolve_stride(context, "ldx", layer->H, &batch->ldx));
    int is_quantised = batch->x_dtype == MOE4_DTYPE_F8_E4M3;
    if (is_quantised != (batch->x_scale != NULL))
        return context_fail(context, MOE4_EINVAL, "x_scale is %s, but x is %s", is_quantised ? "NULL" : "given",
                            is_quantised ? "f8_e4m3, which needs it" : "not quantised");
    const int64_t n_scales = batch->compute == MOE4_COMPUTE_FP8 ? 1 : layer->H / BLOCK_SIZE;
    if (is_quantised) TRY(resolve_stride(context, "ldx_scale", n_scales, &batch->ldx_scale));
    if (batch->stream && context->backend == &backend_cpu)
        return context_fail(context, MOE4_EINVAL, "stream is not NULL, which it must be on the cpu");
    return MOE4_OK;
}

static moe4_status check_workspace(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                   int32_t top_k)
{
    size_t needed;
    TRY(context->backend->workspace_bytes(context, layer, batch->n_tokens, top_k, &needed));
    if (!batch->workspace || batch->workspace_bytes < needed)
        return context_fail(context, MOE4_EINVAL, "workspace has %zu bytes, expected at least %zu",
                            batch->workspace ? batch->workspace_bytes : 0, needed);
    if ((uintptr_t)batch->workspace % 256)
        return context_fail(context, MOE4_EINVAL, "workspace begins at a multiple of %d bytes, expected 256",
                            1 << __builtin_ctzll((uintptr_t)batch->workspace));
    return MOE4_OK;
}

static moe4_status check_result(moe4_context *context, const moe4_layer *layer, int64_t n_tokens, int32_t top_k,
                                moe4_result *result)
{
    if (!result->y && !result->gemm2_rows)
        return context_fail(context, MOE4_EINVAL, "y is NULL, and so is gemm2_rows: nothing is asked for");
    TRY(resolve_stride(context, "ldy", layer->output_size, &result->ldy));
    if (result->row_map && n_tokens * top_k > INT32_MAX) /* n_tokens <= INT32_MAX: supports */
        return context_fail(context, MOE4_EUNSUPPORTED, "row_map holds 32-bit rows, but %lld tokens have %d slots each",
                            (long long)n_tokens, top_k);
    if (result->replay && result->replay_rows < n_tokens)
        return context_fail(context, MOE4_EINVAL, "replay_rows is %lld, expected at least the %lld tokens",
                            (long long)result->replay_rows, (long long)n_tokens);
    return MOE4_OK;
}

/* What the layer's own router reads: router_x, or x where that is as wide. */
static moe4_status resolve_router_x(moe4_context *context, const moe4_layer *layer, moe4_batch *batch)
{
    if (batch->router_x) {
        TRY(resolve_stride(context, "ldrouter_x", layer->router_size, &batch->ldrouter_x));
    } else if (layer->router_size != layer->H) {
        return context_fail(context, MOE4_EINVAL,
                            "router_x is NULL, but the router sees %lld columns and x has hidden_size %lld",
                            (long long)layer->router_size, (long long)layer->H);
    } else {
        batch->router_x = batch->x;
        batch->router_x_dtype = batch->x_dtype;
        batch->ldrouter_x = batch->ldx;
    }
    if (dtype_is_float(batch->router_x_dtype)) return MOE4_OK;
    return context_fail(context, MOE4_EUNSUPPORTED,
                        "the layer's own router reads bf16, f16 or f32, but %s is %s: bring logits or router_x",
                        batch->router_x == batch->x ? "x" : "router_x", dtype_name(batch->router_x_dtype));
}

/* What the host can see of token ids: all of them, or whether they are there. */
static moe4_status check_token_ids(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                   int64_t n_tokens)
{
    int is_host = context->backend == &backend_cpu;
    return route_check_tokens(context, &layer->router, batch->token_ids, is_host ? n_tokens : 0);
}

static moe4_status check_logits(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, moe4_logits *logits)
{
    if (logits->logits) return resolve_stride(context, "logits.ld", layer->E, &logits->ld);
    if (!layer->router_size)
        return context_fail(context, MOE4_EINVAL, "logits are NULL, but the layer has no router of its own");
    return resolve_router_x(context, layer, batch);
}

static moe4_status check_topk(moe4_context *context, const moe4_layer *layer, const moe4_result *result,
                              moe4_topk *topk)
{
    int32_t largest = layer->E < MAX_TOP_K ? layer->E : MAX_TOP_K;
    if (topk->top_k < 1 || topk->top_k > largest)
        return context_fail(context, MOE4_EINVAL, "topk.top_k is %d, expected 1 to %d", topk->top_k, largest);
    if (!topk->ids) return context_fail(context, MOE4_EINVAL, "topk.ids is NULL");
    TRY(resolve_stride(context, "topk.ld_ids", topk->top_k, &topk->ld_ids));
    if (result->logits || result->replay)
        return context_fail(context, MOE4_EINVAL, "result.%s is asked for, but a call with given ids has no router",
                            result->logits ? "logits" : "replay");
    if (topk->format == MOE4_TOPK_PACKED) {
        if (topk->weights)
            return context_fail(context, MOE4_EINVAL, "topk.weights is given beside packed ids, which hold them");
        return MOE4_OK;
    }
    if (!topk->weights) return context_fail(context, MOE4_EINVAL, "topk.weights is NULL");
    return resolve_stride(context, "topk.ld_weights", topk->top_k, &topk->ld_weights);
}

/* A dtype that was left at zero is the INIT macro's. */
static void resolve_dtypes(moe4_batch *batch, moe4_logits *logits, moe4_topk *topk, moe4_result *result)
{
    if (!batch->x_dtype) batch->x_dtype = MOE4_DTYPE_BF16;
    if (!batch->router_x_dtype) batch->router_x_dtype = MOE4_DTYPE_BF16;
    if (!result->y_dtype) result->y_dtype = MOE4_DTYPE_BF16;
    if (logits && !logits->dtype) logits->dtype = MOE4_DTYPE_F32;
    if (topk && !topk->weights_dtype) topk->weights_dtype = MOE4_DTYPE_F32;
}

/* The words of a call, for the same refusals that moe4_supports foresees. */
static moe4_query query_of(const moe4_batch *batch, const moe4_logits *logits, const moe4_topk *topk,
                           const moe4_result *result)
{
    moe4_query query = MOE4_QUERY_INIT;
    query.compute = batch->compute;
    query.x_dtype = batch->x_dtype;
    query.y_dtype = result->y_dtype;
    query.write = result->write;
    query.n_tokens = batch->n_tokens;
    if (logits) query.logits_dtype = logits->logits ? logits->dtype : MOE4_DTYPE_NONE;
    if (!topk) return query;
    query.topk_format = topk->format;
    query.weights_dtype = topk->format == MOE4_TOPK_PACKED ? MOE4_DTYPE_BF16 : topk->weights_dtype;
    query.weight_use = topk->weight_use;
    query.top_k = topk->top_k;
    return query;
}

/* Both forms of a call once their structs are adopted; exactly one of logits and topk is not NULL. */
static moe4_status forward(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, moe4_logits *logits,
                           moe4_topk *topk, moe4_result *result)
{
    struct forward_call call = {batch, NULL, topk, result, 0, topk ? topk->top_k : layer->router.top_k};
    resolve_dtypes(batch, logits, topk, result);
    moe4_query query = query_of(batch, logits, topk, result);
    TRY(supports_call(context, &query));
    TRY(read_token_count(context, batch->n_tokens, batch->n_tokens_device, &call.n_tokens));
    if (call.n_tokens == 0) return MOE4_OK;
    TRY(check_batch(context, layer, batch));
    TRY(check_result(context, layer, call.n_tokens, call.top_k, result));
    if (topk) {
        TRY(check_topk(context, layer, result, topk));
    } else {
        TRY(check_logits(context, layer, batch, logits));
        TRY(check_token_ids(context, layer, batch, call.n_tokens));
        if (logits->logits) call.logits = logits;
    }
    TRY(check_workspace(context, layer, batch, call.top_k));
    return context->backend->forward(context, layer, &call);
}

static moe4_status check_handles(moe4_context *context, const moe4_layer *layer)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!layer) return context_fail(context, MOE4_EINVAL, "layer is NULL");
    if (layer->backend != context->backend)
        return context_fail(context, MOE4_EINVAL, "the layer was prepared for another device than %s",
                            context->device_name);
    return MOE4_OK;
}

moe4_status moe4_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *given_batch,
                                const moe4_logits *given_logits, const moe4_result *given_result)
{
    moe4_batch batch;
    moe4_logits logits = MOE4_LOGITS_INIT;
    moe4_result result;
    TRY(check_handles(context, layer));
    TRY(adopt_struct(context, "batch", given_batch, &batch, sizeof batch));
    TRY(adopt_struct(context, "result", given_result, &result, sizeof result));
    if (given_logits) {
        TRY(adopt_struct(context, "logits", given_logits, &logits, sizeof logits));
        if (!logits.logits && batch.n_tokens) return context_fail(context, MOE4_EINVAL, "logits.logits is NULL");
    }
    if (!layer->router.method)
        return context_fail(context, MOE4_EINVAL, "the layer has no routing method: bring ids and weights");
    return forward(context, layer, &batch, &logits, NULL, &result);
}

moe4_status moe4_forward_experts(moe4_context *context, const moe4_layer *layer, const moe4_batch *given_batch,
                                 const moe4_topk *given_topk, const moe4_result *given_result)
{
    moe4_batch batch;
    moe4_topk topk;
    moe4_result result;
    TRY(check_handles(context, layer));
    TRY(adopt_struct(context, "batch", given_batch, &batch, sizeof batch));
    TRY(adopt_struct(context, "topk", given_topk, &topk, sizeof topk));
    TRY(adopt_struct(context, "result", given_result, &result, sizeof result));
    return forward(context, layer, &batch, NULL, &topk, &result);
}

/* ---- Support
 * ------------------------------------------------------------------------------------------------------------- */

moe4_status moe4_supports(moe4_context *context, const moe4_query *given)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    moe4_query query;
    TRY(adopt_struct(context, "query", given, &query, sizeof query));
    return supports_query(context, &query);
}
