/* What the routing tests share: one routing call, with no more memory than it asks for. */
#ifndef MOE4_TEST_ROUTE_CALLS_H
#define MOE4_TEST_ROUTE_CALLS_H

#include "cpu/route.h"

/* A context that can only hold a message, empty again. */
moe4_context *route_context(void);

moe4_routing routing_of(moe4_routing_method method, int32_t top_k);

/* Validates, resolves and routes rows first .. last-1, memory ending where pages can no longer be touched. */
void route(const moe4_routing *routing, int32_t n_experts, const struct route_call *call, int64_t first, int64_t last);

#endif
