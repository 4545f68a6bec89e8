#include "cuda/gemm.cuh"
#include "cuda/launch.cuh"

namespace
{

template <class Block> struct kernels {
    typedef void function(const gemm_call);
    template <moe4_activation activation> static constexpr function *of = gemm_kernel<Block, activation>;
};

} // namespace

template <class Block>
static int launch_blocks(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<kernels<Block>>[activation], call, n_blocks, gemm_threads<Block>,
                  gemm_shared_bytes<Block>, stream);
}

int gemm_configure(void)
{
    int error = allow_shared<kernels<wide_block>>(gemm_shared_bytes<wide_block>);
    if (!error) error = allow_shared<kernels<narrow_block>>(gemm_shared_bytes<narrow_block>);
    if (!error) error = gemm_resident_configure();
    return error ? error : gemm_stream_configure();
}

int gemm(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    if (resident_stages(call->n_steps, call->tile_rows)) return gemm_resident(call, activation, n_blocks, stream);
    return call->tile_rows <= NARROW_TOKENS ? launch_blocks<narrow_block>(call, activation, n_blocks, stream)
                                            : launch_blocks<wide_block>(call, activation, n_blocks, stream);
}
