/* Routing: a row of logits to the ids and weights of its top_k experts (docs/semantics.md, routing).
 *
 * All arithmetic is double precision.  Selection compares raw logits, or for methods with a selection bias the keys
 * (float)((float)score + bias); a NaN of any sign is the largest key, -0 equals +0, ties go to the lower index.
 * Weights are unbiased scores, rounded once, from double to bf16. */
#ifndef MOE4_CPU_ROUTE_H
#define MOE4_CPU_ROUTE_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"

struct route_method; /* what the method is: a row of the table in route.c */

/* A layer's routing, resolved.  bias and table lie in the memory given to route_init. */
struct router {
    const struct route_method *method;
    int32_t n_experts, top_k;
    int32_t n_group, topk_group; /* 1 and 1 without groups */
    moe4_renormalize renormalize;
    double scale;
    const float *bias;    /* [E] selection bias; NULL = 0 */
    const int32_t *table; /* HASH: [vocab_size, A] */
    int64_t vocab_size;
};

/* "renormalize", "deepseek_v3", ...: the command's --method words.  NULL for NONE and for what is no method. */
const char *route_method_name(moe4_routing_method method);

/* Refuses, in words, what contradicts moe4_routing's documentation.  Looks only at values and at whether pointers are
 * NULL.  Method NONE passes when nothing but top_k is set; a caller that needs a method refuses it itself. */
moe4_status route_validate(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts);

/* Bytes that route_init wants for its copies of bias and table (at least 4-byte aligned).
 * MOE4_EINVAL when they do not fit a size_t. */
moe4_status route_store_bytes(struct moe4_context *context, const moe4_routing *routing, int32_t n_experts,
                              size_t *bytes);

/* Fills *router from a routing that passed route_validate and has a method, and checks every entry of a hash table:
 * MOE4_EINVAL names the first that is no expert. */
moe4_status route_init(struct moe4_context *context, struct router *router, const moe4_routing *routing,
                       int32_t n_experts, void *store);

/* Before anything is written: MOE4_EINVAL if the method needs token ids and they are NULL, or one of the n_tokens lies
 * outside the table.  MOE4_OK for other methods. */
moe4_status route_check_tokens(struct moe4_context *context, const struct router *router, const int32_t *token_ids,
                               int64_t n_tokens);

/* Scratch memory of one worker, 8-byte aligned: at most 12 E + 8 bytes. */
size_t route_scratch_bytes(const struct router *router);

/* The rows of one routing call. */
struct route_call {
    const void *logits; /* [T, E] */
    moe4_dtype dtype;   /* F32, BF16 or F16 */
    int64_t ld;
    const int32_t *token_ids; /* [T], HASH only; all inside the table */
    int32_t *ids;             /* [T, A], slots in descending order of selection */
    float *weights;           /* [T, A] */
    int16_t *replay;          /* [T, A]; NULL = not wanted */
};

/* Routes tokens first .. last-1.  Any threads at once over different rows, each with its own scratch. */
void route_rows(const struct router *router, const struct route_call *call, int64_t first, int64_t last, void *scratch);

#endif
