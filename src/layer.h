/* A prepared layer: its config with every default resolved, and what the backend made of its weights. */
#ifndef MOE4_LAYER_H
#define MOE4_LAYER_H

#include "cpu/activation.h"
#include "cpu/route.h"
#include "moe4/moe4.h"

struct backend;
struct layer_part; /* backend.h */

struct moe4_layer {
    moe4_allocator allocator;
    const struct backend *backend;

    int64_t H, I;
    int64_t output_size; /* columns of y, at most H */
    int64_t stored_intermediate_size;
    int32_t E, L, first_expert;
    int32_t *local_of; /* [E] local expert of a global id, -1 = elsewhere */

    moe4_gate_up gate_up;
    moe4_activation activation;
    moe4_compute compute;             /* what the weights are arranged for, where that matters */
    moe4_presence alpha, beta, limit; /* which of them were given */
    struct activation_params *params; /* [L] */

    moe4_routing_method method;
    struct router router; /* how logits become ids and weights; method NULL = the caller's business */
    void *router_store;   /* its bias and table */
    size_t router_store_bytes;
    int64_t router_size;  /* what the router's own GEMM sees; 0 = there is none */
    float *router_weight; /* [E, router_size] */
    float *router_bias;   /* [E] */

    int64_t chunk_rows; /* routed rows that forward works on at a time; the backend's choice */
    void *prepared;     /* the backend's */
    void *mapping;      /* of the file that holds some of its arrays; NULL = all are in memory of their own */
    size_t mapping_bytes;
};

/* Builds all but `prepared` from a config that layer_validate accepts. */
moe4_status layer_create(struct moe4_context *context, const moe4_layer_config *config, struct moe4_layer **layer);
void layer_destroy(struct moe4_layer *layer);

/* Reads local expert l from its source, and refuses what is missing of it or too short. */
moe4_status layer_read_expert(struct moe4_context *context, const struct moe4_layer *layer,
                              const moe4_expert_source *source, int32_t l, moe4_expert *expert);

/* The same by source->describe: without the bytes. */
moe4_status layer_describe_expert(struct moe4_context *context, const struct moe4_layer *layer,
                                  const moe4_expert_source *source, int32_t l, moe4_expert *expert);

/* Says so, unless the source has said why it failed; returns status. */
moe4_status layer_source_failed(struct moe4_context *context, int32_t l, moe4_status status);

/* Codes and scales of all local experts as a checkpoint has them. */
int64_t layer_weight_bytes(const struct moe4_layer *layer);

/* The parts' n_bytes from their shapes and types.  MOE4_EINVAL if one wraps. */
moe4_status layer_size_parts(struct moe4_context *context, const struct moe4_layer *layer, struct layer_part *parts,
                             int32_t n_parts);

/* Memory for every array of a planned layer that has none yet. */
moe4_status layer_allocate_parts(struct moe4_context *context, struct moe4_layer *layer);

/* Everything about a config that does not depend on the device, in words. */
moe4_status layer_validate(struct moe4_context *context, const moe4_layer_config *config);

/* The local expert of a global id, -1 for any that is not here. */
static inline int32_t layer_local_expert(const struct moe4_layer *layer, int32_t id)
{
    return id >= 0 && id < layer->E ? layer->local_of[id] : -1;
}

#endif
