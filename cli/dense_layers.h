/* The MoE layers of a checkpoint that is not quantised yet, as layers in MXFP4: each expert is quantised when it is
 * read. */
#ifndef MOE4_CLI_DENSE_LAYERS_H
#define MOE4_CLI_DENSE_LAYERS_H

#include "dense.h"
#include "encode.h"
#include "feed.h"

/* The tensors of one layer: stacked, or a list for each projection. */
struct dense_layer {
    int32_t number, n_experts;
    const char *base; /* names begin with its first base_length bytes, through "experts." */
    int base_length;
    const moe4_tensor *stacked[2], *stacked_bias[2];                       /* gate_up, down; NULL = apart */
    const moe4_tensor **apart[N_PROJECTIONS], **apart_bias[N_PROJECTIONS]; /* [n_experts] */
};

struct dense_layers {
    moe4_context *context;
    const moe4_tensors *tensors;
    struct encoder *encoder;
    struct dense_model model;
    struct dense_layer *layers; /* ascending */
    int32_t n_layers;

    const struct dense_layer *at;  /* of the feed */
    moe4_layer_config config;      /* its sizes and order */
    uint8_t *codes[2], *scales[2]; /* of one expert: gate_up, down */
    int64_t codes_room[2], scales_room[2];
    char *bias[2];
    int64_t bias_room[2];
};

/* Finds the layers and checks that all their tensors are there, of types and shapes that fit config.json. */
int dense_layers_find(moe4_context *context, const json_t *config, const moe4_tensors *tensors, struct encoder *encoder,
                      struct dense_layers *layers);

/* Whether a tensor is one of theirs. */
int dense_layers_have(const moe4_tensor *tensor);

/* Their experts.  The config has sizes and order only. */
struct feed dense_layers_feed(struct dense_layers *layers);

void dense_layers_release(struct dense_layers *layers);

#endif
