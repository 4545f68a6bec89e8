#include "cuda/fp8_narrow.cuh"
#include "cuda/launch.cuh"

namespace
{

struct gate_ups {
    typedef void function(const fp8_stream_call);
    template <moe4_activation activation>
    static constexpr function *of = fp8_narrow::kernel<fp8_activation<activation>, false>;
};
gate_ups::function *const down = fp8_narrow::kernel<MOE4_ACTIVATION_IDENTITY, true>;

} // namespace

int fp8_narrow_configure(void)
{
    const int error = allow_shared(down, fp8_narrow::SHARED_BYTES);
    return error ? error : allow_shared<gate_ups>(fp8_narrow::SHARED_BYTES);
}

int fp8_narrow_gate_up(const fp8_stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<gate_ups>[activation], call, n_blocks, fp8_narrow::THREADS, fp8_narrow::SHARED_BYTES,
                  stream);
}

int fp8_narrow_down(const fp8_stream_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch(down, call, n_blocks, fp8_narrow::THREADS, fp8_narrow::SHARED_BYTES, stream);
}
