/* One forward call on a CUDA device: kernels on the caller's stream, state in the caller's workspace, nothing else.
 *
 *   route      logits or the caller's routing -> ids, weights, local experts    all tokens
 *   group      -> routed rows sorted by local expert, token tiles               \
 *   gate_up    GEMM gathering rows of x, bias, activation -> v'                  | a chunk of tokens
 *   down       GEMM, bias -> z'                                                  | at a time
 *   combine    z' and weights -> y                                              /
 *
 * Grids cover the largest batch; how many tokens, rows and tiles there are stays on the device. */
#ifndef MOE4_CUDA_FORWARD_H
#define MOE4_CUDA_FORWARD_H

#include "backend.h"

/* Where everything lies in the workspace, for calls of up to n_tokens tokens. */
struct cuda_workspace_plan {
    int64_t chunk_tokens, max_tiles;
    int64_t ldz;                          /* elements of a row of z' */
    size_t ids, weights, locals, row_map; /* of the whole batch */
    size_t first, counts, row_token, tiles, exact_tiles, numbers;
    size_t logits, x, intermediate, z;
    size_t output_rows, row_output; /* where there are several chunks */
    size_t x_scales, v_scales;      /* fp8 compute */
    size_t total;
};

/* Single numbers on the device, at plan.numbers. */
enum { TICKET, N_TILES, N_EXACT_TILES, N_ROWS, N_CLAIMS, N_DOWN_CLAIMS, N_NUMBERS };

moe4_status cuda_forward_plan(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                              int32_t top_k, struct cuda_workspace_plan *plan);
/* Whether a layer whose weights are arranged for one mode can compute in another. */
moe4_status cuda_check_compute(struct moe4_context *context, moe4_compute compute, moe4_compute arranged);
moe4_status cuda_forward(struct moe4_context *context, const struct moe4_layer *layer, const struct forward_call *call);

/* moe4_combine. */
moe4_status cuda_combine(struct moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);

#endif
