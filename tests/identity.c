#include "identity.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fixture.h"

moe4_layer *identity_layer(moe4_context *context, int64_t size, int32_t n_experts)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    uint8_t *codes = buffers_allocate(&buffers, (size_t)(size * size / 2));
    uint8_t *scales = buffers_allocate(&buffers, (size_t)(size * size / 32));
    moe4_expert *experts = buffers_allocate(&buffers, (size_t)n_experts * sizeof *experts);
    memset(codes, 0, (size_t)(size * size / 2));
    memset(scales, 127, (size_t)(size * size / 32));
    for (int64_t row = 0; row < size; row++) set_code(codes + row * size / 2, row, 2);
    const moe4_matrix identity = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    for (int32_t e = 0; e < n_experts; e++) experts[e] = (moe4_expert){identity, identity};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = size;
    config.n_experts = n_experts;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.activation = MOE4_ACTIVATION_IDENTITY;
    moe4_layer *layer = layer_open(context, &config, experts);
    buffers_release(&buffers);
    return layer;
}

static void must(moe4_context *context, moe4_status status)
{
    if (status) fail_msg("%s", moe4_context_message(context));
}

void identity_run(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, const moe4_topk *topk,
                  const moe4_result *result)
{
    struct buffers buffers = {BUFFERS_GUARD_BEFORE, NULL};
    must(context,
         moe4_workspace_bytes(context, layer, batch->compute, batch->n_tokens, topk->top_k, &batch->workspace_bytes));
    batch->workspace = buffers_allocate(&buffers, batch->workspace_bytes);
    must(context, moe4_forward_experts(context, layer, batch, topk, result));
    buffers_release(&buffers);
    batch->workspace = NULL;
}

void identity_pass(moe4_context *context, const moe4_layer *layer, moe4_batch *batch, const moe4_result *result)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    const int64_t n = batch->n_tokens;
    int32_t *ids = buffers_allocate(&buffers, (size_t)n * sizeof *ids);
    float *weights = buffers_allocate(&buffers, (size_t)n * sizeof *weights);
    moe4_topk topk = MOE4_TOPK_INIT;
    for (int64_t t = 0; t < n; t++) {
        ids[t] = 0;
        weights[t] = 1.0f;
    }
    topk.top_k = 1;
    topk.ids = ids;
    topk.weights = weights;
    identity_run(context, layer, batch, &topk, result);
    buffers_release(&buffers);
}
