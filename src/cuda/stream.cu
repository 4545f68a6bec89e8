#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/stream.cuh"
#include "cuda/stream_few.h"

namespace
{

struct kernels {
    typedef void function(const stream_call);
    template <moe4_activation activation> static constexpr function *of = stream_kernel<activation>;
};

} // namespace

int gemm_stream_configure(void)
{
    int error = allow_shared<kernels>(STREAM_SHARED_BYTES + STREAM_SLACK);
    if (!error) error = gemm_one_configure();
    return error ? error : gemm_few_configure();
}

int gemm_stream(const stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    stream_call sized = *call;
    const int32_t n_steps = call->gemm.n_steps;
    const int32_t x_bytes = stream_slots(n_steps) * stream_pitch(n_steps);
    sized.n_stages = std::min((STREAM_SHARED_BYTES - x_bytes) / STREAM_RING_BYTES, (int)STREAM_STAGES);
    return launch(by_activation<kernels>[activation], &sized, n_blocks, STREAM_THREADS,
                  sized.n_stages * STREAM_RING_BYTES + x_bytes + STREAM_SLACK, stream);
}
