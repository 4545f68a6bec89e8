#include "cuda/fp8_few.cuh"
#include "cuda/stream_few_launch.cuh"

int fp8_few_configure(void)
{
    return configure_few<fp8_operands>();
}

int fp8_few(const few_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch_few<fp8_operands>(call, activation, n_blocks, stream);
}
