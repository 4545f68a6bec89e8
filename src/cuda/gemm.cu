#include "cuda/gemm.cuh"
#include "cuda/launch.cuh"

typedef void kernel(const gemm_call);

template <class Block>
static kernel *const kernels[N_ACTIVATIONS] = {
    nullptr,
    gemm_kernel<Block, MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    gemm_kernel<Block, MOE4_ACTIVATION_SWIGLU_OAI>,
    gemm_kernel<Block, MOE4_ACTIVATION_SITU>,
    gemm_kernel<Block, MOE4_ACTIVATION_GEGLU>,
    gemm_kernel<Block, MOE4_ACTIVATION_GEGLU_TANH>,
    gemm_kernel<Block, MOE4_ACTIVATION_SWIGLU_STEP>,
    gemm_kernel<Block, MOE4_ACTIVATION_RELU2>,
    gemm_kernel<Block, MOE4_ACTIVATION_IDENTITY>,
};

template <class Block> static int configure(void)
{
    int error = cudaSuccess;
    for (kernel *each : kernels<Block>)
        if (each && !error)
            error = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, gemm_shared_bytes<Block>);
    return error;
}

template <class Block>
static int launch_blocks(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(kernels<Block>[activation], call, n_blocks, gemm_threads<Block>, gemm_shared_bytes<Block>, stream);
}

int gemm_configure(void)
{
    int error = configure<wide_block>();
    if (!error) error = configure<narrow_block>();
    if (!error) error = gemm_resident_configure();
    return error ? error : gemm_stream_configure();
}

int gemm(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    if (resident_stages(call->n_steps, call->tile_rows)) return gemm_resident(call, activation, n_blocks, stream);
    return call->tile_rows <= NARROW_TOKENS ? launch_blocks<narrow_block>(call, activation, n_blocks, stream)
                                            : launch_blocks<wide_block>(call, activation, n_blocks, stream);
}
