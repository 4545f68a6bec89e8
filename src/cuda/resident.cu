#include "cuda/launch.cuh"
#include "cuda/resident.cuh"

typedef void kernel(const gemm_call);

template <int steps>
static kernel *const kernels[N_ACTIVATIONS] = {
    nullptr,
    resident_kernel<steps, MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    resident_kernel<steps, MOE4_ACTIVATION_SWIGLU_OAI>,
    resident_kernel<steps, MOE4_ACTIVATION_SITU>,
    resident_kernel<steps, MOE4_ACTIVATION_GEGLU>,
    resident_kernel<steps, MOE4_ACTIVATION_GEGLU_TANH>,
    resident_kernel<steps, MOE4_ACTIVATION_SWIGLU_STEP>,
    resident_kernel<steps, MOE4_ACTIVATION_RELU2>,
    resident_kernel<steps, MOE4_ACTIVATION_IDENTITY>,
};

int gemm_resident_configure(void)
{
    int error = cudaSuccess;
    for (kernel *const *of : {kernels<3>, kernels<4>})
        for (int i = 0; i < N_ACTIVATIONS; i++)
            if (of[i] && !error)
                error = cudaFuncSetAttribute(of[i], cudaFuncAttributeMaxDynamicSharedMemorySize, RESIDENT_SHARED_BYTES);
    return error;
}

int gemm_resident(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    kernel *const *of = resident_steps(call->n_steps) == 3 ? kernels<3> : kernels<4>;
    return launch(of[activation], call, n_blocks, RESIDENT_THREADS, RESIDENT_SHARED_BYTES, stream);
}
