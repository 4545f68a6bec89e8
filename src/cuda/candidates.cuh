/* A token's choice of experts where their scores take long, by one warp: the same as select.cuh's. */
#ifndef MOE4_CUDA_CANDIDATES_CUH
#define MOE4_CUDA_CANDIDATES_CUH

#include "cuda/select.cuh"

/* Scores in double precision take longest where experts are many, so roughly computed ones say first who may be among
 * the best: a lane's two largest bound the top_k-th from below, and what lies further under that than both ways of
 * computing can differ is out. */
constexpr float ROUGHLY = 4e-6f; /* of 1 + the score; a rough score with its bias is off by less than a quarter of it */

static __device__ __forceinline__ bool has_candidates(const device_router &router)
{
    return has_biased_keys(router.method) && router.n_group <= 1 && router.n_experts >= 64 && router.top_k <= 32;
}

static __device__ __forceinline__ float rough_score(const device_router &router, float logit)
{
    if (router.method != MOE4_ROUTING_SQRT_SOFTPLUS) return __fdividef(1.0f, 1.0f + __expf(-logit));
    return sqrtf(fmaxf(logit, 0.0f) + log1pf(__expf(-fabsf(logit))));
}

/* Rough scores into `rough`, as bits; what a candidate is not below. */
static __device__ float score_roughly(const device_router &router, const token_logits &logits, int32_t *rough)
{
    int32_t first = TAKEN, second = TAKEN, least = TAKEN;
#pragma unroll 4
    for (int32_t e = threadIdx.x % 32; e < router.n_experts; e += 32) {
        float score = rough_score(router, logits[e]);
        if (router.bias) score += router.bias[e];
        const int32_t key = order_key(score);
        rough[e] = __float_as_int(score);
        second = max(second, min(first, key));
        first = max(first, key);
    }
    for (int32_t a = 0; a < router.top_k; a++) {
        least = __reduce_max_sync(~0u, first);
        const uint32_t owners = __ballot_sync(~0u, first == least);
        if (threadIdx.x % 32 == __ffs(owners) - 1) first = second, second = TAKEN;
    }
    const float score = value_of_key(least);
    return score - ROUGHLY * (1.0f + fabsf(score));
}

/* The best top_k in order, as choose_experts finds them; false where candidates are too many.  `keys` is room for as
 * many numbers as there are experts. */
static __device__ bool choose_candidates(const device_router &router, const token_logits &logits, int32_t *keys,
                                         int32_t *ids)
{
    const int32_t lane = threadIdx.x % 32, E = router.n_experts;
    const float limit = score_roughly(router, logits, keys);
    int32_t n = 0; /* candidates so far, whose ids take the place of scores that have been looked at */
    for (int32_t first = 0; first < E; first += 32) {
        const int32_t e = first + lane;
        const bool is_one = e < E && !(__int_as_float(keys[e]) < limit);
        const uint32_t all = __ballot_sync(~0u, is_one);
        __syncwarp();
        if (is_one) keys[n + __popc(all & ((1u << lane) - 1))] = e;
        n += __popc(all);
    }
    __syncwarp();
    if (n > 32 || n < router.top_k) return false;
    int32_t id = lane < n ? keys[lane] : INT32_MAX, key = lane < n ? key_of_expert(router, logits, id) : TAKEN;
    for (int32_t a = 0; a < router.top_k; a++) {
        const int32_t best = __reduce_max_sync(~0u, key);
        const int32_t chosen = __reduce_min_sync(~0u, key == best ? id : INT32_MAX); /* of equal keys the first */
        if (id == chosen) key = TAKEN, id = INT32_MAX;
        if (lane == 0) ids[a] = chosen;
    }
    return true;
}

#endif
