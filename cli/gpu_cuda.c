#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#include "command.h"
#include "gpu.h"
#include "gpu_probe.h"
#include "memory.h"
#include "message.h"
#include "timing.h"

enum { WARM_UPS = 3, N_PROBES = 7, PROBE_REPEAT = 8000, MEGABYTE = 1 << 20 };

static int check(cudaError_t error, const char *what)
{
    return error == cudaSuccess ? EXIT_OK : fail("cuda: %s: %s", what, cudaGetErrorString(error));
}

static int cuda_allocate(struct gpu *gpu, void **memory, size_t bytes, const char *what)
{
    (void)gpu;
    *memory = NULL;
    if (cudaMalloc(memory, bytes ? bytes : 1) == cudaSuccess) return EXIT_OK;
    cudaGetLastError(); /* said here, not again */
    return fail("out of GPU memory: %zu bytes for %s", bytes, what);
}

static void cuda_release(struct gpu *gpu, void *memory)
{
    (void)gpu;
    cudaFree(memory);
}

static int cuda_copy(struct gpu *gpu, void *to, const void *from, size_t bytes)
{
    return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu->stream), "a copy");
}

static int cuda_download(struct gpu *gpu, void *to, const void *from, size_t bytes)
{
    int code = cuda_copy(gpu, to, from, bytes);
    return code ? code : check(cudaStreamSynchronize(gpu->stream), "waiting for the GPU");
}

/* ---- Time -------------------------------------------------------------------------------------------------------- */

static int graph_capture(struct gpu *gpu, int (*enqueue)(void *user, int32_t call), void *user, int32_t n_calls,
                         cudaGraphExec_t *executable)
{
    cudaGraph_t graph = NULL;
    int code = check(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeGlobal), "capturing a graph");
    if (code) return code;
    for (int32_t i = 0; !code && i < n_calls; ++i) code = enqueue(user, i);
    cudaError_t error = cudaStreamEndCapture(gpu->stream, &graph);
    if (!code) code = check(error, "capturing a graph");
    if (!code) code = check(cudaGraphInstantiate(executable, graph, 0), "making a graph");
    if (graph) cudaGraphDestroy(graph);
    return code;
}

static int graph_replay(struct gpu *gpu, cudaGraphExec_t executable, cudaEvent_t begin, cudaEvent_t end, double *ms)
{
    float elapsed = 0;
    cudaEventRecord(begin, gpu->stream);
    int code = check(cudaGraphLaunch(executable, gpu->stream), "replaying a graph");
    cudaEventRecord(end, gpu->stream);
    if (!code) code = check(cudaEventSynchronize(end), "replaying a graph");
    if (!code) code = check(cudaEventElapsedTime(&elapsed, begin, end), "replaying a graph");
    *ms = elapsed;
    return code;
}

static int cuda_time(struct gpu *gpu, int (*enqueue)(void *user, int32_t call), void *user, int32_t n_calls,
                     int64_t n_replays, double *ms)
{
    cudaGraphExec_t executable = NULL;
    cudaEvent_t begin = NULL, end = NULL;
    double warm_up;
    int code = graph_capture(gpu, enqueue, user, n_calls, &executable);
    if (!code) code = check(cudaEventCreate(&begin), "an event");
    if (!code) code = check(cudaEventCreate(&end), "an event");
    for (int64_t i = -WARM_UPS; !code && i < n_replays; ++i)
        code = graph_replay(gpu, executable, begin, end, i < 0 ? &warm_up : &ms[i]);
    if (begin) cudaEventDestroy(begin);
    if (end) cudaEventDestroy(end);
    if (executable) cudaGraphExecDestroy(executable);
    return code;
}

/* ---- Probes ------------------------------------------------------------------------------------------------------ */

struct copy_probe {
    struct gpu *gpu;
    void *from, *to;
    size_t bytes;
    int variant;
};

static int copy_enqueue(void *user, int32_t call)
{
    const struct copy_probe *self = user;
    (void)call;
    return check((cudaError_t)gpu_copy_launch(self->gpu->stream, self->variant, self->to, self->from, self->bytes),
                 "the probe of copies");
}

