/* An open checkpoint. */
#ifndef MOE4_IO_CHECKPOINT_H
#define MOE4_IO_CHECKPOINT_H

#include "io/family.h"

struct moe4_checkpoint {
    moe4_allocator allocator;
    const struct family *family;
    struct model model;
    struct spelling spelling;
    moe4_tensors *tensors;
    int32_t *layers;         /* [n_all], the first n_layers used: numbers of the MoE layers that are here, ascending */
    int32_t n_all, n_layers; /* n_all: the model's own and extra layers */
    int32_t n_other;         /* MoE layers that are here in another precision */
};

#endif
