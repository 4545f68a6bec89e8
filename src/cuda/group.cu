/* Grouping without atomics on data: a block an expert counts its own slots and those of the experts before it, which
 * gives its first row, then places its slots in order; the last block to finish cuts all experts' rows into tiles. */
#include "cuda/group.cuh"

namespace
{

constexpr int WARPS = 8, THREADS = WARPS * 32;

/* Four consecutive slots' experts; -1 past the end. */
__device__ int4 load_locals(const int32_t *locals, int64_t slot, int64_t n_slots)
{
    if (slot + 4 <= n_slots && (uintptr_t)locals % sizeof(int4) == 0) return *(const int4 *)(locals + slot);
    int32_t each[4];
    for (int j = 0; j < 4; j++) each[j] = slot + j < n_slots ? locals[slot + j] : -1;
    return {each[0], each[1], each[2], each[3]};
}

/* A warp's slots first .. last-1, 128 at a time. */
struct slot_range {
    int64_t first, last;
};

__device__ slot_range slots_of_warp(int64_t n_slots)
{
    const int64_t each = (n_slots + WARPS * 128 - 1) / (WARPS * 128) * 128, first = threadIdx.x / 32 * each;
    return {first, min(first + each, n_slots)};
}

__device__ bool is_before(int32_t local, int32_t l)
{
    return local >= 0 && local < l;
}

/* How many of the warp's slots are this expert's, how many those of experts before it. */
__device__ void count_slots(const int32_t *locals, const slot_range &slots, int64_t n_slots, int32_t l, int32_t *own,
                            int32_t *before)
{
    int32_t n_own = 0, n_before = 0;
#pragma unroll 4
    for (int64_t slot = slots.first + threadIdx.x % 32 * 4; slot < slots.last; slot += 128) {
        int4 four = load_locals(locals, slot, n_slots);
        n_own += (four.x == l) + (four.y == l) + (four.z == l) + (four.w == l);
        n_before += is_before(four.x, l) + is_before(four.y, l) + is_before(four.z, l) + is_before(four.w, l);
    }
    *own = __reduce_add_sync(~0u, n_own);
    *before = __reduce_add_sync(~0u, n_before);
}

/* Rows from `row` on; row n is row n + to_output of the optional outputs. */
__device__ void place_slots(const group_call &call, const slot_range &slots, int64_t n_slots, int32_t l, int32_t row,
                            int64_t to_output)
{
    const int32_t lane = threadIdx.x % 32;
    const uint32_t below = (1u << lane) - 1;
#pragma unroll 2
    for (int64_t first = slots.first; first < slots.last; first += 128) {
        const int64_t slot = first + lane * 4;
        int4 four = load_locals(call.locals, slot, n_slots);
        const int32_t each[4] = {four.x, four.y, four.z, four.w};
        int32_t in_lane = 0, rank = 0, total = 0;
        for (int j = 0; j < 4; j++) {
            uint32_t own = __ballot_sync(~0u, each[j] == l);
            rank += __popc(own & below);
            total += __popc(own);
        }
        for (int j = 0; j < 4; j++) {
            if (each[j] != l) continue;
            int32_t at = row + rank + in_lane++;
            call.row_token[at] = (int32_t)((slot + j) / call.top_k);
            call.row_map[slot + j] = at;
            if (!call.output_rows) continue;
            call.row_output[at] = at + to_output;
            if (call.row_map_copy) call.row_map_copy[slot + j] = (int32_t)(at + to_output);
        }
        row += total;
    }
}

/* Counts that other blocks wrote. */
struct global_counts {
    const int32_t *counts;
    __device__ int32_t operator[](int32_t l) const
    {
        return __ldcg(&counts[l]);
    }
};

__global__ void __launch_bounds__(THREADS) group_kernel(const __grid_constant__ group_call call)
{
    __shared__ int32_t own[WARPS], before[WARPS], is_last;
    begin_kernel();
    const int32_t l = blockIdx.x, warp = threadIdx.x / 32;
    const int64_t n_slots = (int64_t)token_count_of(call.T) * call.top_k;
    const slot_range slots = slots_of_warp(n_slots);
    const int64_t output_row = call.output_rows ? call.output_rows[l] : 0;
    count_slots(call.locals, slots, n_slots, l, &own[warp], &before[warp]);
    __syncthreads();
    int32_t first = 0, row = 0, count = 0;
    for (int w = 0; w < WARPS; w++) {
        first += before[w];
        count += own[w];
        if (w < warp) row += own[w];
    }
    place_slots(call, slots, n_slots, l, first + row, output_row - first);
    if (threadIdx.x == 0) {
        if (call.output_rows) call.output_rows[l] = output_row + count;
        call.counts[l] = count;
        __threadfence();
        is_last = atomicAdd(call.ticket, 1) == (int32_t)gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    cut_tiles<WARPS>(call, global_counts{call.counts}, call.first, 0, call.tiles);
    if (call.exact_tiles) cut_tiles<WARPS>(call, global_counts{call.counts}, call.first, 1, call.exact_tiles);
    if (threadIdx.x == 0) *call.ticket = 0;
}

__global__ void __launch_bounds__(THREADS) number_kernel(const __grid_constant__ number_call call)
{
    __shared__ int32_t own[WARPS], before[WARPS];
    begin_kernel();
    const int32_t l = blockIdx.x, warp = threadIdx.x / 32;
    const int64_t n_slots = (int64_t)token_count_of(call.T) * call.top_k;
    count_slots(call.locals, slots_of_warp(n_slots), n_slots, l, &own[warp], &before[warp]);
    __syncthreads();
    if (threadIdx.x) return;
    int64_t first = 0, count = 0;
    for (int w = 0; w < WARPS; w++) first += before[w], count += own[w];
    call.output_rows[l] = first;
    if (l == call.L - 1 && call.n_rows) *call.n_rows = first + count;
}

} // namespace

int number_rows(const number_call *call, cuda_stream stream)
{
    return launch(number_kernel, call, call->L, THREADS, 0, stream);
}

int group_rows(const group_call *call, cuda_stream stream)
{
    if (is_grouped_by_cluster(call)) return group_rows_by_cluster(call, stream);
    return launch(group_kernel, call, call->L, THREADS, 0, stream);
}
