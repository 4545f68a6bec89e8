/* What lets the tests of the CPU backend run on a GPU: their buffers as memory that host and device share, their
 * contexts on device 0.  Linked before fixture.c, whose own versions it replaces (tests/CMakeLists.txt). */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "fixture.h"
#include "test_cuda_host.h"

#undef moe4_forward_router /* the tests' calls are renamed on the command line */
#undef moe4_forward_experts
#undef moe4_combine
moe4_status finished_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                    const moe4_logits *logits, const moe4_result *result);
moe4_status finished_forward_experts(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                     const moe4_topk *topk, const moe4_result *result);
moe4_status finished_combine(moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);
moe4_status moe4_combine(moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);
moe4_status moe4_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                const moe4_logits *logits, const moe4_result *result);
moe4_status moe4_forward_experts(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                 const moe4_topk *topk, const moe4_result *result);

int is_cpu_tested(void)
{
    return 0;
}

int32_t n_computes(void)
{
    static int32_t n; /* the first that there is not, at the level that the device has or is told to take */
    if (n) return n;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_context *context = context_open(gpu_isa(), 1);
    assert_int_equal(moe4_context_describe(context, &info), MOE4_OK);
    moe4_context_destroy(context);
    return n = info.isa == MOE4_ISA_SM_80 ? MOE4_COMPUTE_FP8 : MOE4_COMPUTE_INT8;
}

moe4_isa gpu_isa(void)
{
    const char *name = getenv("GPU_ISA");
    if (!name) return MOE4_ISA_AUTO;
    return strcmp(name, "sm_80") == 0 ? MOE4_ISA_SM_80 : MOE4_ISA_SM_90A;
}

struct buffer {
    struct buffer *previous;
    void *memory;
};

void *buffers_allocate(struct buffers *buffers, size_t bytes)
{
    struct buffer *buffer = malloc(sizeof *buffer);
    assert_non_null(buffer);
    assert_int_equal(cudaHostAlloc(&buffer->memory, bytes + 64, cudaHostAllocPortable), cudaSuccess);
    memset(buffer->memory, 0xFF, bytes + 64);
    buffer->previous = buffers->last;
    buffers->last = buffer;
    return buffer->memory;
}

void *buffers_copy(struct buffers *buffers, const void *data, size_t bytes)
{
    return memcpy(buffers_allocate(buffers, bytes), data, bytes);
}

void buffers_release(struct buffers *buffers)
{
    while (buffers->last) {
        struct buffer *buffer = buffers->last;
        buffers->last = buffer->previous;
        assert_int_equal(cudaFreeHost(buffer->memory), cudaSuccess);
        free(buffer);
    }
}

int32_t isa_levels(moe4_isa levels[MAX_LEVELS])
{
    levels[0] = gpu_isa();
    return 1;
}

moe4_context *context_open(moe4_isa isa, int32_t n_threads)
{
    (void)isa, (void)n_threads;
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.device = MOE4_DEVICE_CUDA;
    config.isa = gpu_isa();
    moe4_status status = moe4_context_create(&config, &context);
    if (status) fail_msg("%s", moe4_context_message(context));
    return context;
}

/* Every forward call of the tests goes through these: results are there when they return. */
moe4_status finished_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                    const moe4_logits *logits, const moe4_result *result)
{
    moe4_status status = moe4_forward_router(context, layer, batch, logits, result);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    return status;
}

moe4_status finished_forward_experts(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                     const moe4_topk *topk, const moe4_result *result)
{
    moe4_status status = moe4_forward_experts(context, layer, batch, topk, result);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    return status;
}

moe4_status finished_combine(moe4_context *context, const moe4_deferred *deferred, const moe4_result *result)
{
    moe4_status status = moe4_combine(context, deferred, result);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    return status;
}
