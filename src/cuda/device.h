/* A CUDA device as the backend sees it: memory, copies and errors, so that only device.c calls the CUDA runtime. */
#ifndef MOE4_CUDA_DEVICE_H
#define MOE4_CUDA_DEVICE_H

#include "context.h"
#include "cuda/isa.h"

struct cuda_device {
    int32_t index;
    const struct cuda_level *level; /* of the context */
    int32_t n_multiprocessors;
    uint64_t *faults; /* [N_FAULTS] in host memory that kernels write */
    char name[64];
};

/* Fails, in words, where there is no driver, no such device, or one without this level. */
moe4_status device_open(struct moe4_context *context, int32_t index, moe4_isa isa, struct cuda_device *device);

/* Also what device_open left half-built. */
void device_close(struct cuda_device *device);

/* The calling thread's device becomes this one, until device_leave(what device_enter returned). */
int32_t device_enter(int32_t index);
void device_leave(int32_t previous);

/* Turns a kernel launch's result into a status; `what` was being done. */
moe4_status device_check(struct moe4_context *context, int error, const char *what);

void *device_allocate(size_t bytes); /* NULL on failure */
void device_release(void *memory);

moe4_status device_stream_create(struct moe4_context *context, cuda_stream *stream);
void device_stream_destroy(cuda_stream stream);
moe4_status device_stream_wait(struct moe4_context *context, cuda_stream stream);

moe4_status device_upload(struct moe4_context *context, void *to, const void *from, size_t bytes, cuda_stream stream);
/* Rows of `width` bytes, `pitch` apart on the host, dense on the device. */
moe4_status device_upload_rows(struct moe4_context *context, void *to, const void *from, size_t pitch, size_t width,
                               size_t rows, cuda_stream stream);
moe4_status device_download(struct moe4_context *context, void *to, const void *from, size_t bytes);

#endif
