/* Routing: logits, or the caller's own choice, to ids and weights, in the arithmetic of src/cpu/route.c: selection by
 * int32 keys that order as the floats do, scores in double precision, weights rounded once to bf16.  A warp a token. */
#include "cuda/candidates.cuh"
#include "cuda/group.cuh"
#include "cuda/route.cuh"

#include "base/dims.h"

namespace
{

constexpr int DEFAULT_SHARED = 48 * 1024; /* more must be asked for */

/* ---- Kernels ---------------------------------------------------------------------------------------------------- */

/* Shared memory of a warp: scores and ids of the chosen, group scores, keys. */
__host__ __device__ int64_t warp_bytes(const device_router &router)
{
    int64_t bytes = (router.top_k + router.n_group) * 8ll + (router.top_k + router.n_experts) * 4ll;
    return (bytes + 7) / 8 * 8;
}

struct warp_memory {
    double *scores;
    int64_t *groups;
    int32_t *ids, *keys;
};

__device__ warp_memory memory_of_warp(const device_router &router, int warp)
{
    extern __shared__ double shared[];
    warp_memory m;
    m.scores = shared + warp * warp_bytes(router) / 8;
    m.groups = (int64_t *)(m.scores + router.top_k);
    m.ids = (int32_t *)(m.groups + router.n_group);
    m.keys = m.ids + router.top_k;
    return m;
}

/* A token id outside the table chooses no experts, and its NaN weights make its row NaN. */
__device__ bool look_up_experts(const route_logits_call &call, int64_t t, const warp_memory &m)
{
    const device_router &router = call.router;
    const int32_t token_id = call.token_ids[t];
    const bool known = token_id >= 0 && token_id < router.vocab_size;
    if (!known && threadIdx.x % 32 == 0) report_fault(call.out.faults, FAULT_TOKEN_ID, call.T.first + t, token_id);
    for (int32_t a = threadIdx.x % 32; a < router.top_k; a += 32)
        m.ids[a] = known ? router.table[(int64_t)token_id * router.top_k + a] : -1;
    return known;
}

/* By one warp, when the token's keys are there. */
__device__ void route_token(const route_logits_call &call, int64_t t)
{
    const device_router &router = call.router;
    const warp_memory m = memory_of_warp(router, threadIdx.x / 32);
    bool known = true;
    if (router.method == MOE4_ROUTING_HASH)
        known = look_up_experts(call, t, m);
    else
        choose_experts(router, m.keys, m.groups, m.ids);
    __syncwarp();
    finish_token(call, t, logits_of_token(call, t), m.ids, m.scores, known);
}

/* By one warp, without keys. */
__device__ void route_token_alone(const route_logits_call &call, int64_t t)
{
    const device_router &router = call.router;
    const token_logits logits = logits_of_token(call, t);
    const warp_memory m = memory_of_warp(router, threadIdx.x / 32);
    if (has_candidates(router) && choose_candidates(router, logits, m.keys, m.ids)) {
        __syncwarp();
        finish_token(call, t, logits, m.ids, m.scores, true);
        return;
    }
    for (int32_t e = threadIdx.x % 32; has_keys(router) && e < router.n_experts; e += 32)
        m.keys[e] = key_of_expert(router, logits, e);
    __syncwarp();
    route_token(call, t);
}

/* As begin_kernel; what ran before a kernel that only converts x is over anyway. */
__device__ void begin_routing(bool is_after_x)
{
    if (!is_after_x) wait_for_predecessors();
    launch_dependents();
}

/* By all threads that come this far: the next kernel waits for this one alone. */
__device__ void end_routing(bool is_after_x)
{
    if (is_after_x) wait_for_predecessors();
}

__global__ void route_kernel(const __grid_constant__ route_logits_call call)
{
    begin_routing(call.is_after_x);
    const int64_t t = blockIdx.x * (int64_t)(blockDim.x / 32) + threadIdx.x / 32;
    if (t == 0 && threadIdx.x % 32 == 0) {
        *call.out.ticket = 0;
        check_token_count(call.T, call.out.faults);
    }
    if (t < token_count_of(call.T)) route_token_alone(call, t);
    end_routing(call.is_after_x);
}

__global__ void given_kernel(const __grid_constant__ route_given_call call)
{
    begin_routing(call.is_after_x);
    const int64_t slot = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (slot == 0) {
        *call.out.ticket = 0;
        check_token_count(call.T, call.out.faults);
    }
    if (slot < (int64_t)token_count_of(call.T) * call.topk.top_k) route_slot(call.topk, call.out, slot);
    end_routing(call.is_after_x);
}

/* All blocks are one cluster, which routes together; then its first block groups, a thread a slot. */
constexpr int ONCE_WARPS = 16, ONCE_THREADS = ONCE_WARPS * 32; /* as many slots */
constexpr int ONCE_SHARED = 200 * 1024;                        /* bytes at most */

/* Keys of the tokens that the block's warps will route: first, first + gridDim.x, ...  By all threads, since scores of
 * one token alone would keep a warp busy for long. */
__device__ void make_keys(const route_logits_call &call, int32_t first, int32_t T)
{
    const device_router &router = call.router;
    const int32_t E = router.n_experts, n = min(ONCE_WARPS, (T - first + (int32_t)gridDim.x - 1) / (int32_t)gridDim.x);
    for (int32_t i = threadIdx.x; has_keys(router) && i < n * E; i += ONCE_THREADS) {
        const int32_t warp = i / E, e = i - warp * E;
        const token_logits logits = logits_of_token(call, first + warp * gridDim.x);
        memory_of_warp(router, warp).keys[e] = key_of_expert(router, logits, e);
    }
}

__global__ void __launch_bounds__(ONCE_THREADS) route_once_kernel(const __grid_constant__ route_logits_call call)
{
    extern __shared__ double shared[];
    for (int32_t e = threadIdx.x * 32; e < call.out.n_experts; e += ONCE_THREADS * 32) prefetch(&call.out.local_of[e]);
    begin_routing(call.is_after_x);
    if (blockIdx.x + threadIdx.x == 0) check_token_count(call.T, call.out.faults);
    const int32_t T = token_count_of(call.T), step = gridDim.x * ONCE_WARPS;
    for (int32_t first = blockIdx.x; first < T; first += step) {
        const int32_t t = first + threadIdx.x / 32 * gridDim.x;
        make_keys(call, first, T);
        __syncthreads();
        if (t < T) route_token(call, t);
        __syncthreads();
    }
    cluster_sync();
    if (blockIdx.x == 0) group_block<ONCE_WARPS>(call.group, shared);
    end_routing(call.is_after_x);
}

__global__ void __launch_bounds__(ONCE_THREADS) given_once_kernel(const __grid_constant__ route_given_call call)
{
    extern __shared__ double shared[];
    begin_routing(call.is_after_x);
    if (threadIdx.x == 0) check_token_count(call.T, call.out.faults);
    if ((int32_t)threadIdx.x < token_count_of(call.T) * call.topk.top_k) route_slot(call.topk, call.out, threadIdx.x);
    __syncthreads();
    group_block<ONCE_WARPS>(call.group, shared);
    end_routing(call.is_after_x);
}

/* A warp a logit: 32 partial sums over k = lane, lane + 32, ..., then a fixed tree. */
__global__ void router_kernel(const __grid_constant__ router_call call)
{
    begin_kernel();
    const int32_t lane = threadIdx.x % 32;
    const int64_t t = blockIdx.x;
    const int32_t e = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (e >= call.n_experts || t >= token_count_of(call.T)) return;
    const float *weight = call.weight + e * call.K;
    float sum = 0.0f;
    for (int64_t k = lane; k < call.K; k += 32)
        sum = fmaf(bf16_float(bf16_bits(load_float(call.x, call.dtype, t * call.ldx + k))), weight[k], sum);
    for (int offset = 16; offset; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (lane == 0) call.logits[t * call.n_experts + e] = sum + call.bias[e];
}

} // namespace

int route_logits(const route_logits_call *call, cuda_stream stream)
{
    const int64_t bytes = warp_bytes(call->router);
    const int warps = bytes * 8 <= DEFAULT_SHARED ? 8 : bytes * 2 <= DEFAULT_SHARED ? 2 : 1;
    if (bytes * warps > DEFAULT_SHARED) {
        cudaError_t error =
            cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)(bytes * warps));
        if (error) return error;
    }
    return launch(route_kernel, call, (call->T.n_tokens + warps - 1) / warps, warps * 32, (size_t)bytes * warps,
                  stream);
}

