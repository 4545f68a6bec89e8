/* Generated MoE layers: whatever the generator makes, one expert at a time. */
#ifndef MOE4_CLI_SYNTH_LAYERS_H
#define MOE4_CLI_SYNTH_LAYERS_H

#include "feed.h"
#include "generate.h"

struct synth_layers {
    moe4_layer_config config; /* of a layer that chooses by scores, without a router */
    int64_t router_size;      /* columns of the router's weight */
    uint64_t seed;
    int32_t n_threads, n_hash_layers;
    int64_t vocab_size; /* of the hash layers */
    int has_biases, has_selection_bias;

    int32_t layer; /* that the feed is at; -1 = none */
    moe4_layer_config at;
    uint8_t *codes[2], *scales[2]; /* of one expert: gate_up, down */
    uint16_t *bias[2];
    uint16_t *router_weight, *router_bias; /* [E, router_size] and [E], bf16 */
    float *selection_bias;                 /* [E] */
    int64_t *hash_table;                   /* [vocab_size, top_k] */
};

/* Memory for a layer; everything above `layer` is given.  Says why it fails. */
int synth_layers_begin(struct synth_layers *layers);

/* Routers have their values. */
struct feed synth_layers_feed(struct synth_layers *layers);

void synth_layers_release(struct synth_layers *layers);

#endif
