#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/checked.h"
#include "base/convert.h"
#include "base/dims.h"
#include "base/dtype.h"
#include "context.h"
#include "cpu/route_method.h"

static moe4_status validate_top_k(struct moe4_context *context, const struct route_method *method, int32_t top_k,
                                  int32_t n_experts)
{
    int32_t most = method->max_top_k < n_experts ? method->max_top_k : n_experts;
    if (top_k >= 1 && top_k <= most) return MOE4_OK;
    return context_fail(context, MOE4_EINVAL, "routing %s: top_k is %d, expected 1..%d (of %d experts)", method->name,
                        top_k, most, n_experts);
}

static moe4_status validate_groups(struct moe4_context *context, const struct route_method *method,
                                   const moe4_routing *routing, int32_t n_experts)
{
    const int32_t n_group = routing->n_group, topk_group = routing->topk_group;
    if (n_group == 0 || n_group == 1) { /* no groups */
        if (topk_group == 0 || topk_group == 1) return MOE4_OK;
        return context_fail(context, MOE4_EINVAL, "routing %s: topk_group is %d, expected 0 or 1 with n_group %d",
                            method->name, topk_group, n_group);
    }
    if (!(method->fields & ROUTE_GROUPS))
        return context_fail(context, MOE4_EINVAL, "routing %s has no groups: n_group is %d, expected 0 or 1",
                            method->name, n_group);
    if (n_group < 0 || n_experts % n_group || n_experts / n_group < 2)
        return context_fail(context, MOE4_EINVAL,
                            "routing %s: n_group is %d, expected a divisor of the %d experts that leaves at least 2 a "
                            "group",
                            method->name, n_group, n_experts);
    if (topk_group < 1 || topk_group > n_group)
        return context_fail(context, MOE4_EINVAL, "routing %s: topk_group is %d, expected 1..%d (n_group)",
                            method->name, topk_group, n_group);
    int32_t candidates = topk_group * (n_experts / n_group);
    if (routing->top_k > candidates)
        return context_fail(context, MOE4_EINVAL,
                            "routing %s: top_k is %d, but topk_group %d of n_group %d leave %d experts to choose from",
                            method->name, routing->top_k, topk_group, n_group, candidates);
    return MOE4_OK;
}

static moe4_status validate_bias(struct moe4_context *context, const struct route_method *method,
                                 const moe4_routing *routing)
{
    const moe4_dtype dtype = routing->correction_bias_dtype;
    if (!routing->correction_bias) return MOE4_OK;
    if (!(method->fields & ROUTE_BIAS))
        return context_fail(context, MOE4_EINVAL, "routing %s: correction_bias is given, but the method has none",
                            method->name);
    if (!dtype_is_float(dtype))
        return context_fail(context, MOE4_EINVAL, "routing %s: correction_bias_dtype is %s, expected f32, bf16 or f16",
                            method->name, dtype_name(dtype));
    return MOE4_OK;
}

static moe4_status validate_table(struct moe4_context *context, const struct route_method *method,
                                  const moe4_routing *routing)
{
    if (!(method->fields & ROUTE_TABLE)) {
        if (!routing->hash_table && !routing->vocab_size) return MOE4_OK;
        return context_fail(context, MOE4_EINVAL, "routing %s: %s is given, but only hash has a table", method->name,
                            routing->hash_table ? "hash_table" : "vocab_size");
    }
    if (!routing->hash_table) return context_fail(context, MOE4_EINVAL, "routing %s: hash_table is NULL", method->name);
    if (routing->hash_table_dtype != MOE4_DTYPE_I32 && routing->hash_table_dtype != MOE4_DTYPE_I64)
        return context_fail(context, MOE4_EINVAL, "routing %s: hash_table_dtype is %s, expected i32 or i64",
                            method->name, dtype_name(routing->hash_table_dtype));
    if (routing->vocab_size < 1)
        return context_fail(context, MOE4_EINVAL, "routing %s: vocab_size is %lld, expected at least 1", method->name,
                            (long long)routing->vocab_size);
    return MOE4_OK;
}

static moe4_status validate_numbers(struct moe4_context *context, const struct route_method *method,
                                    const moe4_routing *routing)
{
    if (!isfinite(routing->scaling_factor))
        return context_fail(context, MOE4_EINVAL, "routing %s: scaling_factor is %g, expected a finite number (0 = 1)",
                            method->name, (double)routing->scaling_factor);
    switch (routing->renormalize) {
    case MOE4_RENORMALIZE_DEFAULT: return MOE4_OK;
    case MOE4_RENORMALIZE_NO:
        if (method->fields & ROUTE_RENORMALIZE) return MOE4_OK;
        return context_fail(context, MOE4_EINVAL,
                            "routing %s: renormalize is \"no\", but only sigmoid_renorm has the choice", method->name);
    }
    return context_fail(context, MOE4_EINVAL, "routing %s: renormalize is %d, expected 0 (default) or 1 (no)",
                        method->name, (int)routing->renormalize);
}

