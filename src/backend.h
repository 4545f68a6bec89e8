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

/* One of the arrays that a prepared layer consists of: what allocation, release, saving and loading go by. */
struct layer_part {
    const char *name;
    const char *dtype; /* as safetensors spells it */
    int32_t rank;
    int64_t shape[3];
    int64_t n_bytes;
    void **slot; /* where the layer keeps its address */
};
enum { MAX_PARTS = 9 };

struct backend {
    /* Makes context->pool and the like from a validated config. */
    moe4_status (*open)(struct moe4_context *context, const moe4_context_config *config);
    void (*close)(struct moe4_context *context); /* also what open left half-built */
    void (*describe_context)(const struct moe4_context *context, moe4_context_info *info);

    /* What this device refuses of a query that is meaningful. */
    moe4_status (*supports)(struct moe4_context *context, const moe4_query *query);

    const char *layout; /* names what the arrays of a prepared layer hold; changes when that does */
    /* Makes layer->prepared, all sizes known, its arrays not there yet. */
    moe4_status (*plan)(struct moe4_context *context, struct moe4_layer *layer);
    /* Lists the arrays of a planned layer, the largest first; returns how many.  MOE4_EINVAL if one's size wraps. */
    moe4_status (*list_parts)(struct moe4_context *context, const struct moe4_layer *layer, struct layer_part *parts,
                              int32_t *n_parts);
    /* Memory of an array, in which kernels find it; NULL on failure. */
    void *(*allocate_part)(const struct moe4_layer *layer, size_t bytes);
    void (*release_part)(const struct moe4_layer *layer, void *memory, size_t bytes);
    /* Copies between an array and host memory; both NULL where arrays are host memory. */
    moe4_status (*download_part)(struct moe4_context *context, const struct moe4_layer *layer, void *to,
                                 const void *part, size_t bytes);
    moe4_status (*upload_part)(struct moe4_context *context, const struct moe4_layer *layer, void *part,
                               const void *from, size_t bytes);
    /* Fills the arrays, reading each expert once. */
    moe4_status (*fill)(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source);
    /* Accepts or refuses arrays that came from a file, and does whatever else fill does. */
    moe4_status (*check_parts)(struct moe4_context *context, struct moe4_layer *layer);
    void (*release)(struct moe4_layer *layer); /* layer->prepared, its arrays being gone */
    void (*describe_layer)(const struct moe4_layer *layer, moe4_layer_info *info); /* adds what the backend knows */

    moe4_status (*workspace_bytes)(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                                   int32_t top_k, size_t *bytes);
    moe4_status (*forward)(struct moe4_context *context, const struct moe4_layer *layer,
                           const struct forward_call *call);
    /* Finishes a deferred call of at least one token; result has y only. */
    moe4_status (*combine)(struct moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);

    /* For moe4_tune: what there is to choose, the default first, ... */
    const moe4_tactic *tactics;
    int32_t n_tactics;
    int (*tactic_is_valid)(const moe4_tactic *tactic);
    /* ... how many calls are worth timing together, and the time of one of `n` that follow each other: run(user, i,
     * stream) for i = 0..n-1. */
    int32_t (*calls_a_sample)(int64_t n_tokens);
    moe4_status (*time_calls)(struct moe4_context *context, int32_t n,
                              moe4_status (*run)(void *user, int32_t index, void *stream), void *user, double *ms);

    /* What the device found wrong after a call had returned (moe4_context_check), and forgetting it. */
    moe4_status (*check_faults)(struct moe4_context *context);
    void (*clear_faults)(struct moe4_context *context);
};

extern const struct backend backend_cpu, backend_cuda; /* the second where MOE4_HAS_CUDA is defined */

#endif
