/* Which experts a token chooses, by one warp: selection by int32 keys that order as the floats do, scores in double
 * precision, as src/cpu/route_select.c has them. */
#ifndef MOE4_CUDA_SELECT_CUH
#define MOE4_CUDA_SELECT_CUH

#include "cuda/launch.cuh"

constexpr int32_t NAN_KEY = INT32_MAX, TAKEN = INT32_MIN; /* above +inf's key, below -inf's */

/* ---- Scores and keys -------------------------------------------------------------------------------------------- */

/* -0 as +0, any NaN above all. */
static __device__ int32_t order_key(float value)
{
    value += 0.0f;
    int32_t bits = __float_as_int(value);
    return value != value ? NAN_KEY : bits < 0 ? bits ^ INT32_MAX : bits;
}

static __device__ float value_of_key(int32_t key)
{
    return __int_as_float(key < 0 ? key ^ INT32_MAX : key);
}

static __device__ double sigmoid(double logit)
{
    return 1.0 / (1.0 + exp(-logit));
}

static __device__ double sqrt_softplus(double logit)
{
    return sqrt((logit > 0.0 ? logit : 0.0) + log1p(exp(-fabs(logit))));
}

/* The unbiased score; best is the logit in slot 0. */
static __device__ double score(moe4_routing_method method, double logit, double best)
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

static __device__ bool has_biased_keys(moe4_routing_method method)
{
    return method == MOE4_ROUTING_DEEPSEEK_V3 || method == MOE4_ROUTING_MINIMAX2 ||
           method == MOE4_ROUTING_SQRT_SOFTPLUS;
}

/* A token's, by expert. */
struct token_logits {
    const void *row;
    moe4_dtype dtype;
    __device__ float operator[](int64_t e) const
    {
        return load_float(row, dtype, e);
    }
};

/* Whether experts are chosen by keys, not looked up. */
static __device__ __forceinline__ bool has_keys(const device_router &router)
{
    return router.method != MOE4_ROUTING_HASH;
}

/* What the choice of expert e goes by. */
static __device__ __forceinline__ int32_t key_of_expert(const device_router &router, const token_logits &logits,
                                                        int32_t e)
{
    float key = logits[e];
    if (has_biased_keys(router.method)) {
        key = (float)(router.method == MOE4_ROUTING_SQRT_SOFTPLUS ? sqrt_softplus(key) : sigmoid(key));
        if (router.bias) key += router.bias[e];
    }
    return order_key(key);
}

/* ---- A warp's selection ----------------------------------------------------------------------------------------- */

/* The index of the best of n keys in shared memory, which is then taken. */
static __device__ int32_t take_best(int32_t *keys, int32_t n)
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
static __device__ int64_t group_score(const int32_t *keys, int32_t n)
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
static __device__ void keep_best_groups(const device_router &router, int32_t *keys, int64_t *scores)
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

/* The best top_k of n * 32 keys or fewer in order, a lane's keys in registers. */
template <int n> static __device__ void take_all(const int32_t *keys, int32_t n_experts, int32_t top_k, int32_t *ids)
{
    const int32_t lane = threadIdx.x % 32;
    int32_t own[n];
#pragma unroll
    for (int i = 0; i < n; i++) own[i] = lane + i * 32 < n_experts ? keys[lane + i * 32] : TAKEN;
#pragma unroll 1
    for (int32_t a = 0; a < top_k; a++) {
        int32_t key = own[0], at = 0;
#pragma unroll
        for (int i = 1; i < n; i++) key = max(key, own[i]);
        const int32_t best = __reduce_max_sync(~0u, key);
#pragma unroll
        for (int i = n - 1; i >= 0; i--) at = own[i] == best ? i : at;
        const int32_t id =
            __reduce_min_sync(~0u, key == best ? lane + at * 32 : INT32_MAX); /* of equal keys the first */
#pragma unroll
        for (int i = 0; i < n; i++)
            if (lane + i * 32 == id) own[i] = TAKEN;
        if (lane == 0) ids[a] = id;
    }
}

/* The best top_k in order.  The keys are no longer the same; groups is room for n_group numbers. */
static __device__ void choose_experts(const device_router &router, int32_t *keys, int64_t *groups, int32_t *ids)
{
    if (router.n_group > 1) keep_best_groups(router, keys, groups);
    if (router.n_experts <= 256) {
        take_all<8>(keys, router.n_experts, router.top_k, ids);
        return;
    }
    for (int32_t a = 0; a < router.top_k; a++) {
        const int32_t id = take_best(keys, router.n_experts);
        if (threadIdx.x % 32 == 0) ids[a] = id;
    }
}

#endif
