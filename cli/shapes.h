/* The layer shapes that benchmarks and tests share, by name. */
#ifndef MOE4_CLI_SHAPES_H
#define MOE4_CLI_SHAPES_H

#include "moe4/moe4.h"

struct layer_shape {
    const char *name;
    int32_t n_experts, top_k;
    int64_t hidden_size, intermediate_size;
    moe4_gate_up gate_up;
    moe4_activation activation;
    float alpha, beta, limit; /* 0 = absent */
    moe4_routing_method routing;
    int32_t n_group, topk_group;
    float scaling_factor;
    int has_biases;
};

/* Their names, NULL-terminated. */
extern const char *const layer_shape_names[];

/* NULL if there is none of that name. */
const struct layer_shape *layer_shape_find(const char *name);

/* The layer's config, without a router of its own. */
moe4_layer_config layer_shape_config(const struct layer_shape *shape);

#endif
