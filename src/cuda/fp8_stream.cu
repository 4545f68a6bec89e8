#include <algorithm>

#include "cuda/fp8_stream.cuh"
#include "cuda/launch.cuh"

namespace
{

struct gate_ups {
    typedef void function(const fp8_stream_call);
    template <moe4_activation activation>
    static constexpr function *of = fp8_stream::kernel<fp8_activation<activation>, false>;
};
gate_ups::function *const down = fp8_stream::kernel<MOE4_ACTIVATION_IDENTITY, true>;

} // namespace

enum { ALIGNMENT = 1024 /* of x; what shared memory begins with is not */ };

int fp8_stream_configure(void)
{
    const int bytes = FP8_STREAM_SHARED_BYTES + ALIGNMENT;
    const int error = allow_shared(down, bytes);
    return error ? error : allow_shared<gate_ups>(bytes);
}

static int launch_sized(gate_ups::function *kernel, const fp8_stream_call *call, int32_t n_blocks, cuda_stream stream)
{
    fp8_stream_call sized = *call;
    const int32_t n_steps = call->stream.gemm.n_steps, rows = (call->stream.gemm.tile_rows + 7) / 8 * 8;
    sized.stream.n_buffers = fp8_stream_buffers(n_steps, rows);
    const int32_t x_bytes = sized.stream.n_buffers * fp8_stream_buffer_bytes(n_steps, rows);
    sized.stream.n_stages = std::min((FP8_STREAM_SHARED_BYTES - x_bytes) / STREAM_RING_BYTES, (int)STREAM_STAGES);
    return launch(kernel, &sized, n_blocks, fp8_stream::THREADS,
                  sized.stream.n_stages * STREAM_RING_BYTES + x_bytes + ALIGNMENT, stream);
}

int fp8_stream_gate_up(const fp8_stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch_sized(by_activation<gate_ups>[activation], call, n_blocks, stream);
}

int fp8_stream_down(const fp8_stream_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch_sized(down, call, n_blocks, stream);
}
