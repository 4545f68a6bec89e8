/* From a checkpoint's experts to a prepared layer: one expert at a time lies on the device as the checkpoint has it,
 * and is packed there.  While its matrices are packed, the copies of the next expert's follow into the room that they
 * leave. */
#ifndef MOE4_CUDA_FILL_H
#define MOE4_CUDA_FILL_H

#include "layer.h"

/* On the current device, which is the layer's. */
moe4_status cuda_fill_experts(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source);

#endif
