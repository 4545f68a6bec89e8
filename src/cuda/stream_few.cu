#include "cuda/stream_few_launch.cuh"

int gemm_few_configure(void)
{
    return configure_few<bf16_operands>();
}

int gemm_few(const few_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch_few<bf16_operands>(call, activation, n_blocks, stream);
}
