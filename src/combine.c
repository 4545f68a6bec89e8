/* The public side of deferral: whether to defer, and the combine that finishes a deferred call. */
#include "backend.h"
#include "base/dims.h"
#include "base/dtype.h"
#include "supports.h"

static moe4_status check_deferred(moe4_context *context, moe4_deferred *d)
{
    int64_t n_tokens;
    moe4_status status = read_token_count(context, d->n_tokens, d->n_tokens_device, &n_tokens);
    d->n_tokens = n_tokens;
    if (status || n_tokens == 0) return status;
    if (d->stream && context->backend == &backend_cpu)
        return context_fail(context, MOE4_EINVAL, "stream is not NULL, which it must be on the cpu");
    if (d->top_k < 1 || d->top_k > MAX_TOP_K)
        return context_fail(context, MOE4_EINVAL, "top_k is %d, expected 1 to %d", d->top_k, MAX_TOP_K);
    if (d->n_tokens > INT64_MAX / d->top_k)
        return context_fail(context, MOE4_EINVAL, "%lld tokens of %d slots do not fit the address space",
                            (long long)d->n_tokens, d->top_k);
    if (d->output_size < 1)
        return context_fail(context, MOE4_EINVAL, "output_size is %lld, expected 1 or more", (long long)d->output_size);
    if (!d->row_map || !d->weights || (!d->gemm2_rows && d->n_rows))
        return context_fail(context, MOE4_EINVAL, "%s is NULL",
                            !d->row_map   ? "row_map"
                            : !d->weights ? "weights"
                                          : "gemm2_rows");
    if (!d->addend_dtype) d->addend_dtype = MOE4_DTYPE_BF16;
    if (d->addend && !dtype_is_float(d->addend_dtype))
        return context_fail(context, MOE4_EINVAL, "addend_dtype is %s, expected f32, f16 or bf16",
                            dtype_name(d->addend_dtype));
    if (d->ld_addend == 0) d->ld_addend = d->output_size;
    if (d->ld_addend < d->output_size)
        return context_fail(context, MOE4_EINVAL, "ld_addend is %lld, expected at least %lld", (long long)d->ld_addend,
                            (long long)d->output_size);
    return MOE4_OK;
}

static moe4_status check_destination(moe4_context *context, const moe4_deferred *d, moe4_result *result)
{
    if (!result->y) return context_fail(context, MOE4_EINVAL, "y is NULL");
    if (!dtype_is_float(result->y_dtype))
        return context_fail(context, MOE4_EINVAL, "y_dtype is %s, expected f32, f16 or bf16",
                            dtype_name(result->y_dtype));
    if (result->write != MOE4_WRITE_OVERWRITE && result->write != MOE4_WRITE_ADD)
        return context_fail(context, MOE4_EINVAL, "write is %d, expected overwrite or add", result->write);
    if (result->ldy == 0) result->ldy = d->output_size;
    if (result->ldy < d->output_size)
        return context_fail(context, MOE4_EINVAL, "ldy is %lld, expected at least %lld", (long long)result->ldy,
                            (long long)d->output_size);
    if (result->logits || result->ids || result->weights || result->replay || result->intermediate ||
        result->intermediate_scale || result->gemm2_rows || result->row_map || result->n_rows)
        return context_fail(context, MOE4_EINVAL, "result asks for more than y, which is all that a combine makes");
    return MOE4_OK;
}

moe4_status moe4_combine(moe4_context *context, const moe4_deferred *given, const moe4_result *given_result)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    moe4_deferred d;
    moe4_result result;
    moe4_status status = adopt_struct(context, "deferred", given, &d, sizeof d);
    if (!status) status = adopt_struct(context, "result", given_result, &result, sizeof result);
    if (!status) status = check_deferred(context, &d);
    if (status || d.n_tokens == 0) return status;
    if (!result.y_dtype) result.y_dtype = MOE4_DTYPE_BF16;
    if ((status = check_destination(context, &d, &result))) return status;
    return context->backend->combine(context, &d, &result);
}

/* ---- Whether to defer
 * ------------------------------------------------------------------------------------------------- */

static int fits(int64_t n_tokens, int64_t cap)
{
    return cap <= 0 || n_tokens <= cap;
}

static int topology_defers(const moe4_deferral *d)
{
    const moe4_parallel *p = &d->parallel;
    if (p->data_size > 1 || p->context_size > 1 || p->sequence_size > 1) return 0;
    if (p->expert_size > 1) return d->by_scope && d->scope_allows_experts;
    return p->tensor_size > 1;
}

moe4_status moe4_should_defer(moe4_context *context, const moe4_deferral *given, int64_t n_tokens, int32_t *defer)
{
    if (!context) return MOE4_EINVAL;
    moe4_deferral d;
    moe4_status status = adopt_struct(context, "deferral", given, &d, sizeof d);
    if (status) return status;
    if (!defer) return context_fail(context, MOE4_EINVAL, "defer is NULL");
    if (d.by_scope && d.scope_capacity <= 0)
        return context_fail(context, MOE4_EINVAL, "scope_capacity is %lld, expected a positive number of tokens",
                            (long long)d.scope_capacity);
    int requested = d.by_deployment || d.by_scope;
    int within_caps = fits(n_tokens, d.producer_max_tokens) &&
                      (!d.by_deployment || fits(n_tokens, d.deployment_max_tokens)) &&
                      (!d.by_scope || fits(n_tokens, d.scope_capacity));
    int is_whole = d.output_size == 0 || d.output_size == d.hidden_size;
    *defer = requested && n_tokens >= 1 && within_caps && topology_defers(&d) && is_whole;
    return MOE4_OK;
}
