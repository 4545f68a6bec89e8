/* The context: what every module needs of it. */
#ifndef MOE4_CONTEXT_H
#define MOE4_CONTEXT_H

#include "base/memory.h"
#include "moe4/moe4.h"
#include "moe4/tune.h"

struct backend;     /* backend.h */
struct pool;        /* cpu/pool.h */
struct cuda_device; /* cuda/device.h */

/* What is known of this context's device (tuning.h). */
struct tuning {
    moe4_tuning_entry *entries;
    int32_t n, capacity;
    int64_t max_tokens; /* the largest bucket of any entry */
};

struct moe4_context {
    moe4_allocator allocator;
    moe4_status status; /* of its creation: a half-built context refuses everything */
    const struct backend *backend;
    moe4_isa isa;
    struct pool *pool;
    struct cuda_device *cuda;
    struct tuning tuning;
    char device_name[64];
    char message[512];
};

/* Keeps the message (printf style, cut to fit) and returns status, so that a caller can `return context_fail(...)`.
 * The message names the thing and both values: "model.safetensors: tensor \"x\": shape [3, 4], expected [3, 5]". */
__attribute__((format(printf, 3, 4))) moe4_status context_fail(struct moe4_context *context, moe4_status status,
                                                               const char *format, ...);

/* context_fail for a failed allocation of `bytes` for `what`. */
moe4_status context_fail_memory(struct moe4_context *context, const char *what, size_t bytes);

#endif
