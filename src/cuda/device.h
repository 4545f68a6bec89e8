/* A CUDA device as the backend sees it: memory, copies and errors, so that only device.c calls the CUDA runtime. */
#ifndef MOE4_CUDA_DEVICE_H
#define MOE4_CUDA_DEVICE_H

#include "context.h"
#include "cuda/isa.h"

struct cuda_device {
    int32_t index;
    const struct cuda_level *level; /* of the context */
    int32_t n_multiprocessors;
    uint64_t *faults;      /* [N_FAULTS] in host memory that kernels write */
    struct upload *upload; /* from the first layer on (upload.h) */
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

/* Host memory that the copy engine reads by itself; NULL on failure. */
void *device_allocate_pinned(size_t bytes);
void device_release_pinned(void *memory);

/* Whether the copy engine reads this memory by itself: pinned, or a device's. */
int device_reads(const void *memory);

struct CUevent_st; /* what a cudaEvent_t points to */
typedef struct CUevent_st *cuda_event;

moe4_status device_event_create(struct moe4_context *context, cuda_event *event);
void device_event_destroy(cuda_event event); /* NULL is fine */
moe4_status device_event_record(struct moe4_context *context, cuda_event event, cuda_stream stream);
moe4_status device_event_wait(struct moe4_context *context, cuda_event event);

moe4_status device_stream_create(struct moe4_context *context, cuda_stream *stream);
void device_stream_destroy(cuda_stream stream); /* NULL is fine */
/* What follows in the stream waits for the event, if it has been recorded. */
moe4_status device_stream_follow(struct moe4_context *context, cuda_stream stream, cuda_event event);
moe4_status device_stream_wait(struct moe4_context *context, cuda_stream stream);

/* Work given to a stream between these two is kept instead of run, ... */
struct CUgraphExec_st; /* what a cudaGraphExec_t points to */
typedef struct CUgraphExec_st *cuda_recording;
moe4_status device_record_begin(struct moe4_context *context, cuda_stream stream);
moe4_status device_record_end(struct moe4_context *context, cuda_stream stream, cuda_recording *recording);
/* ... to be run as often as wanted: until it is done; in milliseconds of the device. */
moe4_status device_replay(struct moe4_context *context, cuda_recording recording, cuda_stream stream, double *ms);
void device_recording_destroy(cuda_recording recording); /* NULL is fine */

moe4_status device_upload(struct moe4_context *context, void *to, const void *from, size_t bytes, cuda_stream stream);
/* Rows of `width` bytes, `pitch` apart, in memory of any kind, dense on the device. */
moe4_status device_upload_rows(struct moe4_context *context, void *to, const void *from, size_t pitch, size_t width,
                               size_t rows, cuda_stream stream);
/* From one place on the device to another. */
moe4_status device_copy(struct moe4_context *context, void *to, const void *from, size_t bytes, cuda_stream stream);
moe4_status device_download(struct moe4_context *context, void *to, const void *from, size_t bytes);

#endif
