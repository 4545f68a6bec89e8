/* How the host launches the GEMM for one token, by its kind of operands. */
#ifndef MOE4_CUDA_STREAM_ONE_LAUNCH_CUH
#define MOE4_CUDA_STREAM_ONE_LAUNCH_CUH

#include <algorithm>

#include "cuda/stream_one.cuh"

template <class Operands> struct one_kernels {
    typedef void function(const one_call);
    template <moe4_activation activation>
    static constexpr function *of = one_kernel<Operands, activation, false, STREAM_TEAMS>;
    template <int teams> static constexpr function *down = one_kernel<Operands, MOE4_ACTIVATION_IDENTITY, true, teams>;
};

enum : int {
    SHARED_BYTES = 200 * 1024, /* that a block takes at most */
    HALF_BYTES = 110 * 1024    /* if two, with what they have besides, are to share a multiprocessor */
};

/* All of the memory is to be shared memory from the start: to change that, a multiprocessor must be empty. */
static int configure(void (*of)(const one_call))
{
    const int error = allow_shared(of, SHARED_BYTES);
    return error ? error
                 : cudaFuncSetAttribute(of, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared);
}

template <class Operands> static int configure_one(void)
{
    typedef one_kernels<Operands> kernels;
    int error = configure(kernels::template down<STREAM_TEAMS>);
    if (!error) error = configure(kernels::template down<ONE_NARROW_TEAMS>);
    for (typename kernels::function *each : by_activation<kernels>)
        if (each && !error) error = configure(each);
    return error;
}

/* Whether down has so few tiles that two teams a block take them at once: there is then room for its blocks beside
 * those of gate/up, so that they come up and fill their rings before those end. */
static bool is_narrow(const one_call *call, int32_t n_blocks)
{
    const int32_t n_tiles = call->is_down ? call->stream.gemm.n_tiles : call->stream.next_tiles;
    return call->route.router.top_k * n_tiles <= ONE_NARROW_TEAMS * n_blocks;
}

template <class Operands>
static int launch_one(const one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    typedef one_kernels<Operands> kernels;
    one_call sized = *call;
    const bool narrow = is_narrow(call, n_blocks);
    const int32_t teams = call->is_down && narrow ? (int)ONE_NARROW_TEAMS : (int)STREAM_TEAMS;
    const int32_t ring_bytes = teams * STREAM_STAGE_BYTES;
    const int32_t other_bytes =
        STREAM_SLACK + (call->is_down ? Operands::v_bytes(*call, teams, n_blocks)
                                      : Operands::x_bytes(call->stream.gemm) + one_choice_bytes(call->route.router));
    int32_t n_stages = ((narrow ? HALF_BYTES : SHARED_BYTES) - other_bytes) / ring_bytes;
    if (n_stages < STREAM_LEAST_STAGES) n_stages = (SHARED_BYTES - other_bytes) / ring_bytes;
    sized.stream.n_stages = std::min(n_stages, (int)STREAM_STAGES);
    typename kernels::function *const of = !call->is_down ? by_activation<kernels>[activation]
                                           : narrow       ? kernels::template down<ONE_NARROW_TEAMS>
                                                          : kernels::template down<STREAM_TEAMS>;
    return launch(of, &sized, n_blocks, one_threads<Operands>(call->is_down, teams),
                  sized.stream.n_stages * ring_bytes + other_bytes, stream);
}

#endif
