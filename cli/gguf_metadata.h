/* What a GGUF file of MoE layers says of their model. */
#ifndef MOE4_CLI_GGUF_METADATA_H
#define MOE4_CLI_GGUF_METADATA_H

#include "moe4/io.h"

enum { GGUF_MAX_VALUES = 40 };

struct gguf_metadata {
    const char *architecture;
    moe4_gguf_value values[GGUF_MAX_VALUES];
    int32_t n_values;
    char keys[GGUF_MAX_VALUES][64];
    float *limits; /* one a layer of the model; NULL = no layer has one */
    int32_t n_layers, n_hash_layers;
    moe4_layer_config implied; /* a layer as its reader will have it, but for what is of one layer alone */
};

/* general.architecture of a model; NULL if none is known. */
const char *gguf_architecture(const char *family);

/* Begins with what holds for all layers, taken from one of them. */
int gguf_metadata_begin(struct gguf_metadata *metadata, const moe4_checkpoint_info *info,
                        const moe4_layer_config *config);
/* What is of one layer alone: call it for each, then end.  Refuses a layer that differs in what holds for all. */
int gguf_metadata_layer(struct gguf_metadata *metadata, const moe4_layer_config *config, int32_t layer);
void gguf_metadata_end(struct gguf_metadata *metadata);

/* A value under a key as it is; the strings are not copied. */
void gguf_metadata_text(struct gguf_metadata *metadata, const char *key, const char *text);

void gguf_metadata_release(struct gguf_metadata *metadata);

#endif
