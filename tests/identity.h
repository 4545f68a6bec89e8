/* A layer that changes nothing: what its calls do to numbers is rounding, quantisation and weighting alone. */
#ifndef MOE4_TEST_IDENTITY_H
#define MOE4_TEST_IDENTITY_H

#include "moe4/moe4.h"

/* H = I = size, no gate, both matrices of all n_experts experts the identity. */
moe4_layer *identity_layer(moe4_context *context, int64_t size, int32_t n_experts);

/* Runs a batch of `size` columns whose slots are ids and weights [T, top_k]; it must succeed.
 * Sets batch->workspace while it runs. */
void identity_run(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, const moe4_topk *topk,
                  const moe4_result *result);

/* The same with one slot a token: expert 0, weight 1. */
void identity_pass(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, const moe4_result *result);

#endif
