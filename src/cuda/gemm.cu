#include "cuda/gemm.cuh"
#include "cuda/launch.cuh"

typedef void kernel(const gemm_call);

static kernel *const kernels[N_ACTIVATIONS] = {
    nullptr,
    gemm_kernel<MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    gemm_kernel<MOE4_ACTIVATION_SWIGLU_OAI>,
    gemm_kernel<MOE4_ACTIVATION_SITU>,
    gemm_kernel<MOE4_ACTIVATION_GEGLU>,
    gemm_kernel<MOE4_ACTIVATION_GEGLU_TANH>,
    gemm_kernel<MOE4_ACTIVATION_SWIGLU_STEP>,
    gemm_kernel<MOE4_ACTIVATION_RELU2>,
    gemm_kernel<MOE4_ACTIVATION_IDENTITY>,
};

int gemm_configure(void)
{
    for (kernel *each : kernels) {
        if (!each) continue;
        cudaError_t error = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, GEMM_SHARED_BYTES);
        if (error) return error;
    }
    return gemm_stream_configure();
}

int gemm(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(kernels[activation], call, n_blocks, GEMM_THREADS, GEMM_SHARED_BYTES, stream);
}
