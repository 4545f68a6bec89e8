/* One layer of a checkpoint, open for reading. */
#ifndef MOE4_CLI_MODEL_H
#define MOE4_CLI_MODEL_H

#include "moe4/io.h"
#include "options.h"

enum { FIRST_LAYER = -1 };

struct model {
    moe4_context *context; /* borrowed */
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info;
    moe4_layer_reader *reader;
    moe4_layer_config *config; /* the reader's, changed as below */
    moe4_layer_config changed;
    int32_t layer;
    struct integer_pair experts;    /* first and count; 0, 0 = all */
    int32_t *expert_map, *named_by; /* [E] as config has it; [L] the expert that each local one is; NULL = no map */
};

/* Opens model layer `layer` of the checkpoint at path.  On failure says why; model_close is then not needed. */
int model_open(moe4_context *context, const char *path, int64_t layer, struct integer_pair experts,
               struct model *model);

/* Holds the experts that map [E] names instead: global id -> local expert or -1, each local one named once.  Takes the
 * map, which is freed with free().  On failure says why. */
int model_map(struct model *model, int32_t *map);

/* Its experts, for moe4_layer_create_from and the oracle; says why when a read fails.  Lives as long as the model. */
moe4_expert_source model_source(struct model *model);

/* Reads and prepares the layer, with a progress bar. */
int model_prepare(struct model *model, moe4_context *context, moe4_layer **layer);

/* The same from a file that model_load has written before; where that does not fit the checkpoint, as it is now, or is
 * not there, from the checkpoint, and writes the file. */
int model_load(struct model *model, moe4_context *context, const char *file, moe4_layer **layer);

void model_close(struct model *model);

/* moe4_layer_describe with the kernel and order of a compute mode where bf16's would be. */
int layer_describe(moe4_context *context, const moe4_layer *layer, moe4_compute compute, moe4_layer_info *info);

#endif
