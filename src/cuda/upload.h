/* Copies from host memory of any kind to the device, at the rate of the link: threads copy a piece at a time into a
 * ring of pinned memory, from which the copy engine takes it while the next one is filled.  Memory that the engine can
 * read by itself, pinned or on a device, goes straight. */
#ifndef MOE4_CUDA_UPLOAD_H
#define MOE4_CUDA_UPLOAD_H

#include "cuda/device.h"
#include "layer.h"

enum { UPLOAD_SLOTS = 8, UPLOAD_SLOT_BYTES = 5 << 20 };

struct upload {
    struct moe4_context *context;
    cuda_stream stream; /* of the copies */
    struct pool *pool;
    char *ring;
    cuda_event taken[UPLOAD_SLOTS]; /* the engine has read the slot */
    int64_t n_pieces;
    int32_t has_direct; /* the engine reads memory of the caller's itself since the last upload_settle */
};

/* The context's, opened when it is first asked for: a model has many layers, and pinning memory takes longer than
 * packing one.  On the current device, which is the context's. */
moe4_status upload_of(struct moe4_context *context, struct upload **upload);
void upload_close(struct upload *upload); /* NULL is fine */

/* Bytes of a run: rows in memory of any kind, `width` bytes each and `pitch` apart, or what the run's source copies. */
struct upload_span {
    size_t n_bytes;
    const char *from;
    size_t pitch, width;
    moe4_part part; /* where `from` is NULL */
};

/* Spans that follow each other on the device. */
struct upload_run {
    void *to;
    const struct upload_span *spans;
    int32_t n_spans;
    const moe4_expert_source *source;
    int32_t l;
};

/* Queues its copy. */
moe4_status upload_run(struct upload *upload, const struct upload_run *run);

/* Until all memory given to upload_run may change. */
moe4_status upload_settle(struct upload *upload);

#endif
