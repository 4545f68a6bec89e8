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
    const moe4_layer_config *config;
    int32_t layer;
    struct integer_pair experts; /* first and count; 0, 0 = all */
};

/* Opens model layer `layer` of the checkpoint at path.  On failure says why; model_close is then not needed. */
int model_open(moe4_context *context, const char *path, int64_t layer, struct integer_pair experts,
               struct model *model);

/* Its experts, for moe4_layer_create_from and the oracle; says why when a read fails.  Lives as long as the model. */
moe4_expert_source model_source(struct model *model);

/* Reads and prepares the layer, with a progress bar. */
int model_prepare(struct model *model, moe4_context *context, moe4_layer **layer);

void model_close(struct model *model);

#endif
