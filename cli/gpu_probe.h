/* The probes' kernels, compiled by nvcc.  Each launch returns a cudaError_t. */
#ifndef MOE4_CLI_GPU_PROBE_H
#define MOE4_CLI_GPU_PROBE_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the first block saw of its own time, on the device. */
struct gpu_probe_time {
    long long clocks, nanoseconds;
};

/* Queues a kernel of one block a multiprocessor; each multiplies bf16 matrices in shared memory `repeat` times.  *flops
 * is what a block does in one of them, *instruction with what. */
int gpu_probe_launch(void *stream, int n_multiprocessors, int capability_major, int repeat,
                     struct gpu_probe_time *device_time, double *flops, const char **instruction);

/* Queues a kernel that copies n_bytes, a multiple of 1 MiB, from one 16-byte aligned place on the device to another;
 * the variants have more or fewer loads in flight. */
enum { GPU_COPY_VARIANTS = 3 };
int gpu_copy_launch(void *stream, int variant, void *to, const void *from, size_t n_bytes);

#ifdef __cplusplus
}
#endif
#endif
