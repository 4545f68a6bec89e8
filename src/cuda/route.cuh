/* A token's routing, by one warp: the choice of its experts (select.cuh), their weights, and where all of it goes. */
#ifndef MOE4_CUDA_ROUTE_CUH
#define MOE4_CUDA_ROUTE_CUH

#include "cuda/select.cuh"

constexpr float QUIET_NAN = __builtin_nanf("");

/* ---- Weights ---------------------------------------------------------------------------------------------------- */

/* Through f32 rounded to odd, so that the second rounding sees what the first dropped. */
static __device__ uint16_t bf16_of_double(double x)
{
    if (x != x) return 0x7FC0;
    float rounded = (float)x;
    if ((double)rounded == x) return bf16_bits(rounded);
    uint32_t bits = __float_as_uint(rounded);
    bits -= fabs((double)rounded) > fabs(x);
    return bf16_bits(__uint_as_float(bits | 1));
}

static __device__ double sum_of(double value)
{
    for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

/* The sum that scores are divided by: of the chosen in slot order, or of all. */
static __device__ double divisor(const device_router &router, const token_logits &logits, const double *scores,
                                 double best)
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

static __device__ void store_slot(const route_outputs &out, int64_t slot, int32_t id, float weight)
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

static __device__ token_logits logits_of_token(const route_logits_call &call, int64_t t)
{
    const int64_t bytes = call.dtype == MOE4_DTYPE_F32 ? 4 : 2;
    return {(const char *)call.logits + t * call.ld * bytes, call.dtype};
}

/* What follows the choice of a token's experts: their weights, and all outputs.  A token that is not known has none. */
static __device__ void finish_token(const route_logits_call &call, int64_t t, const token_logits &logits,
                                    const int32_t *ids, double *scores, bool known)
{
    const device_router &router = call.router;
    const int32_t lane = threadIdx.x % 32, A = router.top_k;
    const double best = known ? logits[ids[0]] : 0.0;
    for (int32_t a = lane; known && a < A; a += 32) scores[a] = score(router.method, logits[ids[a]], best);
    __syncwarp();
    const double by = known ? divisor(router, logits, scores, best) : 1.0;
    for (int32_t a = lane; a < A; a += 32) {
        float weight = known ? bf16_float(bf16_of_double(scores[a] * router.scale / by)) : QUIET_NAN;
        store_slot(call.out, t * A + a, ids[a], weight);
    }
    for (int32_t e = lane; call.logits_copy && e < router.n_experts; e += 32)
        call.logits_copy[t * router.n_experts + e] = logits[e];
}

/* A slot of the caller's own choice, by one thread. */
static __device__ int32_t id_of_slot(const moe4_topk &topk, int64_t slot)
{
    const int32_t id = topk.ids[slot / topk.top_k * topk.ld_ids + slot % topk.top_k];
    return topk.format == MOE4_TOPK_PACKED ? id >> 16 : id;
}

static __device__ void route_slot(const moe4_topk &topk, const route_outputs &out, int64_t slot)
{
    const int64_t t = slot / topk.top_k, a = slot % topk.top_k;
    const float weight = topk.format == MOE4_TOPK_PACKED
                             ? bf16_float((uint16_t)topk.ids[t * topk.ld_ids + a])
                             : load_float(topk.weights, topk.weights_dtype, t * topk.ld_weights + a);
    store_slot(out, slot, id_of_slot(topk, slot), weight);
    if (out.weights_copy && topk.weight_use == MOE4_WEIGHT_ON_INPUT) out.weights_copy[slot] = 1.0f;
}

#endif
