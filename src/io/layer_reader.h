/* The inside of a layer reader. */
#ifndef MOE4_IO_LAYER_READER_H
#define MOE4_IO_LAYER_READER_H

#include <stdatomic.h>

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

    /* As a source of moe4_layer_create_from (reader_source.c): */
    moe4_context *context;
    atomic_flag has_failed; /* a thread has said why */
};

/* A local expert that is there. */
moe4_status reader_check_expert(moe4_context *context, const moe4_layer_reader *reader, int32_t local_expert);

/* The expert as it lies in the buffer, whether it has been read or not. */
moe4_expert reader_expert(const moe4_layer_reader *reader);

/* One more expert is done; MOE4_EIO if the caller's progress cancels. */
moe4_status reader_report(moe4_context *context, moe4_layer_reader *reader);

#endif
