#include "cpu/forward.h"

#include <stdatomic.h>

#include "base/checked.h"
#include "base/dims.h"
#include "base/fp8.h"
#include "context.h"
#include "cpu/fpenv.h"
#include "cpu/isa.h"
#include "cpu/pool.h"
#include "tuning.h"

enum { SMALLEST_TILE_TOKENS = 4, DEFAULT_CLAIM_SHARE = 6 };

/* ---- Workspace --------------------------------------------------------------------------------------------------- */

/* Appends count * item_bytes at a cache line to the plan; its offset, or SIZE_MAX once anything has wrapped. */
static size_t reserve(struct workspace_plan *plan, int64_t count, size_t item_bytes)
{
    size_t offset = plan->total, bytes;
    if (!size_multiply((size_t)count, item_bytes, &bytes) || !size_add(bytes, 63, &bytes) ||
        !size_add(offset, bytes / 64 * 64, &plan->total))
        plan->total = SIZE_MAX;
    return offset;
}

moe4_status forward_plan(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens, int32_t top_k,
                         struct workspace_plan *plan)
{
    const struct kernel *kernel = ((const struct prepared *)layer->prepared)->kernel;
    const int64_t x_words = kernel->for_x ? layer->H / BLOCK_SIZE * kernel->for_x->block_words : 0; /* of a row */
    const int64_t v_words = layer->I / BLOCK_SIZE * kernel->block_words;
    const int64_t slots = n_tokens * top_k; /* n_tokens <= INT32_MAX: cpu_supports */
    const int64_t largest_chunk = layer->chunk_rows / top_k > 0 ? layer->chunk_rows / top_k : 1;
    *plan = (struct workspace_plan){.chunk_tokens = n_tokens < largest_chunk ? n_tokens : largest_chunk};
    plan->chunk_rows = plan->chunk_tokens * top_k;
    plan->max_active = layer->L < plan->chunk_rows ? layer->L : plan->chunk_rows;
    plan->max_tiles = plan->max_active + plan->chunk_rows / SMALLEST_TILE_TOKENS;

    plan->ids = reserve(plan, slots, sizeof(int32_t));
    plan->weights = reserve(plan, slots, sizeof(float));
    plan->output_rows = reserve(plan, layer->L, sizeof(int64_t));
    plan->router_logits = reserve(plan, route_stage_logits(layer, n_tokens), sizeof(float));
    plan->counts = reserve(plan, group_blocks(plan->chunk_rows) * layer->L, sizeof(int32_t));
    plan->row_of_slot = reserve(plan, plan->chunk_rows, sizeof(int32_t));
    plan->slot_of_row = reserve(plan, plan->chunk_rows, sizeof(int32_t));
    plan->active = reserve(plan, plan->max_active, sizeof(struct active_expert));
    plan->tiles = reserve(plan, plan->max_tiles, sizeof(struct tile));
    plan->x_factor = reserve(plan, plan->chunk_rows, sizeof(float));
    plan->intermediate_factor = reserve(plan, plan->chunk_rows, (size_t)fp8_groups(layer->I) * sizeof(float));
    plan->x = reserve(plan, plan->chunk_rows, (size_t)layer->H * sizeof(uint16_t));
    plan->operand = reserve(plan, plan->chunk_rows, (size_t)(x_words > v_words ? x_words : v_words) * sizeof(int32_t));
    plan->intermediate = reserve(plan, plan->chunk_rows, (size_t)layer->I * sizeof(uint16_t));
    const int64_t converted = (layer->H + top_k - 1) / top_k; /* elements of a token, by slots */
    const int64_t z_panels = (layer->output_size + PANEL_ROWS - 1) / PANEL_ROWS;
    const int64_t z_columns = z_panels * PANEL_ROWS > converted ? z_panels * PANEL_ROWS : converted;
    plan->z = reserve(plan, plan->chunk_rows, (size_t)z_columns * sizeof(uint16_t));
    plan->converted_scale = reserve(plan, plan->chunk_tokens, sizeof(float));
    plan->gathered = reserve(plan, plan->max_tiles, sizeof(int32_t));
    plan->experts_left = reserve(plan, z_panels, sizeof(int32_t));
    const size_t route_bytes = route_stage_scratch_bytes(layer);
    const size_t gather_bytes = gather_scratch_bytes(layer, plan->chunk_rows);
    plan->scratch_bytes = route_bytes > gather_bytes ? route_bytes : gather_bytes;
    plan->scratch = reserve(plan, pool_threads(context->pool), plan->scratch_bytes);
    if (plan->total == SIZE_MAX)
        return context_fail(context, MOE4_EINVAL, "the workspace of %lld tokens does not fit the address space",
                            (long long)n_tokens);
    return MOE4_OK;
}

