#include "cuda/arena.h"
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/stream_few.h"

moe4_status cuda_forward_plan(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                              int32_t top_k, struct cuda_workspace_plan *plan)
{
    const int64_t slots = n_tokens * top_k; /* n_tokens <= INT32_MAX: cuda_supports */
    const int64_t largest_chunk = layer->chunk_rows / top_k > 0 ? layer->chunk_rows / top_k : 1;
    const int64_t chunk_tokens = n_tokens < largest_chunk ? n_tokens : largest_chunk, rows = chunk_tokens * top_k;
    const int is_chunked = chunk_tokens < n_tokens;
    struct arena arena = {0};
    *plan = (struct cuda_workspace_plan){.chunk_tokens = chunk_tokens};
    plan->max_tiles = (layer->L < rows ? layer->L : rows) + rows / STREAM_ROWS; /* the least */
    plan->ldz = round_up(layer->output_size, 8);
    plan->ids = arena_reserve(&arena, slots, sizeof(int32_t));
    plan->weights = arena_reserve(&arena, slots, sizeof(float));
    plan->locals = arena_reserve(&arena, slots, sizeof(int32_t));
    plan->row_map = arena_reserve(&arena, slots, sizeof(int32_t));
    plan->first = arena_reserve(&arena, layer->L, sizeof(int32_t));
    plan->counts = arena_reserve(&arena, layer->L, GROUP_BLOCKS * sizeof(int32_t));
    plan->row_token = arena_reserve(&arena, rows, sizeof(int32_t));
    plan->tiles = arena_reserve(&arena, plan->max_tiles, sizeof(struct token_tile));
    plan->exact_tiles = arena_reserve(&arena, plan->max_tiles, sizeof(struct token_tile));
    plan->numbers = arena_reserve(&arena, N_NUMBERS, sizeof(int32_t));
    plan->logits = arena_reserve(&arena, layer->router_size ? chunk_tokens : 0, (size_t)layer->E * sizeof(float));
    if (layer->compute == MOE4_COMPUTE_FP8) {
        const int64_t x_blocks = ceil_div(layer->H, FP8_BLOCK), v_blocks = ceil_div(layer->I, FP8_BLOCK);
        plan->x = arena_reserve(&arena, rows, (size_t)x_blocks * FP8_BLOCK);
        plan->x_scales = arena_reserve(&arena, rows, sizeof(float));
        const int64_t most = layer->L > FEW_SLOTS ? layer->L : FEW_SLOTS;
        const int64_t bf16_rows = rows < most ? rows : most; /* twice as wide */
        plan->intermediate = arena_reserve(&arena, rows + bf16_rows, (size_t)v_blocks * FP8_BLOCK);
        plan->v_scales = arena_reserve(&arena, rows, (size_t)v_blocks * sizeof(float));
    } else {
        plan->x = arena_reserve(&arena, chunk_tokens, (size_t)layer->H * sizeof(uint16_t));
        plan->intermediate = arena_reserve(&arena, rows, (size_t)layer->I * sizeof(uint16_t));
    }
    const int64_t z_columns = layer->I < plan->ldz ? plan->ldz : layer->I; /* fp8: the intermediate in bf16, before z */
    plan->z = arena_reserve(&arena, rows, (size_t)z_columns * sizeof(uint16_t));
    plan->output_rows = arena_reserve(&arena, is_chunked ? layer->L : 0, sizeof(int64_t));
    plan->row_output = arena_reserve(&arena, is_chunked ? rows : 0, sizeof(int64_t));
    plan->total = arena.total;
    if (plan->total == SIZE_MAX)
        return context_fail(context, MOE4_EINVAL, "the workspace of %lld tokens does not fit the address space",
                            (long long)n_tokens);
    return MOE4_OK;
}
