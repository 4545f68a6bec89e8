/* A GPU as the command uses it: memory, one stream, and how long things take there.  Only gpu_cuda.c knows CUDA; a
 * command that was built without it has gpu_none.c instead. */
#ifndef MOE4_CLI_GPU_H
#define MOE4_CLI_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "probe.h"

struct gpu {
    const struct gpu_calls *calls;
    void *stream; /* for moe4_batch.stream */
    char name[64];
    int32_t capability[2]; /* major, minor */
    int32_t n_multiprocessors;
    int64_t memory_bytes, free_bytes;   /* free_bytes: when it was opened */
    double clock_ghz, memory_clock_ghz; /* the highest */
};

/* Calls that fail say why and return the command's exit status. */
struct gpu_calls {
    void (*close)(struct gpu *gpu);

    int (*allocate)(struct gpu *gpu, void **memory, size_t bytes, const char *what);
    void (*release)(struct gpu *gpu, void *memory);

    /* On the stream, after all that was queued there; upload and copy may go on after they return. */
    int (*upload)(struct gpu *gpu, void *to, const void *from, size_t bytes);
    int (*copy)(struct gpu *gpu, void *to, const void *from, size_t bytes);
    int (*download)(struct gpu *gpu, void *to, const void *from, size_t bytes);

    /* Captures n_calls calls of enqueue(user, 0), enqueue(user, 1), ... in a graph and replays it; ms [n_replays] are
     * milliseconds of each replay by events, after three that are not counted. */
    int (*time)(struct gpu *gpu, int (*enqueue)(void *user, int32_t call), void *user, int32_t n_calls,
                int64_t n_replays, double *ms);

    /* A copy of memory on the device by a kernel, bytes read plus bytes written, and a bf16 matrix product whose
     * operands lie in shared memory.  Raises what is in *best if it finds better. */
    int (*probe)(struct gpu *gpu, struct probe_result *best);
};

/* Opens GPU 0; fails, in words, where there is none or the command was built without CUDA. */
int gpu_open(struct gpu **gpu);

/* NULL is fine. */
void gpu_close(struct gpu *gpu);

#endif
