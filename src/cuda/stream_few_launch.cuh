/* How the host launches the GEMM for few tokens, by its kind of operands. */
#ifndef MOE4_CUDA_STREAM_FEW_LAUNCH_CUH
#define MOE4_CUDA_STREAM_FEW_LAUNCH_CUH

#include <algorithm>

#include "cuda/stream_few.cuh"

template <class Operands> struct few_kernels {
    typedef void function(const few_call);
    template <moe4_activation activation> static constexpr function *of = few_kernel<Operands, activation, false>;
    static constexpr function *down = few_kernel<Operands, MOE4_ACTIVATION_IDENTITY, true>;
};

template <class Operands> static int configure_few(void)
{
    const int error = allow_shared(few_kernels<Operands>::down, FEW_SHARED_BYTES);
    return error ? error : allow_shared<few_kernels<Operands>>(FEW_SHARED_BYTES);
}

/* What a block takes where that is enough: blocks of combine then find room beside it, which wait for down when gate/up
 * comes up. */
enum : int { WHOLE_BYTES = 200 * 1024 };

template <class Operands>
static int launch_few(const few_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    typedef few_kernels<Operands> kernels;
    few_call sized = *call;
    const gemm_call &gemm = call->stream.gemm;
    const int32_t T = call->route.T.n_tokens, rows_bytes = few_rows_bytes(gemm.n_steps, T, Operands::IS_FP8);
    const int32_t other_bytes =
        STREAM_SLACK + (call->is_down ? rows_bytes * few_segments(call->route.router.top_k * T, gemm.n_tiles, n_blocks)
                                      : rows_bytes + few_choice_bytes(&call->route.router, call->route.group.L));
    int32_t n_stages = (WHOLE_BYTES - other_bytes) / STREAM_RING_BYTES;
    if (n_stages < STREAM_LEAST_STAGES) n_stages = (FEW_SHARED_BYTES - other_bytes) / STREAM_RING_BYTES;
    sized.stream.n_stages = std::min(n_stages, (int)STREAM_STAGES);
    return launch(call->is_down ? kernels::down : by_activation<kernels>[activation], &sized, n_blocks,
                  few_threads(call->is_down), sized.stream.n_stages * STREAM_RING_BYTES + other_bytes, stream);
}

#endif
