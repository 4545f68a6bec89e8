/* The inside of a layer reader. */
#ifndef MOE4_IO_LAYER_READER_H
#define MOE4_IO_LAYER_READER_H

#include "io/family.h"
#include "moe4/io.h"

struct moe4_layer_reader {
    moe4_allocator allocator;
    struct plan plan;
    moe4_layer_config config;
    moe4_reader_options options;
    int64_t part_at[N_MATRICES][N_PARTS]; /* in buffer */
    uint8_t *buffer;                      /* one expert */
    int64_t buffer_bytes;
    uint8_t *router; /* every source of the plan */
    int64_t router_bytes;
    int64_t expert_bytes, bytes_done, bytes_total; /* as the files have them, for progress */
};

#endif
