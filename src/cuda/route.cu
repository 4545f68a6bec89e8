/* Routing: logits, or the caller's own choice, to ids and weights, in the arithmetic of src/cpu/route.c: selection by
 * int32 keys that order as the floats do, scores in double precision, weights rounded once to bf16.  A warp a token. */
#include "cuda/group.cuh"

#include "base/dims.h"

namespace
{

constexpr int DEFAULT_SHARED = 48 * 1024;                 /* more must be asked for */
constexpr int32_t NAN_KEY = INT32_MAX, TAKEN = INT32_MIN; /* above +inf's key, below -inf's */
constexpr float QUIET_NAN = __builtin_nanf("");

/* ---- Scores and keys -------------------------------------------------------------------------------------------- */

/* -0 as +0, any NaN above all. */
__device__ int32_t order_key(float value)
{
    value += 0.0f;
    int32_t bits = __float_as_int(value);
    return value != value ? NAN_KEY : bits < 0 ? bits ^ INT32_MAX : bits;
}

__device__ float value_of_key(int32_t key)
{
    return __int_as_float(key < 0 ? key ^ INT32_MAX : key);
}

__device__ double sigmoid(double logit)
{
    return 1.0 / (1.0 + exp(-logit));
}

__device__ double sqrt_softplus(double logit)
{
    return sqrt((logit > 0.0 ? logit : 0.0) + log1p(exp(-fabs(logit))));
}

/* The unbiased score; best is the logit in slot 0. */
__device__ double score(moe4_routing_method method, double logit, double best)
{
    switch (method) {
    case MOE4_ROUTING_TOPK: return logit;
    case MOE4_ROUTING_DEFAULT:
    case MOE4_ROUTING_RENORMALIZE:
    case MOE4_ROUTING_RENORMALIZE_NAIVE: return exp(logit - best);
    case MOE4_ROUTING_SQRT_SOFTPLUS:
    case MOE4_ROUTING_HASH: return sqrt_softplus(logit);
    default: return sigmoid(logit);
    }
}

__device__ bool has_biased_keys(moe4_routing_method method)
{
    return method == MOE4_ROUTING_DEEPSEEK_V3 || method == MOE4_ROUTING_MINIMAX2 ||
           method == MOE4_ROUTING_SQRT_SOFTPLUS;
}

/* ---- A warp's selection ----------------------------------------------------------------------------------------- */

/* The index of the best of n keys in shared memory, which is then taken. */
__device__ int32_t take_best(int32_t *keys, int32_t n)
{
    const int32_t lane = threadIdx.x % 32;
    int32_t key = TAKEN, index = INT32_MAX;
    for (int32_t i = lane; i < n; i += 32)
        if (keys[i] > key) key = keys[i], index = i;
    const int32_t best = __reduce_max_sync(~0u, key);
    index = __reduce_min_sync(~0u, key == best ? index : INT32_MAX); /* of equal keys the first */
    if (index % 32 == lane) keys[index] = TAKEN;
    __syncwarp();
    return index;
}

/* A group's two largest keys, added as doubles and rounded to none: scores order as the sums do. */
__device__ int64_t group_score(const int32_t *keys, int32_t n)
{
    int32_t best = INT32_MIN, second = INT32_MIN;
    for (int32_t e = 0; e < n; e++) {
        int32_t lesser = min(keys[e], best);
        best = max(keys[e], best);
        second = max(lesser, second);
    }
    double sum = (double)value_of_key(best) + value_of_key(second) + 0.0;
    if (sum != sum) return INT64_MAX;
    int64_t bits = __double_as_longlong(sum);
    return bits < 0 ? bits ^ INT64_MAX : bits;
}

/* Takes every key outside the topk_group best groups. */
__device__ void keep_best_groups(const device_router &router, int32_t *keys, int64_t *scores)
{
    const int32_t lane = threadIdx.x % 32, size = router.n_experts / router.n_group;
    for (int32_t g = lane; g < router.n_group; g += 32) scores[g] = group_score(keys + g * size, size);
    __syncwarp();
    for (int32_t n = 0; n < router.topk_group; n++) {
        int64_t best = INT64_MIN;
        int32_t index = INT32_MAX;
        for (int32_t g = lane; g < router.n_group; g += 32)
            if (scores[g] > best) best = scores[g], index = g;
        for (int offset = 16; offset; offset /= 2) {
            int64_t other = __shfl_xor_sync(~0u, best, offset);
            int32_t other_index = __shfl_xor_sync(~0u, index, offset);
            if (other > best || (other == best && other_index < index)) best = other, index = other_index;
        }
        if (index % 32 == lane) scores[index] = INT64_MIN;
        __syncwarp();
    }
    for (int32_t e = lane; e < router.n_experts; e += 32)
        if (scores[e / size] != INT64_MIN) keys[e] = TAKEN;
    __syncwarp();
}

/* ---- Weights ---------------------------------------------------------------------------------------------------- */

/* Through f32 rounded to odd, so that the second rounding sees what the first dropped. */
__device__ uint16_t bf16_of_double(double x)
{
    if (x != x) return 0x7FC0;
    float rounded = (float)x;
    if ((double)rounded == x) return bf16_bits(rounded);
    uint32_t bits = __float_as_uint(rounded);
    bits -= fabs((double)rounded) > fabs(x);
    return bf16_bits(__uint_as_float(bits | 1));
}

__device__ double sum_of(double value)
{
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

struct token_logits {
    const void *row;
    moe4_dtype dtype;
    __device__ float operator[](int64_t e) const
    {
        return load_float(row, dtype, e);
    }
};

/* The sum that scores are divided by: of the chosen in slot order, or of all. */
__device__ double divisor(const device_router &router, const token_logits &logits, const double *scores, double best)
{
    double sum = 0.0;
    switch (router.method) {
    case MOE4_ROUTING_LLAMA4:
    case MOE4_ROUTING_TOPK:
    case MOE4_ROUTING_SIGMOID:
    case MOE4_ROUTING_TOPK_SIGMOID: return 1.0;
    case MOE4_ROUTING_DEFAULT:
        for (int32_t e = threadIdx.x % 32; e < router.n_experts; e += 32) sum += exp(logits[e] - best);
        return sum_of(sum);
    default: break;
    }
    for (int32_t a = 0; a < router.top_k; a++) sum += scores[a];
    if (router.method == MOE4_ROUTING_RENORMALIZE || router.method == MOE4_ROUTING_RENORMALIZE_NAIVE) return sum;
    if (router.method != MOE4_ROUTING_SIGMOID_RENORM) return sum + 1e-20;
    return router.renormalize == MOE4_RENORMALIZE_NO ? 1.0 : sum < 1e-20 ? 1e-20 : sum;
}

/* ---- Outputs ---------------------------------------------------------------------------------------------------- */

__device__ void store_slot(const route_outputs &out, int64_t slot, int32_t id, float weight)
{
    out.ids[slot] = id;
    out.weights[slot] = weight;
    out.locals[slot] = id >= 0 && id < out.n_experts ? out.local_of[id] : -1;
    out.row_map[slot] = -1;
    if (out.row_map_copy) out.row_map_copy[slot] = -1;
    if (out.ids_copy) out.ids_copy[slot] = id;
    if (out.weights_copy) out.weights_copy[slot] = weight;
    if (out.replay) out.replay[slot] = (int16_t)id;
}

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

__device__ warp_memory memory_of_warp(const device_router &router)
{
    extern __shared__ double shared[];
    warp_memory m;
    m.scores = shared + threadIdx.x / 32 * warp_bytes(router) / 8;
    m.groups = (int64_t *)(m.scores + router.top_k);
    m.ids = (int32_t *)(m.groups + router.n_group);
    m.keys = m.ids + router.top_k;
    return m;
}

__device__ void select_experts(const device_router &router, const token_logits &logits, const warp_memory &m)
{
    const int32_t lane = threadIdx.x % 32, E = router.n_experts;
    for (int32_t e = lane; e < E; e += 32) {
        float key = logits[e];
        if (has_biased_keys(router.method)) {
            key = (float)score(router.method, key, 0.0);
            if (router.bias) key += router.bias[e];
        }
        m.keys[e] = order_key(key);
    }
    __syncwarp();
    if (router.n_group > 1) keep_best_groups(router, m.keys, m.groups);
    for (int32_t a = 0; a < router.top_k; a++) {
        int32_t id = take_best(m.keys, E);
        if (lane == 0) m.ids[a] = id;
    }
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

/* By one warp. */
__device__ void route_token(const route_logits_call &call, int64_t t)
{
    const device_router &router = call.router;
    const int32_t lane = threadIdx.x % 32, A = router.top_k;
    const int64_t bytes = call.dtype == MOE4_DTYPE_F32 ? 4 : 2;
    const token_logits logits = {(const char *)call.logits + t * call.ld * bytes, call.dtype};
    const warp_memory m = memory_of_warp(router);
    bool known = true;
    if (router.method == MOE4_ROUTING_HASH)
        known = look_up_experts(call, t, m);
    else
        select_experts(router, logits, m);
    __syncwarp();

    const double best = known ? logits[m.ids[0]] : 0.0;
    for (int32_t a = lane; known && a < A; a += 32) m.scores[a] = score(router.method, logits[m.ids[a]], best);
    __syncwarp();
    const double by = known ? divisor(router, logits, m.scores, best) : 1.0;
    for (int32_t a = lane; a < A; a += 32) {
        float weight = known ? bf16_float(bf16_of_double(m.scores[a] * router.scale / by)) : QUIET_NAN;
        store_slot(call.out, t * A + a, m.ids[a], weight);
    }
    for (int32_t e = lane; call.logits_copy && e < router.n_experts; e += 32)
        call.logits_copy[t * router.n_experts + e] = logits[e];
}

/* By one thread. */
__device__ void route_slot(const route_given_call &call, int64_t slot)
{
    const int32_t A = call.topk.top_k;
    const int64_t t = slot / A, a = slot % A;
    int32_t id = call.topk.ids[t * call.topk.ld_ids + a];
    float weight;
    if (call.topk.format == MOE4_TOPK_PACKED) {
        weight = bf16_float((uint16_t)id);
        id >>= 16;
    } else {
        weight = load_float(call.topk.weights, call.topk.weights_dtype, t * call.topk.ld_weights + a);
    }
    store_slot(call.out, slot, id, weight);
    if (call.out.weights_copy && call.topk.weight_use == MOE4_WEIGHT_ON_INPUT) call.out.weights_copy[slot] = 1.0f;
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
    if (t < token_count_of(call.T)) route_token(call, t);
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
    if (slot < (int64_t)token_count_of(call.T) * call.topk.top_k) route_slot(call, slot);
    end_routing(call.is_after_x);
}

/* All blocks are one cluster, which routes together; then its first block groups, a thread a slot. */
constexpr int ONCE_WARPS = 16, ONCE_THREADS = ONCE_WARPS * 32; /* as many slots */
constexpr int ONCE_SHARED = 200 * 1024;                        /* bytes at most */

__global__ void __launch_bounds__(ONCE_THREADS) route_once_kernel(const __grid_constant__ route_logits_call call)
{
    extern __shared__ double shared[];
    for (int32_t e = threadIdx.x * 32; e < call.out.n_experts; e += ONCE_THREADS * 32) prefetch(&call.out.local_of[e]);
    begin_routing(call.is_after_x);
    if (blockIdx.x + threadIdx.x == 0) check_token_count(call.T, call.out.faults);
    const int32_t T = token_count_of(call.T), step = gridDim.x * ONCE_WARPS;
    for (int32_t t = blockIdx.x + threadIdx.x / 32 * gridDim.x; t < T; t += step) route_token(call, t);
    cluster_sync();
    if (blockIdx.x == 0) group_block<ONCE_WARPS>(call.group, shared);
    end_routing(call.is_after_x);
}

__global__ void __launch_bounds__(ONCE_THREADS) given_once_kernel(const __grid_constant__ route_given_call call)
{
    extern __shared__ double shared[];
    begin_routing(call.is_after_x);
    if (threadIdx.x == 0) check_token_count(call.T, call.out.faults);
    if ((int32_t)threadIdx.x < token_count_of(call.T) * call.topk.top_k) route_slot(call, threadIdx.x);
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
