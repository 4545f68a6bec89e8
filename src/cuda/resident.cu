#include "cuda/launch.cuh"
#include "cuda/resident.cuh"

namespace
{

template <int steps> struct kernels {
    typedef void function(const gemm_call);
    template <moe4_activation activation> static constexpr function *of = resident_kernel<steps, activation>;
};

} // namespace

int gemm_resident_configure(void)
{
    const int error = allow_shared<kernels<3>>(RESIDENT_SHARED_BYTES);
    return error ? error : allow_shared<kernels<4>>(RESIDENT_SHARED_BYTES);
}

int gemm_resident(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    const auto &of = resident_steps(call->n_steps) == 3 ? by_activation<kernels<3>> : by_activation<kernels<4>>;
    return launch(of[activation], call, n_blocks, RESIDENT_THREADS, RESIDENT_SHARED_BYTES, stream);
}
