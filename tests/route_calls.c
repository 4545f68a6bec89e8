#include "route_calls.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "context.h"
#include "fixture.h"

moe4_context *route_context(void)
{
    static struct moe4_context context;
    context.message[0] = 0;
    return &context;
}

moe4_routing routing_of(moe4_routing_method method, int32_t top_k)
{
    moe4_routing routing = MOE4_ROUTING_INIT;
    routing.method = method;
    routing.top_k = top_k;
    return routing;
}

void route(const moe4_routing *routing, int32_t n_experts, const struct route_call *call, int64_t first, int64_t last)
{
    moe4_context *context = route_context();
    struct router router;
    size_t bytes;
    if (route_validate(context, routing, n_experts) != MOE4_OK) fail_msg("refused: %s", context->message);
    assert_int_equal(route_store_bytes(context, routing, n_experts, &bytes), MOE4_OK);
    struct buffers buffers = {BUFFERS_GUARD_AFTER, NULL};
    void *store = buffers_allocate(&buffers, bytes);
    assert_int_equal(route_init(context, &router, routing, n_experts, store), MOE4_OK);
    assert_int_equal(route_check_tokens(context, &router, call->token_ids, last), MOE4_OK);
    route_rows(&router, call, first, last, buffers_allocate(&buffers, route_scratch_bytes(&router)));
    buffers_release(&buffers);
}
