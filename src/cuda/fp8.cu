#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"

typedef void kernel_function(const fp8_call);

template <moe4_activation activation> static constexpr kernel_function *gate_up = fp8::kernel<fp8::GATE_UP, activation>;
static kernel_function *const down = fp8::kernel<fp8::DOWN, MOE4_ACTIVATION_IDENTITY>;

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

int fp8_configure(void)
{
    int error = cudaFuncSetAttribute(down, cudaFuncAttributeMaxDynamicSharedMemorySize, fp8::ring_size<fp8::DOWN>::bytes);
    for (kernel_function *each : gate_ups)
        if (each && !error)
            error = cudaFuncSetAttribute(each, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         fp8::ring_size<fp8::GATE_UP>::bytes);
    if (!error) error = fp8_stream_configure();
    return error ? error : fp8_narrow_configure();
}

int fp8_gate_up(const fp8_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(gate_ups[activation], call, n_blocks, fp8::THREADS, fp8::ring_size<fp8::GATE_UP>::bytes, stream);
}

int fp8_down(const fp8_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch(down, call, n_blocks, fp8::THREADS, fp8::ring_size<fp8::DOWN>::bytes, stream);
}
