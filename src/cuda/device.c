#include "cuda/device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

moe4_status device_check(struct moe4_context *context, int error, const char *what)
{
    if (error == cudaSuccess) return MOE4_OK;
    return context_fail(context, MOE4_EDEVICE, "cuda: %s: %s", what, cudaGetErrorString((cudaError_t)error));
}

/* The level, and what its kernels need of the current device. */
static moe4_status choose_level(struct moe4_context *context, const struct cudaDeviceProp *properties, moe4_isa isa,
                                struct cuda_device *device)
{
    struct cuda_features features = {properties->major, properties->minor, 0};
    if (features.major == 9) features.runs_sm_90a = gemm_configure() == cudaSuccess && fp8_configure() == cudaSuccess;
    cudaGetLastError(); /* a refusal is an answer, not an error */
    const struct cuda_level *best = cuda_level_of(MOE4_ISA_AUTO, &features);
    if (!best)
        return context_fail(context, MOE4_EUNSUPPORTED, "device %d has compute capability %d.%d, expected 8.0 or more",
                            device->index, features.major, features.minor);
    device->level = cuda_level_of(isa, &features);
    if (device->level) return MOE4_OK;
    const int is_known = isa == MOE4_ISA_SM_80 || isa == MOE4_ISA_SM_90A;
    return context_fail(context, is_known ? MOE4_EUNSUPPORTED : MOE4_EINVAL, "isa is %d, but device %d offers %s (%d)",
                        isa, device->index, best->name, best->isa);
}

static moe4_status allocate_faults(struct moe4_context *context, struct cuda_device *device)
{
    const size_t bytes = N_FAULTS * sizeof *device->faults;
    int error = cudaHostAlloc((void **)&device->faults, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (!error) memset(device->faults, 0, bytes);
    return device_check(context, error, "the status words");
}

moe4_status device_open(struct moe4_context *context, int32_t index, moe4_isa isa, struct cuda_device *device)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess)
        return context_fail(context, MOE4_EUNSUPPORTED, "device is cuda, but there is none: %s",
                            cudaGetErrorString(error));
    if (index < 0 || index >= count)
        return context_fail(context, MOE4_EINVAL, "device_index is %d, expected 0 to %d", index, count - 1);
    struct cudaDeviceProp properties;
    moe4_status status = device_check(context, cudaGetDeviceProperties(&properties, index), "device properties");
    if (status) return status;
    device->index = index;
    device->n_multiprocessors = properties.multiProcessorCount;
    snprintf(device->name, sizeof device->name, "%.63s", properties.name);
    int32_t previous = device_enter(index);
    status = choose_level(context, &properties, isa, device);
    if (!status) status = allocate_faults(context, device);
    device_leave(previous);
    return status;
}

void device_close(struct cuda_device *device)
{
    if (device->faults) cudaFreeHost(device->faults);
}

int32_t device_enter(int32_t index)
{
    int previous = index;
    cudaGetDevice(&previous);
    if (previous != index) cudaSetDevice(index);
    return previous;
}

void device_leave(int32_t previous)
{
    int current = previous;
    cudaGetDevice(&current);
    if (current != previous) cudaSetDevice(previous);
}

void *device_allocate(size_t bytes)
{
    void *memory = NULL;
    if (cudaMalloc(&memory, bytes) == cudaSuccess) return memory;
    cudaGetLastError(); /* reported by the caller, not sticky */
    return NULL;
}

void device_release(void *memory)
{
    cudaFree(memory);
}

void *device_allocate_pinned(size_t bytes)
{
    void *memory = NULL;
    if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

void device_release_pinned(void *memory)
{
    if (memory) cudaFreeHost(memory);
}

int device_reads(const void *memory)
{
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess)
        return attributes.type != cudaMemoryTypeUnregistered;
    cudaGetLastError();
    return 0;
}

moe4_status device_event_create(struct moe4_context *context, cuda_event *event)
{
    return device_check(context, cudaEventCreateWithFlags(event, cudaEventDisableTiming), "an event");
}

void device_event_destroy(cuda_event event)
{
    if (event) cudaEventDestroy(event);
}

moe4_status device_event_record(struct moe4_context *context, cuda_event event, cuda_stream stream)
{
    return device_check(context, cudaEventRecord(event, stream), "an event");
}

moe4_status device_event_wait(struct moe4_context *context, cuda_event event)
{
    return device_check(context, cudaEventSynchronize(event), "waiting for the device");
}

moe4_status device_stream_follow(struct moe4_context *context, cuda_stream stream, cuda_event event)
{
    return device_check(context, cudaStreamWaitEvent(stream, event, 0), "an event");
}

moe4_status device_stream_create(struct moe4_context *context, cuda_stream *stream)
{
    return device_check(context, cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "a stream");
}

void device_stream_destroy(cuda_stream stream)
{
    if (stream) cudaStreamDestroy(stream);
}

moe4_status device_stream_wait(struct moe4_context *context, cuda_stream stream)
{
    return device_check(context, cudaStreamSynchronize(stream), "waiting for the device");
}

moe4_status device_record_begin(struct moe4_context *context, cuda_stream stream)
{
    return device_check(context, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "recording");
}

moe4_status device_record_end(struct moe4_context *context, cuda_stream stream, cuda_recording *recording)
{
    cudaGraph_t graph = NULL;
    int error = cudaStreamEndCapture(stream, &graph);
    if (!error) error = cudaGraphInstantiate(recording, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    return device_check(context, error, "recording");
}

moe4_status device_replay(struct moe4_context *context, cuda_recording recording, cuda_stream stream, double *ms)
{
    cudaEvent_t begin = NULL, end = NULL;
    float elapsed = 0;
    int error = cudaEventCreate(&begin);
    if (!error) error = cudaEventCreate(&end);
    if (!error) error = cudaEventRecord(begin, stream);
    if (!error) error = cudaGraphLaunch(recording, stream);
    if (!error) error = cudaEventRecord(end, stream);
    if (!error) error = cudaEventSynchronize(end);
    if (!error) error = cudaEventElapsedTime(&elapsed, begin, end);
    device_event_destroy(begin);
    device_event_destroy(end);
    *ms = elapsed;
    return device_check(context, error, "running what was recorded");
}

void device_recording_destroy(cuda_recording recording)
{
    if (recording) cudaGraphExecDestroy(recording);
}

moe4_status device_upload(struct moe4_context *context, void *to, const void *from, size_t bytes, cuda_stream stream)
{
    return device_check(context, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "copy to the device");
}

moe4_status device_upload_rows(struct moe4_context *context, void *to, const void *from, size_t pitch, size_t width,
                               size_t rows, cuda_stream stream)
{
    if (pitch == width) return device_upload(context, to, from, width * rows, stream);
    return device_check(context, cudaMemcpy2DAsync(to, width, from, pitch, width, rows, cudaMemcpyDefault, stream),
                        "copy to the device");
}

moe4_status device_copy(struct moe4_context *context, void *to, const void *from, size_t bytes, cuda_stream stream)
{
    return device_check(context, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream),
                        "copy on the device");
}

moe4_status device_download(struct moe4_context *context, void *to, const void *from, size_t bytes)
{
    return device_check(context, cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}
