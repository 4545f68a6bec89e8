/* route: logits, or the caller's own routing, to ids and weights of every token. */
#include <string.h>

#include "base/convert.h"
#include "context.h"
#include "cpu/forward.h"
#include "cpu/pool.h"

enum {
    BATCH_TOKENS = 8,        /* that are routed together, and multiplied by the same weights */
    BLOCK_TOKENS = 512,      /* whose logits the workspace holds */
    ITEMS_A_THREAD = 4,      /* of the router's GEMM */
    LEAST_PRODUCTS = 1 << 18 /* of an item: some 20 microseconds, about what it takes to wake a thread */
};

size_t route_stage_scratch_bytes(const struct moe4_layer *layer)
{
    if (!layer->router.method) return 0;
    const size_t widened = BATCH_TOKENS * (size_t)layer->router_size * sizeof(float);
    const size_t route = route_scratch_bytes(&layer->router);
    return widened > route ? widened : route;
}

int64_t route_stage_logits(const struct moe4_layer *layer, int64_t n_tokens)
{
    return layer->router_size ? (n_tokens < BLOCK_TOKENS ? n_tokens : BLOCK_TOKENS) * layer->E : 0;
}

static int64_t count_batches(int64_t n_tokens)
{
    return (n_tokens + BATCH_TOKENS - 1) / BATCH_TOKENS;
}

static char *thread_scratch(const struct forward *f, int32_t worker)
{
    return f->scratch + (size_t)worker * f->plan.scratch_bytes;
}

/* ---- The router's own GEMM: an item is a slice of the experts for a batch of tokens ------------------------------ */

/* A row of router input, rounded to bf16. */
static void widen_row(const moe4_batch *batch, int64_t token, int64_t n, float *wide)
{
    const int64_t first = token * batch->ldrouter_x;
    if (batch->router_x_dtype == MOE4_DTYPE_BF16)
        for (int64_t k = 0; k < n; k++) wide[k] = load_f32(batch->router_x, MOE4_DTYPE_BF16, first + k);
    else
        for (int64_t k = 0; k < n; k++)
            wide[k] = bf16_to_f32(bf16_from_f32(load_f32(batch->router_x, batch->router_x_dtype, first + k)));
}

static void make_logits(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    const struct moe4_layer *layer = f->layer;
    const int64_t K = layer->router_size, E = layer->E;
    float *wide = (float *)thread_scratch(f, worker);
    int64_t widened = -1;
    for (int64_t item = first; item < last; item++) {
        const int64_t batch = item / f->router_slices, slice = item % f->router_slices, token = batch * BATCH_TOKENS;
        const int64_t left = f->router_tokens - token, n = left < BATCH_TOKENS ? left : BATCH_TOKENS;
        for (int64_t t = 0; t < n && batch != widened; t++)
            widen_row(f->call->batch, f->router_first + token + t, K, wide + t * K);
        widened = batch;
        for (int64_t e = E * slice / f->router_slices; e < E * (slice + 1) / f->router_slices; e++) {
            float sums[BATCH_TOKENS];
            f->prepared->rows->dot(wide, K, (int32_t)n, layer->router_weight + e * K, K, sums);
            for (int64_t t = 0; t < n; t++) f->router_logits[(token + t) * E + e] = sums[t] + layer->router_bias[e];
        }
    }
}

/* As many slices as keep the threads busy, and are worth waking them. */
static int64_t count_slices(const struct forward *f)
{
    const int64_t n_batches = count_batches(f->router_tokens), E = f->layer->E;
    const int64_t wanted = (ITEMS_A_THREAD * pool_threads(f->context->pool) + n_batches - 1) / n_batches;
    const int64_t tokens = f->router_tokens < BATCH_TOKENS ? f->router_tokens : BATCH_TOKENS;
    int64_t worth = tokens * E * f->layer->router_size / LEAST_PRODUCTS;
    if (worth > E) worth = E;
    if (worth < 1) worth = 1;
    return wanted < worth ? wanted : worth;
}

/* ---- Routing: an item is a batch of tokens ----------------------------------------------------------------------- */

static void route_tokens(struct forward *f, int64_t first, int64_t n, char *scratch)
{
    const struct moe4_layer *layer = f->layer;
    const moe4_result *result = f->call->result;
    const moe4_logits *given = f->call->logits;
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
        call.logits = f->router_logits + (first - f->router_first) * layer->E;
        call.dtype = MOE4_DTYPE_F32;
        call.ld = layer->E;
    }
    if (result->logits)
        for (int64_t i = 0; i < n * layer->E; i++)
            result->logits[first * layer->E + i] =
                load_f32(call.logits, call.dtype, i / layer->E * call.ld + i % layer->E);
    route_rows(&layer->router, &call, 0, n, scratch);
}

static void route_batches(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    for (int64_t batch = first; batch < last; batch++) {
        int64_t token = batch * BATCH_TOKENS, left = f->router_tokens - token;
        route_tokens(f, f->router_first + token, left < BATCH_TOKENS ? left : BATCH_TOKENS, thread_scratch(f, worker));
    }
}

static void route_block(struct forward *f, int64_t first, int64_t n_tokens)
{
    f->router_first = first;
    f->router_tokens = n_tokens;
    if (!f->call->logits) {
        f->router_slices = count_slices(f);
        stage_run(f, make_logits, count_batches(n_tokens) * f->router_slices, 16);
    }
    stage_run(f, route_batches, count_batches(n_tokens), 16);
}

/* ---- The caller's own routing ------------------------------------------------------------------------------------ */

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
    else if (f->call->logits)
        route_block(f, 0, f->T);
    else
        for (int64_t t = 0; t < f->T; t += BLOCK_TOKENS)
            route_block(f, t, f->T - t < BLOCK_TOKENS ? f->T - t : BLOCK_TOKENS);
    size_t slots = (size_t)(f->T * f->A);
    const int on_input = f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
    if (result->ids) memcpy(result->ids, f->ids, slots * sizeof *f->ids);
    if (result->weights && !on_input) memcpy(result->weights, f->weights, slots * sizeof *f->weights);
    for (size_t i = 0; result->weights && on_input && i < slots; i++) result->weights[i] = 1.0f;
}
