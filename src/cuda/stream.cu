#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/stream.cuh"
#include "cuda/stream_one.h"

typedef void kernel(const stream_call);

static kernel *const kernels[N_ACTIVATIONS] = {
    nullptr,
    stream_kernel<MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    stream_kernel<MOE4_ACTIVATION_SWIGLU_OAI>,
    stream_kernel<MOE4_ACTIVATION_SITU>,
    stream_kernel<MOE4_ACTIVATION_GEGLU>,
    stream_kernel<MOE4_ACTIVATION_GEGLU_TANH>,
    stream_kernel<MOE4_ACTIVATION_SWIGLU_STEP>,
    stream_kernel<MOE4_ACTIVATION_RELU2>,
    stream_kernel<MOE4_ACTIVATION_IDENTITY>,
};

int gemm_stream_configure(void)
{
    for (kernel *each : kernels) {
        if (!each) continue;
        cudaError_t error =
            cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, STREAM_SHARED_BYTES + STREAM_SLACK);
        if (error) return error;
    }
    return gemm_one_configure();
}

int gemm_stream(const stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    stream_call sized = *call;
    const int32_t n_steps = call->gemm.n_steps;
    sized.n_buffers = stream_buffers(n_steps);
    const int32_t x_bytes = sized.n_buffers * STREAM_ROWS * stream_pitch(n_steps);
    sized.n_stages = std::min((STREAM_SHARED_BYTES - x_bytes) / STREAM_RING_BYTES, (int)STREAM_STAGES);
    return launch(kernels[activation], &sized, n_blocks, STREAM_THREADS,
                  sized.n_stages * STREAM_RING_BYTES + x_bytes + STREAM_SLACK, stream);
}
