#include "cuda/stream_one_launch.cuh"

int gemm_one_configure(void)
{
    return configure_one<bf16_operands>();
}

int gemm_one(const one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch_one<bf16_operands>(call, activation, n_blocks, stream);
}
