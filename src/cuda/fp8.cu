#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"
#include "cuda/stream_few.h"

namespace
{

struct gate_ups {
    typedef void function(const fp8_call);
    template <moe4_activation activation>
    static constexpr function *of = fp8::kernel<fp8::GATE_UP, fp8_activation<activation>>;
};
gate_ups::function *const down = fp8::kernel<fp8::DOWN, MOE4_ACTIVATION_IDENTITY>;

} // namespace

int fp8_configure(void)
{
    int error = allow_shared(down, fp8::ring_size<fp8::DOWN>::bytes);
    if (!error) error = allow_shared<gate_ups>(fp8::ring_size<fp8::GATE_UP>::bytes);
    if (!error) error = fp8_stream_configure();
    if (!error) error = fp8_one_configure();
    if (!error) error = fp8_few_configure();
    return error ? error : fp8_narrow_configure();
}

int fp8_gate_up(const fp8_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<gate_ups>[activation], call, n_blocks, fp8::THREADS,
                  fp8::ring_size<fp8::GATE_UP>::bytes, stream);
}

int fp8_down(const fp8_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch(down, call, n_blocks, fp8::THREADS, fp8::ring_size<fp8::DOWN>::bytes, stream);
}