/* The caller brings ids and weights: of the routing only top_k has a meaning. */
static moe4_status validate_none(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts)
{
    int32_t most = n_experts < MAX_TOP_K ? n_experts : MAX_TOP_K;
    if (routing->top_k < 0 || routing->top_k > most)
        return context_fail(context, MOE4_EINVAL, "routing none: top_k is %d, expected 0..%d (of %d experts)",
                            routing->top_k, most, n_experts);
    if (routing->n_group || routing->topk_group || routing->scaling_factor != 0.0f || routing->renormalize ||
        routing->correction_bias || routing->hash_table || routing->vocab_size)
        return context_fail(context, MOE4_EINVAL, "routing fields are set, but the routing method is not");
    return MOE4_OK;
}

moe4_status route_validate(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts)
{
    if (n_experts < 1 || n_experts > MAX_EXPERTS)
        return context_fail(context, MOE4_EINVAL, "n_experts is %d, expected 1..%d", n_experts, MAX_EXPERTS);
    if (routing->method == MOE4_ROUTING_NONE) return validate_none(context, routing, n_experts);
    const struct route_method *method = route_method_of(routing->method);
    if (!method)
        return context_fail(context, MOE4_EINVAL, "routing method %d is unknown, expected 0..%d", (int)routing->method,
                            MOE4_ROUTING_HASH);
    moe4_status status = validate_top_k(context, method, routing->top_k, n_experts);
    if (status == MOE4_OK) status = validate_groups(context, method, routing, n_experts);
    if (status == MOE4_OK) status = validate_bias(context, method, routing);
    if (status == MOE4_OK) status = validate_table(context, method, routing);
    if (status == MOE4_OK) status = validate_numbers(context, method, routing);
    return status;
}

moe4_status route_store_bytes(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts,
                              size_t *bytes)
{
    size_t bias = routing->correction_bias ? (size_t)n_experts * sizeof(float) : 0, table = 0;
    if (routing->hash_table && (!size_multiply((size_t)routing->vocab_size, (size_t)routing->top_k, &table) ||
                                !size_multiply(table, sizeof(int32_t), &table)))
        return context_fail(context, MOE4_EINVAL, "routing: a hash table of vocab_size %lld times top_k %d is too big",
                            (long long)routing->vocab_size, routing->top_k);
    *bytes = bias + table; /* a method has one or the other */
    return MOE4_OK;
}

static int64_t table_entry(const moe4_routing *routing, int64_t index)
{
    int64_t wide;
    int32_t narrow;
    if (routing->hash_table_dtype == MOE4_DTYPE_I64) {
        memcpy(&wide, (const char *)routing->hash_table + index * (int64_t)sizeof wide, sizeof wide);
        return wide;
    }
    memcpy(&narrow, (const char *)routing->hash_table + index * (int64_t)sizeof narrow, sizeof narrow);
    return narrow;
}

static moe4_status copy_table(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts,
                              int32_t *copy)
{
    const int64_t n = routing->vocab_size * routing->top_k;
    for (int64_t i = 0; i < n; i++) {
        int64_t id = table_entry(routing, i);
        if (id < 0 || id >= n_experts)
            return context_fail(context, MOE4_EINVAL, "hash_table[%lld][%d] is %lld, expected an expert, 0..%d",
                                (long long)(i / routing->top_k), (int)(i % routing->top_k), (long long)id,
                                n_experts - 1);
        copy[i] = (int32_t)id;
    }
    return MOE4_OK;
}

moe4_status route_init(struct moe4_context *context, struct router *router, const moe4_routing *routing,
                       int32_t n_experts, void *store)
{
    *router = (struct router){
        .method = route_method_of(routing->method),
        .n_experts = n_experts,
        .top_k = routing->top_k,
        .n_group = routing->n_group > 1 ? routing->n_group : 1,
        .topk_group = routing->n_group > 1 ? routing->topk_group : 1,
        .renormalize = routing->renormalize,
        .scale = routing->scaling_factor != 0.0f ? (double)routing->scaling_factor : 1.0,
        .vocab_size = routing->vocab_size,
    };
    if (routing->correction_bias) {
        float *bias = store;
        for (int32_t e = 0; e < n_experts; e++)
            bias[e] = load_f32(routing->correction_bias, routing->correction_bias_dtype, e);
        router->bias = bias;
    }
    if (!routing->hash_table) return MOE4_OK;
    router->table = store;
    return copy_table(context, routing, n_experts, store);
}

moe4_status route_check_tokens(struct moe4_context *context, const struct router *router, const int32_t *token_ids,
                               int64_t n_tokens)
{
    if (!router->table || !n_tokens) return MOE4_OK;
    if (!token_ids) return context_fail(context, MOE4_EINVAL, "token_ids is NULL, but hash routing needs them");
    for (int64_t t = 0; t < n_tokens; t++)
        if (token_ids[t] < 0 || token_ids[t] >= router->vocab_size)
            return context_fail(context, MOE4_EINVAL, "token_ids[%lld] is %d, expected 0..%lld (vocab_size)",
                                (long long)t, token_ids[t], (long long)(router->vocab_size - 1));
    return MOE4_OK;
}
