/* How models name their MoE tensors and what their config.json says, for layers that come without one: those of GGUF
 * files, of gpt-oss's original files, and generated ones. */
#ifndef MOE4_CLI_KNOWN_MODEL_H
#define MOE4_CLI_KNOWN_MODEL_H

#include <jansson.h>

#include "moe4/io.h"

struct known_model {
    const char *family; /* what moe4_checkpoint_info calls the model */
    const char *model_type;
    const char *prefix, *block;                 /* PREFIX "layers." N BLOCK */
    const char *extra_stem;                     /* for multi-token prediction layers; NULL = numbered on */
    const char *experts_key, *intermediate_key; /* of config.json */
    const char *router;                         /* what its tensors' names begin with */
    const char *selection_bias;                 /* the name behind the block */
};

/* NULL if there is none of that family. */
const struct known_model *known_model_find(const char *family);

/* What of a router a tensor is, by its name in any layout. */
enum router_part { ROUTER_WEIGHT, ROUTER_BIAS, ROUTER_SELECTION_BIAS, ROUTER_HASH_TABLE };
enum router_part router_part_of(const char *family, const char *name);

/* "model.layers.3.mlp.", of a model with n_layers beside the extra ones. */
struct block_name {
    char text[96];
};
struct block_name known_model_block(const struct known_model *model, int32_t layer, int32_t n_layers);
/* The same with the name of a part of the router. */
struct block_name known_model_router(const struct known_model *model, int32_t layer, int32_t n_layers,
                                     enum router_part part);

/* What config.json says of MoE layers. */
struct model_facts {
    const struct known_model *model;
    const moe4_layer_config *config; /* of one that chooses by scores */
    int64_t model_hidden_size;
    int32_t n_layers, n_extra_layers, n_shared_experts, n_hash_layers;
    int has_selection_bias;
    int64_t vocab_size; /* of the hash layers; 0 = not said */
};

/* A config.json without a quantisation; NULL after a failure, which has been reported: no such model has that
 * activation or router. */
json_t *known_model_config(const struct model_facts *facts);

#endif
