#include "cuda/fp8_one.cuh"
#include "cuda/stream_one_launch.cuh"

int fp8_one_configure(void)
{
    return configure_one<fp8_operands>();
}

int fp8_one(const one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch_one<fp8_operands>(call, activation, n_blocks, stream);
}
