#include "cuda/fp8_narrow.cuh"
#include "cuda/launch.cuh"

typedef void kernel_function(const fp8_stream_call);

template <moe4_activation activation> static constexpr kernel_function *gate_up = fp8_narrow::kernel<activation, false>;
static kernel_function *const down = fp8_narrow::kernel<MOE4_ACTIVATION_IDENTITY, true>;

static kernel_function *const gate_ups[N_ACTIVATIONS] = {
    nullptr,
    gate_up<MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    gate_up<MOE4_ACTIVATION_SWIGLU_OAI>,
    gate_up<MOE4_ACTIVATION_SITU>,
    gate_up<MOE4_ACTIVATION_GEGLU>,
    gate_up<MOE4_ACTIVATION_GEGLU_TANH>,
    gate_up<MOE4_ACTIVATION_SWIGLU_STEP>,
    gate_up<MOE4_ACTIVATION_RELU2>,
    gate_up<MOE4_ACTIVATION_IDENTITY>,
};

int fp8_narrow_configure(void)
{
    int error = cudaFuncSetAttribute(down, cudaFuncAttributeMaxDynamicSharedMemorySize, fp8_narrow::SHARED_BYTES);
    for (kernel_function *each : gate_ups)
        if (each && !error)
            error = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize, fp8_narrow::SHARED_BYTES);
    return error;
}

int fp8_narrow_gate_up(const fp8_stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(gate_ups[activation], call, n_blocks, fp8_narrow::THREADS, fp8_narrow::SHARED_BYTES, stream);
}

int fp8_narrow_down(const fp8_stream_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch(down, call, n_blocks, fp8_narrow::THREADS, fp8_narrow::SHARED_BYTES, stream);
}
