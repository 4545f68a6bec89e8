/* Grouping by one cluster of blocks where there are many slots: a stable counting sort.  Each warp has a run of slots,
 * and counts of its own in shared memory, which become those of the warps before it; blocks tell each other theirs. */
#include "cuda/group.cuh"

namespace
{

constexpr int WARPS = 32, THREADS = WARPS * 32;
constexpr int MOST_SHARED = 200 * 1024; /* bytes */

struct memory {
    int32_t *totals, *rows; /* experts' counts; where the block's own rows of each begin */
    uint16_t *counts;       /* [WARPS][stride] */
    int32_t stride;
};

__host__ __device__ int64_t shared_bytes(int32_t L)
{
    return (WARPS * 2ll + 8) * ((L + 3) / 4 * 4);
}

__device__ memory memory_of_block(int32_t L)
{
    extern __shared__ int32_t shared[];
    const int32_t stride = (L + 3) / 4 * 4;
    return {shared, shared + stride, (uint16_t *)(shared + 2 * stride), stride};
}

struct slot_range {
    int32_t first, last;
};

__device__ slot_range slots_of_warp(int32_t n_slots)
{
    const int32_t each = (n_slots + GROUP_BLOCKS * THREADS - 1) / (GROUP_BLOCKS * THREADS) * 32;
    const int32_t first = (blockIdx.x * WARPS + threadIdx.x / 32) * each;
    return {first, min(first + each, n_slots)};
}

constexpr int AT_ONCE = 4; /* slots of a thread whose loads are under way together */

/* Lanes with the same expert, of `bits` bits when 1 is added.  (__match_any_sync takes longer where they differ.) */
__device__ uint32_t lanes_like(int32_t local, int bits)
{
    uint32_t peers = ~0u;
#pragma unroll 4
    for (int b = 0; b < bits; b++) {
        const bool is_set = (local + 1) >> b & 1;
        const uint32_t set = __ballot_sync(~0u, is_set);
        peers &= is_set ? set : ~set;
    }
    return peers;
}

/* Counts the warp's slots; row_map[slot] = how many of them come before it with the same expert. */
__device__ void rank_slots(const group_call &call, const slot_range &slots, uint16_t *counts)
{
    const int32_t lane = threadIdx.x % 32, bits = 32 - __clz(call.L);
    for (int32_t first = slots.first + lane; first - lane < slots.last; first += 32 * AT_ONCE) {
        int32_t local[AT_ONCE], rank[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) local[i] = first + i * 32 < slots.last ? call.locals[first + i * 32] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint32_t peers = lanes_like(local[i], bits);
            const int32_t before = local[i] < 0 ? 0 : counts[local[i]], in_warp = __popc(peers & ((1u << lane) - 1));
            __syncwarp();
            if (local[i] >= 0 && in_warp == 0) counts[local[i]] = (uint16_t)(before + __popc(peers));
            __syncwarp();
            rank[i] = before + in_warp;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (local[i] >= 0) call.row_map[first + i * 32] = rank[i];
    }
}

/* The warps' counts to those of the warps before them; the block's to where others find them. */
__device__ void add_warps(const group_call &call, const memory &m)
{
    for (int32_t l = threadIdx.x; l < call.L; l += THREADS) {
        int32_t own[WARPS], sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) own[w] = m.counts[w * m.stride + l];
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            m.counts[w * m.stride + l] = (uint16_t)sum;
            sum += own[w];
        }
        call.counts[blockIdx.x * call.L + l] = sum;
    }
}

__device__ void add_blocks(const group_call &call, const memory &m)
{
    int32_t row = 0;
    for (int32_t first = 0; first < call.L; first += THREADS) {
        const int32_t l = first + threadIdx.x;
        int32_t before = 0, all = 0;
#pragma unroll
        for (int b = 0; b < GROUP_BLOCKS; b++) {
            const int32_t count = l < call.L ? __ldcg(&call.counts[b * call.L + l]) : 0;
            before += b < (int32_t)blockIdx.x ? count : 0;
            all += count;
        }
        tile_count total;
        const int32_t at = row + scan_block<WARPS>({all, 0}, &total).rows;
        if (l < call.L) m.totals[l] = all, m.rows[l] = at + before;
        row += total.rows;
    }
}

__device__ void place_slots(const group_call &call, const slot_range &slots, const memory &m)
{
    const uint16_t *counts = m.counts + threadIdx.x / 32 * m.stride;
    for (int32_t first = slots.first + threadIdx.x % 32; first < slots.last; first += 32 * AT_ONCE) {
        int32_t local[AT_ONCE], rank[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool is_slot = first + i * 32 < slots.last;
            local[i] = is_slot ? call.locals[first + i * 32] : -1;
            rank[i] = is_slot ? call.row_map[first + i * 32] : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (local[i] < 0) continue;
            const int32_t row = m.rows[local[i]] + counts[local[i]] + rank[i];
            call.row_token[row] = (first + i * 32) / call.top_k;
            call.row_map[first + i * 32] = row;
        }
    }
}

__global__ void __launch_bounds__(THREADS) group_kernel(const __grid_constant__ group_call call)
{
    const memory m = memory_of_block(call.L);
    for (int32_t i = threadIdx.x; i < WARPS * m.stride / 2; i += THREADS) ((uint32_t *)m.counts)[i] = 0;
    __syncthreads();
    begin_kernel();
    const slot_range slots = slots_of_warp(token_count_of(call.T) * call.top_k);
    rank_slots(call, slots, m.counts + threadIdx.x / 32 * m.stride);
    __syncthreads();
    add_warps(call, m);
    cluster_sync();
    add_blocks(call, m);
    __syncthreads();
    place_slots(call, slots, m);
    if (blockIdx.x) return;
    cut_tiles<WARPS>(call, m.totals, call.first, 0, call.tiles);
    if (call.exact_tiles) cut_tiles<WARPS>(call, m.totals, call.first, 1, call.exact_tiles);
}

} // namespace

/* Counts must fit 16 bits; and a block an expert is faster where slots are few, which all of these read. */
int is_grouped_by_cluster(const group_call *call)
{
    const int64_t n_slots = (int64_t)call->T.n_tokens * call->top_k;
    return launches_overlap() && !call->output_rows && shared_bytes(call->L) <= MOST_SHARED &&
           n_slots <= GROUP_BLOCKS * 65535ll && n_slots * (256 + call->L) >= 1 << 22;
}

int group_rows_by_cluster(const group_call *call, cuda_stream stream)
{
    const int error = allow_shared(group_kernel, MOST_SHARED);
    return error ? error
                 : launch_clusters(group_kernel, call, GROUP_BLOCKS, GROUP_BLOCKS, THREADS,
                                   (size_t)shared_bytes(call->L), stream);
}
