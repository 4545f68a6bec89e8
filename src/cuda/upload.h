/* Copies from host memory of any kind to the device, at the rate of the link: threads copy a piece at a time into a
 * ring of pinned memory, from which the copy engine takes it while the next one is filled.  Memory that the engine can
 * read by itself, pinned or on a device, goes straight. */
#ifndef MOE4_CUDA_UPLOAD_H
#define MOE4_CUDA_UPLOAD_H

#include "cuda/device.h"

enum { UPLOAD_SLOTS = 8, UPLOAD_SLOT_BYTES = 4 << 20 };

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

/* Queues a copy of rows of `width` bytes, `pitch` apart, to dense rows. */
moe4_status upload_rows(struct upload *upload, void *to, const void *from, size_t pitch, size_t width, size_t rows);

/* Until all memory given to upload_rows may change. */
moe4_status upload_settle(struct upload *upload);

#endif