static int copy_measure(struct gpu *gpu, struct probe_result *best)
{
    struct copy_probe probe = {.gpu = gpu, .bytes = (size_t)1024 * MEGABYTE};
    double ms[N_PROBES];
    size_t left = 0, total = 0;
    cudaMemGetInfo(&left, &total);
    if (probe.bytes > left / 4) probe.bytes = left / 4 / MEGABYTE * MEGABYTE;
    int code = cuda_allocate(gpu, &probe.from, probe.bytes, "the probe of copies");
    if (!code) code = cuda_allocate(gpu, &probe.to, probe.bytes, "the probe of copies");
    if (!code) code = check(cudaMemsetAsync(probe.from, 0x5A, probe.bytes, gpu->stream), "the probe of copies");
    for (; !code && probe.variant < GPU_COPY_VARIANTS; ++probe.variant) {
        code = cuda_time(gpu, copy_enqueue, &probe, 1, N_PROBES, ms);
        if (code) break;
        double gbs = 2e-6 * (double)probe.bytes / quantile(ms, N_PROBES, 0);
        if (gbs > best->bandwidth_gbs) best->bandwidth_gbs = gbs;
    }
    cudaFree(probe.from);
    cudaFree(probe.to);
    return code;
}

struct rate_probe {
    struct gpu *gpu;
    struct gpu_probe_time *time; /* on the device */
    double flops;
    const char *instruction;
};

static int rate_enqueue(void *user, int32_t call)
{
    struct rate_probe *self = user;
    (void)call;
    int error = gpu_probe_launch(self->gpu->stream, self->gpu->n_multiprocessors, self->gpu->capability[0],
                                 PROBE_REPEAT, self->time, &self->flops, &self->instruction);
    return check((cudaError_t)error, "the probe of matrix products");
}

/* The median counts: a GPU slows down when all of its tensor cores work, and does so while a layer runs too. */
static int rate_measure(struct gpu *gpu, struct probe_result *best)
{
    struct rate_probe probe = {.gpu = gpu};
    struct gpu_probe_time time = {0};
    double ms[N_PROBES];
    void *memory;
    int code = cuda_allocate(gpu, &memory, sizeof time, "the probe of matrix products");
    probe.time = memory;
    if (!code) code = cuda_time(gpu, rate_enqueue, &probe, 1, N_PROBES, ms);
    if (!code) code = cuda_download(gpu, &time, memory, sizeof time);
    if (!code) {
        double flops = probe.flops * PROBE_REPEAT * gpu->n_multiprocessors;
        double gflops = 1e-6 * flops / quantile(ms, N_PROBES, 0.5);
        if (gflops > best->rate_gflops) {
            best->rate_gflops = gflops;
            best->instruction = probe.instruction;
            best->clock_ghz = time.nanoseconds ? (double)time.clocks / (double)time.nanoseconds : 0;
        }
    }
    cudaFree(memory);
    return code;
}

static int cuda_probe(struct gpu *gpu, struct probe_result *best)
{
    int code = copy_measure(gpu, best);
    return code ? code : rate_measure(gpu, best);
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static void cuda_close(struct gpu *gpu)
{
    if (gpu->stream) cudaStreamDestroy(gpu->stream);
    free(gpu);
}

static const struct gpu_calls cuda_calls = {.close = cuda_close,
                                            .allocate = cuda_allocate,
                                            .release = cuda_release,
                                            .upload = cuda_copy,
                                            .copy = cuda_copy,
                                            .download = cuda_download,
                                            .time = cuda_time,
                                            .probe = cuda_probe};

static int gpu_describe(struct gpu *gpu)
{
    struct cudaDeviceProp properties;
    size_t left = 0, total = 0;
    int clock_khz = 0, memory_clock_khz = 0;
    int code = check(cudaGetDeviceProperties(&properties, 0), "what GPU it is");
    if (!code) code = check(cudaMemGetInfo(&left, &total), "how much memory it has");
    if (code) return code;
    cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0); /* 0 where it is not told */
    cudaDeviceGetAttribute(&memory_clock_khz, cudaDevAttrMemoryClockRate, 0);
    snprintf(gpu->name, sizeof gpu->name, "%.63s", properties.name);
    gpu->capability[0] = properties.major;
    gpu->capability[1] = properties.minor;
    gpu->n_multiprocessors = properties.multiProcessorCount;
    gpu->memory_bytes = (int64_t)total;
    gpu->free_bytes = (int64_t)left;
    gpu->clock_ghz = 1e-6 * clock_khz;
    gpu->memory_clock_ghz = 1e-6 * memory_clock_khz;
    return EXIT_OK;
}

int gpu_open(struct gpu **gpu)
{
    cudaStream_t stream = NULL;
    int code = allocate(gpu, 1, sizeof **gpu, "a GPU");
    if (code) return code;
    (*gpu)->calls = &cuda_calls;
    code = check(cudaSetDevice(0), "opening GPU 0");
    if (!code) code = gpu_describe(*gpu);
    if (!code) code = check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    (*gpu)->stream = stream;
    if (!code) return EXIT_OK;
    cuda_close(*gpu);
    *gpu = NULL;
    return code;
}

void gpu_close(struct gpu *gpu)
{
    if (gpu) gpu->calls->close(gpu);
}
