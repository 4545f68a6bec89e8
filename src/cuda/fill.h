/* From a checkpoint's experts to a prepared layer: an expert lies on the device as the checkpoint has it, and is packed
 * there, while the next one is copied to a second place, which is where the last expert will be packed. */
#ifndef MOE4_CUDA_FILL_H
#define MOE4_CUDA_FILL_H

#include "layer.h"

/* On the current device, which is the layer's. */
moe4_status cuda_fill_experts(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source);

#endif
