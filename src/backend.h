/* The seam between the public functions and a device.  It stops at forward, so that each backend may fuse as it likes.
 */
#ifndef MOE4_BACKEND_H
#define MOE4_BACKEND_H

#include "context.h"
#include "layer.h"
#include "moe4/moe4.h"

/* A validated call, either form of it. */
struct forward_call {
    const moe4_batch *batch;
    const moe4_logits *logits; /* router calls; NULL = the layer's own router */
    const moe4_topk *topk;     /* experts calls; NULL = a router call */
    const moe4_result *result;
    int64_t n_tokens; /* T, read from the device where that is the host */
    int32_t top_k;    /* A */
};

struct backend {
    /* Makes context->pool and the like from a validated config. */
    moe4_status (*open)(struct moe4_context *context, const moe4_context_config *config);
    void (*close)(struct moe4_context *context); /* also what open left half-built */
    void (*describe_context)(const struct moe4_context *context, moe4_context_info *info);

    /* What this device refuses of a query that is meaningful. */
    moe4_status (*supports)(struct moe4_context *context, const moe4_query *query);

    /* Fills layer->prepared, reading each expert once. */
    moe4_status (*prepare)(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source);
    void (*release)(struct moe4_layer *layer);
    void (*describe_layer)(const struct moe4_layer *layer, moe4_layer_info *info); /* adds what the backend knows */

    moe4_status (*workspace_bytes)(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                                   int32_t top_k, size_t *bytes);
    moe4_status (*forward)(struct moe4_context *context, const struct moe4_layer *layer,
                           const struct forward_call *call);
};

extern const struct backend backend_cpu;

#endif