static void place(struct forward *f, char *workspace)
{
    const struct workspace_plan *plan = &f->plan;
    f->ids = (int32_t *)(workspace + plan->ids);
    f->weights = (float *)(workspace + plan->weights);
    f->output_rows = (int64_t *)(workspace + plan->output_rows);
    f->router_logits = (float *)(workspace + plan->router_logits);
    f->counts = (int32_t *)(workspace + plan->counts);
    f->row_of_slot = (int32_t *)(workspace + plan->row_of_slot);
    f->slot_of_row = (int32_t *)(workspace + plan->slot_of_row);
    f->active = (struct active_expert *)(workspace + plan->active);
    f->tiles = (struct tile *)(workspace + plan->tiles);
    f->x_factor = (float *)(workspace + plan->x_factor);
    f->intermediate_factor = (float *)(workspace + plan->intermediate_factor);
    f->x = (uint16_t *)(workspace + plan->x);
    f->operand = (int32_t *)(workspace + plan->operand);
    f->intermediate = (uint16_t *)(workspace + plan->intermediate);
    f->z = f->converted = (uint16_t *)(workspace + plan->z);
    f->converted_scale = (float *)(workspace + plan->converted_scale);
    f->gathered = (_Atomic int32_t *)(workspace + plan->gathered);
    f->experts_left = (_Atomic int32_t *)(workspace + plan->experts_left);
    f->scratch = workspace + plan->scratch;
}

/* ---- Stages ------------------------------------------------------------------------------------------------------ */

struct stage {
    struct forward *f;
    stage_fn *run;
    int64_t n_items, max_claim;
    int32_t width; /* threads */
    _Alignas(64) _Atomic int64_t begun;
};

/* Claims runs of items: long while much is left, one at a time near the end, so that all threads finish together. */
static void stage_worker(void *argument, int32_t worker)
{
    struct stage *stage = argument;
    int64_t first = atomic_load_explicit(&stage->begun, memory_order_relaxed);
    while (first < stage->n_items) {
        int64_t claim = (stage->n_items - first) / (2 * stage->width);
        if (claim > stage->max_claim) claim = stage->max_claim;
        if (claim < 1) claim = 1;
        if (!atomic_compare_exchange_weak_explicit(&stage->begun, &first, first + claim, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue;
        stage->run(stage->f, first, first + claim, worker % stage->width);
        first = atomic_load_explicit(&stage->begun, memory_order_relaxed);
    }
}

void stage_run(struct forward *f, stage_fn *run, int64_t n_items, int64_t max_claim)
{
    if (n_items == 1) {
        run(f, 0, 1, 0);
        return;
    }
    struct stage stage = {f, run, n_items, max_claim, pool_threads(f->context->pool), 0};
    pool_run(f->context->pool, stage_worker, &stage);
}

/* ---- The recipe -------------------------------------------------------------------------------------------------- */

static void run_chunk(struct forward *f)
{
    group_stage(f);
    convert_stage(f);
    gate_up_stage(f);
    down_stage(f);
    stage_outputs_copy(f);
}

moe4_status forward_run(struct moe4_context *context, const struct moe4_layer *layer, const struct forward_call *call)
{
    const struct prepared *prepared = layer->prepared;
    struct forward f = {
        .context = context, .layer = layer, .prepared = prepared, .call = call, .T = call->n_tokens, .A = call->top_k};
    if (!isa_includes(context->isa, prepared->isa))
        return context_fail(context, MOE4_EINVAL,
                            "the layer was prepared for kernel %s, which this context's level lacks",
                            prepared->kernel->name);
    moe4_status status = forward_plan(context, layer, f.T, f.A, &f.plan);
    if (status) return status;
    place(&f, call->batch->workspace);

    moe4_tactic tactic = tuning_find(context, layer, call->batch->compute, f.T, f.A);
    f.kernel = forward_is_int8(&f) ? prepared->kernel_int8 : prepared->kernel;
    f.exact_kernel = forward_is_int8(&f) ? kernel_int8_exact() : kernel_exact();
    f.tile_tokens = tactic.tile_tokens ? tactic.tile_tokens : f.kernel->tile_tokens;
    f.claim_share = tactic.claim_share ? tactic.claim_share : DEFAULT_CLAIM_SHARE;

    f.group_size = call->batch->compute == MOE4_COMPUTE_FP8 ? FP8_GROUP : layer->I;
    f.n_groups = (layer->I + f.group_size - 1) / f.group_size;

    uint32_t host = fpenv_enter();
    route_stage(&f);
    stage_outputs_begin(&f);
    for (f.first_token = 0; f.first_token < f.T; f.first_token += f.plan.chunk_tokens) {
        int64_t left = f.T - f.first_token;
        f.n_tokens = left < f.plan.chunk_tokens ? left : f.plan.chunk_tokens;
        run_chunk(&f);
    }
    fpenv_leave(host);
    return MOE4_OK;
}
