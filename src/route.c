/* The public routing call, without a layer. */
#include <stdatomic.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "context.h"
#include "cpu/pool.h"
#include "cpu/route.h"
#include "supports.h"

enum { ROWS_A_CLAIM = 8 };

struct route_job {
    const struct router *router;
    const struct route_call *call;
    int64_t n_tokens;
    char *scratch;
    size_t scratch_bytes; /* of one worker */
    _Atomic int64_t next;
};

static void route_worker(void *argument, int32_t worker)
{
    struct route_job *job = argument;
    void *scratch = job->scratch + (size_t)worker * job->scratch_bytes;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&job->next, ROWS_A_CLAIM, memory_order_relaxed);
        if (first >= job->n_tokens) return;
        int64_t last = first + ROWS_A_CLAIM < job->n_tokens ? first + ROWS_A_CLAIM : job->n_tokens;
        route_rows(job->router, job->call, first, last, scratch);
    }
}

static moe4_status check_call(moe4_context *context, const moe4_routing *routing, int32_t n_experts,
                              const moe4_logits *logits, const int32_t *ids, const float *weights)
{
    if (routing->method == MOE4_ROUTING_NONE) return context_fail(context, MOE4_EINVAL, "routing.method is none");
    if (!logits->logits || !ids || !weights)
        return context_fail(context, MOE4_EINVAL, "%s is NULL", !logits->logits ? "logits" : !ids ? "ids" : "weights");
    if (!dtype_is_float(logits->dtype))
        return context_fail(context, MOE4_EINVAL, "logits.dtype is %s, expected f32, f16 or bf16",
                            dtype_name(logits->dtype));
    if (logits->ld && logits->ld < n_experts)
        return context_fail(context, MOE4_EINVAL, "logits.ld is %lld, expected at least %d", (long long)logits->ld,
                            n_experts);
    return MOE4_OK;
}

/* Runs the job in memory of its own: the router's copies, then scratch for each thread. */
static moe4_status run_job(moe4_context *context, const moe4_routing *routing, int32_t n_experts, int64_t n_tokens,
                           const struct route_call *call)
{
    size_t store_bytes, scratch_bytes, bytes;
    struct router router = {0};
    moe4_status status = route_store_bytes(context, routing, n_experts, &store_bytes);
    if (status) return status;
    store_bytes = (size_t)round_up((int64_t)store_bytes, 64);
    scratch_bytes = (size_t)round_up((int64_t)n_experts * 12 + 64, 64);
    if (!size_multiply((size_t)pool_width(context->pool), scratch_bytes, &bytes) ||
        !size_add(bytes, store_bytes, &bytes))
        return context_fail(context, MOE4_EINVAL, "the routing's tables do not fit the address space");
    char *memory = memory_allocate(&context->allocator, bytes);
    if (!memory) return context_fail_memory(context, "routing", bytes);

    status = route_init(context, &router, routing, n_experts, memory);
    if (!status) status = route_check_tokens(context, &router, call->token_ids, n_tokens);
    if (!status) {
        struct route_job job = {&router, call, n_tokens, memory + store_bytes, scratch_bytes, 0};
        pool_run(context->pool, route_worker, &job);
    }
    memory_release(&context->allocator, memory, bytes);
    return status;
}

moe4_status moe4_route(moe4_context *context, const moe4_routing *given_routing, int32_t n_experts, int64_t n_tokens,
                       const moe4_logits *given_logits, const int32_t *token_ids, int32_t *ids, float *weights)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    moe4_routing routing;
    moe4_logits logits;
    moe4_status status = require_cpu(context, "moe4_route");
    if (!status) status = adopt_struct(context, "routing", given_routing, &routing, sizeof routing);
    if (!status) status = route_validate(context, &routing, n_experts);
    if (!status && n_tokens < 0)
        status = context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected 0 or more", (long long)n_tokens);
    if (status || n_tokens == 0) return status;
    status = adopt_struct(context, "logits", given_logits, &logits, sizeof logits);
    if (!logits.dtype) logits.dtype = MOE4_DTYPE_F32;
    if (!status) status = check_call(context, &routing, n_experts, &logits, ids, weights);
    if (status) return status;
    struct route_call call = {logits.logits, logits.dtype, logits.ld ? logits.ld : n_experts, token_ids, ids,
                              weights,       NULL};
    return run_job(context, &routing, n_experts, n_tokens, &call);
}