int route_given(const route_given_call *call, cuda_stream stream)
{
    const int64_t slots = (int64_t)call->T.n_tokens * call->topk.top_k;
    return launch(given_kernel, call, (unsigned)((slots + 255) / 256), 256, 0, stream);
}

/* Blocks of the cluster: a warp a token, where eight blocks are enough for that. */
static unsigned once_blocks(int32_t n_tokens)
{
    unsigned blocks = 1;
    while (blocks < 8 && (int32_t)blocks * ONCE_WARPS < n_tokens) blocks *= 2;
    return blocks;
}

static int64_t once_bytes(const device_router &router, int32_t L)
{
    const int64_t routing = warp_bytes(router) * ONCE_WARPS, grouping = group_block_bytes(ONCE_WARPS, L);
    return routing > grouping ? routing : grouping;
}

int is_routed_at_once(int32_t n_tokens, int32_t top_k, const device_router *router, int32_t L)
{
    return (int64_t)n_tokens * top_k <= ONCE_THREADS && once_bytes(*router, L) <= ONCE_SHARED;
}

int route_logits_at_once(const route_logits_call *call, cuda_stream stream)
{
    cudaError_t error =
        cudaFuncSetAttribute(route_once_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ONCE_SHARED);
    if (error) return error;
    const unsigned blocks = once_blocks(call->T.n_tokens);
    return launch_clusters(route_once_kernel, call, blocks, blocks, ONCE_THREADS,
                           (size_t)once_bytes(call->router, call->group.L), stream);
}

int route_given_at_once(const route_given_call *call, cuda_stream stream)
{
    cudaError_t error =
        cudaFuncSetAttribute(given_once_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ONCE_SHARED);
    if (error) return error;
    return launch(given_once_kernel, call, 1, ONCE_THREADS, (size_t)group_block_bytes(ONCE_WARPS, call->group.L),
                  stream);
}

int router_logits(const router_call *call, cuda_stream stream)
{
    return launch(router_kernel, call, dim3(call->T.n_tokens, (call->n_experts + 7) / 8), 256, 0, stream);
}
