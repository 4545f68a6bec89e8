#include <algorithm>

#include "cuda/stream_one.cuh"

namespace
{

struct gate_ups {
    typedef void function(const one_call);
    template <moe4_activation activation> static constexpr function *of = one_kernel<activation, false, STREAM_TEAMS>;
};
template <int teams> constexpr gate_ups::function *down = one_kernel<MOE4_ACTIVATION_IDENTITY, true, teams>;

} // namespace

enum : int {
    SHARED_BYTES = 200 * 1024, /* that a block takes at most */
    HALF_BYTES = 110 * 1024    /* if two, with what they have besides, are to share a multiprocessor */
};

/* All of the memory is to be shared memory from the start: to change that, a multiprocessor must be empty. */
static int configure(gate_ups::function *of)
{
    const int error = allow_shared(of, SHARED_BYTES);
    return error ? error
                 : cudaFuncSetAttribute(of, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared);
}

int gemm_one_configure(void)
{
    int error = configure(down<STREAM_TEAMS>);
    if (!error) error = configure(down<ONE_NARROW_TEAMS>);
    for (gate_ups::function *each : by_activation<gate_ups>)
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

int gemm_one(const one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    one_call sized = *call;
    const bool narrow = is_narrow(call, n_blocks);
    const int32_t teams = call->is_down && narrow ? (int)ONE_NARROW_TEAMS : (int)STREAM_TEAMS;
    const int32_t row_bytes = call->stream.gemm.n_steps * 128, ring_bytes = teams * STREAM_STAGE_BYTES;
    const int32_t other_bytes =
        STREAM_SLACK + (call->is_down ? teams * row_bytes : row_bytes + one_choice_bytes(call->route.router));
    int32_t n_stages = ((narrow ? HALF_BYTES : SHARED_BYTES) - other_bytes) / ring_bytes;
    if (n_stages < STREAM_LEAST_STAGES) n_stages = (SHARED_BYTES - other_bytes) / ring_bytes;
    sized.stream.n_stages = std::min(n_stages, (int)STREAM_STAGES);
    gate_ups::function *const of = !call->is_down ? by_activation<gate_ups>[activation]
                                   : narrow       ? down<ONE_NARROW_TEAMS>
                                                  : down<STREAM_TEAMS>;
    return launch(of, &sized, n_blocks, one_threads(call->is_down, teams),
                  sized.stream.n_stages * ring_bytes + other_bytes, stream);
}
