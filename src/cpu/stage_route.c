/* route: logits, or the caller's own routing, to ids and weights of every token. */
#include <string.h>

#include "base/convert.h"
#include "context.h"
#include "cpu/forward.h"

enum { BATCH_TOKENS = 8 }; /* tokens whose logits a thread makes before it routes them */

static size_t widened_bytes(const struct moe4_layer *layer)
{
    return (size_t)layer->router_size * sizeof(float);
}

/* A thread's scratch: one widened row of router input, BATCH_TOKENS rows of logits, what route_rows wants. */
size_t route_stage_scratch_bytes(const struct moe4_layer *layer)
{
    if (!layer->router.method) return 0;
    return widened_bytes(layer) + BATCH_TOKENS * (size_t)layer->E * sizeof(float) +
           route_scratch_bytes(&layer->router) + 2 * 64;
}

/* The router's own GEMM: logits [n, E] of tokens first .. first+n-1. */
static void make_logits(const struct forward *f, int64_t first, int64_t n, float *wide, float *logits)
{
    const struct moe4_layer *layer = f->layer;
    const moe4_batch *batch = f->call->batch;
    int64_t K = layer->router_size;
    for (int64_t t = 0; t < n; t++, logits += layer->E) {
        for (int64_t k = 0; k < K; k++) {
            float value = load_f32(batch->router_x, batch->router_x_dtype, (first + t) * batch->ldrouter_x + k);
            wide[k] = bf16_to_f32(bf16_from_f32(value));
        }
        for (int32_t e = 0; e < layer->E; e++)
            logits[e] = f->prepared->rows->dot(wide, layer->router_weight + e * K, K) + layer->router_bias[e];
    }
}

static void route_tokens(struct forward *f, int64_t first, int64_t n, char *scratch)
{
    const struct moe4_layer *layer = f->layer;
    const moe4_result *result = f->call->result;
    const moe4_logits *given = f->call->logits;
    float *wide = (float *)scratch;
    float *logits = (float *)(scratch + (widened_bytes(layer) + 63) / 64 * 64);
    char *rest = (char *)(logits + BATCH_TOKENS * (int64_t)layer->E);
    rest += (64 - (uintptr_t)rest % 64) % 64;

    struct route_call call = {.ids = f->ids + first * f->A,
                              .weights = f->weights + first * f->A,
                              .replay = result->replay ? result->replay + first * f->A : NULL,
                              .token_ids = f->call->batch->token_ids ? f->call->batch->token_ids + first : NULL};
    if (given) {
        int64_t width = given->dtype == MOE4_DTYPE_F32 ? 4 : 2;
        call.logits = (const char *)given->logits + first * given->ld * width;
        call.dtype = given->dtype;
        call.ld = given->ld;
    } else {
        make_logits(f, first, n, wide, logits);
        call.logits = logits;
        call.dtype = MOE4_DTYPE_F32;
        call.ld = layer->E;
    }
    if (result->logits)
        for (int64_t i = 0; i < n * layer->E; i++)
            result->logits[first * layer->E + i] =
                load_f32(call.logits, call.dtype, i / layer->E * call.ld + i % layer->E);
    route_rows(&layer->router, &call, 0, n, rest);
}

static void route_batches(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    for (int64_t batch = first; batch < last; batch++) {
        int64_t token = batch * BATCH_TOKENS, left = f->T - token;
        route_tokens(f, token, left < BATCH_TOKENS ? left : BATCH_TOKENS,
                     f->scratch + (size_t)worker * f->plan.scratch_bytes);
    }
}

/* Row t of the caller's routing, in either form. */
static void unpack_topk(const moe4_topk *topk, int64_t t, int32_t *ids, float *weights)
{
    const int32_t *row = topk->ids + t * topk->ld_ids;
    for (int32_t a = 0; a < topk->top_k; a++) {
        if (topk->format == MOE4_TOPK_PACKED) {
            uint32_t packed = (uint32_t)row[a];
            ids[a] = (int16_t)(packed >> 16);
            weights[a] = bf16_to_f32((uint16_t)packed);
        } else {
            ids[a] = row[a];
            weights[a] = load_f32(topk->weights, topk->weights_dtype, t * topk->ld_weights + a);
        }
    }
}

void route_stage(struct forward *f)
{
    const moe4_result *result = f->call->result;
    if (f->call->topk)
        for (int64_t t = 0; t < f->T; t++) unpack_topk(f->call->topk, t, f->ids + t * f->A, f->weights + t * f->A);
    else
        stage_run(f, route_batches, (f->T + BATCH_TOKENS - 1) / BATCH_TOKENS, 16);
    size_t slots = (size_t)(f->T * f->A);
    const int on_input = f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
    if (result->ids) memcpy(result->ids, f->ids, slots * sizeof *f->ids);
    if (result->weights && !on_input) memcpy(result->weights, f->weights, slots * sizeof *f->weights);
    for (size_t i = 0; result->weights && on_input && i < slots; i++) result->weights[i] = 1.0f;
}
