/* Token tiles, and grouping by one block where there are few slots: a stable counting sort in shared memory. */
#ifndef MOE4_CUDA_GROUP_CUH
#define MOE4_CUDA_GROUP_CUH

#include "cuda/launch.cuh"
#include "cuda/tiling.h"

/* Two counts that are summed at once. */
struct tile_count {
    int32_t rows, tiles;
};

static __device__ __forceinline__ tile_count operator+(const tile_count &a, const tile_count &b)
{
    return {a.rows + b.rows, a.tiles + b.tiles};
}

/* Sum over threads before this one; *total over all. */
template <int warps> static __device__ tile_count scan_block(const tile_count &value, tile_count *total)
{
    __shared__ tile_count sums[warps];
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    tile_count inclusive = value;
    for (int offset = 1; offset < 32; offset *= 2) {
        tile_count other = {__shfl_up_sync(~0u, inclusive.rows, offset), __shfl_up_sync(~0u, inclusive.tiles, offset)};
        if (lane >= offset) inclusive = inclusive + other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = inclusive;
    __syncthreads();
    tile_count before = {inclusive.rows - value.rows, inclusive.tiles - value.tiles};
    *total = {0, 0};
    for (int w = 0; w < warps; w++) {
        if (w < warp) before = before + sums[w];
        *total = *total + sums[w];
    }
    return before;
}

static __device__ __forceinline__ void store_tiles(const tiling &cut, int32_t l, int32_t row, int32_t count,
                                                   token_tile *tiles)
{
    for (int32_t i = 0; i < cut.n; i++) tiles[i] = {l, row + i * cut.rows, min(cut.rows, count - i * cut.rows)};
}

/* The tiles of all experts of one kernel, from their counts; every expert's first row on the way.  Wide ones
 * come by width, so that blocks that take every n-th have as much to do. */
template <int warps, class Counts>
static __device__ void cut_tiles(const group_call &call, const Counts &counts, int32_t *first_rows, int32_t exact,
                                 token_tile *tiles)
{
    constexpr int32_t WIDTHS = MAX_TOKENS / 8;
    __shared__ int32_t places[WIDTHS]; /* how many tiles each width has, from the widest on; then where the next goes */
    const bool is_sorted = call.tile_rows > NARROW_TOKENS && call.tile_rows <= MAX_TOKENS; /* fp8's may be wider */
    const auto cut_of = [&](int32_t l, int32_t count) {
        const bool is_here = l < call.L && (!call.exact_tiles || call.is_exact[l] == exact);
        return tile_rows(is_here ? count : 0, call.tile_rows);
    };
    if (is_sorted) {
        __syncthreads(); /* after a call before */
        if (threadIdx.x < WIDTHS) places[threadIdx.x] = 0;
        __syncthreads();
    }
    tile_count before = {0, 0};
    for (int32_t first = 0; first < call.L; first += warps * 32) {
        const int32_t l = first + threadIdx.x, count = l < call.L ? counts[l] : 0;
        const tiling cut = cut_of(l, count);
        tile_count total;
        const tile_count at = before + scan_block<warps>({count, cut.n}, &total);
        if (l < call.L) first_rows[l] = at.rows;
        if (!is_sorted)
            store_tiles(cut, l, at.rows, count, tiles + at.tiles);
        else if (cut.n)
            atomicAdd(&places[WIDTHS - cut.rows / 8], cut.n);
        before = before + total;
    }
    if (is_sorted) {
        __syncthreads();
        for (int32_t w = 0, sum = 0; threadIdx.x == 0 && w < WIDTHS; w++) {
            const int32_t own = places[w];
            places[w] = sum;
            sum += own;
        }
        __syncthreads();
        for (int32_t l = threadIdx.x; l < call.L; l += warps * 32) {
            const int32_t count = counts[l];
            const tiling cut = cut_of(l, count);
            if (cut.n)
                store_tiles(cut, l, first_rows[l], count, tiles + atomicAdd(&places[WIDTHS - cut.rows / 8], cut.n));
        }
    }
    if (threadIdx.x) return;
    call.n_tiles[exact] = before.tiles;
    *call.n_rows = before.rows;
    call.claims[0] = call.claims[1] = 0;
    if (call.n_rows_copy) *call.n_rows_copy = before.rows;
}

/* ---- One block -------------------------------------------------------------------------------------------------- */

/* Shared memory of group_block: counts of every warp, experts' totals and first rows. */
static __host__ __device__ inline int64_t group_block_bytes(int warps, int32_t L)
{
    return (warps * 2ll + 8) * ((L + 3) / 4 * 4);
}

/* A thread a slot.  counts[warp][l], at first the warp's own slots of an expert, become those of the warps before it.
 */
template <int warps> static __device__ void group_block(const group_call &call, void *shared)
{
    const int32_t slot = threadIdx.x, warp = slot / 32, L4 = (call.L + 3) / 4 * 4;
    int32_t *totals = (int32_t *)shared, *first_rows = totals + L4;
    uint16_t *all_counts = (uint16_t *)(first_rows + L4), *counts = all_counts + warp * L4;
    const int32_t n_slots = token_count_of(call.T) * call.top_k, n_busy = (n_slots + 31) / 32;
    const int32_t local = slot < n_slots ? __ldcg(&call.locals[slot]) : -1;
    const uint32_t peers = __match_any_sync(~0u, local); /* slots of this warp with the same expert */
    const int32_t before = __popc(peers & ((1u << slot % 32) - 1));
    for (int32_t i = threadIdx.x; i < n_busy * L4 / 2; i += warps * 32) ((uint32_t *)all_counts)[i] = 0;
    __syncthreads();
    if (local >= 0 && before == 0) counts[local] = (uint16_t)__popc(peers);
    __syncthreads();
    for (int32_t l = threadIdx.x; l < call.L; l += warps * 32) {
        int32_t sum = 0;
        for (int32_t w = 0; w < n_busy; w++) {
            const int32_t own = all_counts[w * L4 + l];
            all_counts[w * L4 + l] = (uint16_t)sum;
            sum += own;
        }
        totals[l] = sum;
    }
    __syncthreads();
    cut_tiles<warps>(call, totals, first_rows, 0, call.tiles);
    if (call.exact_tiles) cut_tiles<warps>(call, totals, first_rows, 1, call.exact_tiles);
    __syncthreads();
    for (int32_t l = threadIdx.x; l < call.L; l += warps * 32) call.first[l] = first_rows[l];
    if (slot >= n_slots) return;
    const int32_t row = local < 0 ? -1 : first_rows[local] + counts[local] + before;
    call.row_map[slot] = row;
    if (row >= 0) call.row_token[row] = slot / call.top_k;
}

#endif
