/* A forward call with every output asked for, and the oracle's verdict on each of its stages. */
#ifndef MOE4_TEST_CALL_H
#define MOE4_TEST_CALL_H

#include "fixture.h"
#include "ref.h"

/* Where a call's routing comes from. */
enum route_source {
    ROUTE_LOGITS_F32,
    ROUTE_LOGITS_BF16,
    ROUTE_LOGITS_F16,
    ROUTE_OWN_ROUTER, /* the layer's, from x or from router_x where its width differs */
    ROUTE_IDS_F32,
    ROUTE_IDS_BF16,
    ROUTE_IDS_PACKED,
    N_ROUTE_SOURCES
};

/* What given ids look like. */
enum id_pattern {
    IDS_DISTINCT, /* each row distinct experts, local or not */
    IDS_WILD,     /* -1, experts that do not exist, duplicates */
    IDS_ONE,      /* every slot the same local expert */
    IDS_ELSEWHERE /* none is local */
};

struct call_plan {
    int64_t n_tokens;
    int32_t top_k; /* with logits: the config's */
    enum route_source routing;
    enum id_pattern ids;
    moe4_compute compute;
    moe4_dtype x_dtype; /* NONE = BF16; F8_E4M3 in mxfp8 and fp8 compute */
    moe4_dtype y_dtype; /* NONE = BF16 */
    moe4_write write;
    moe4_weight_use weight_use;
    enum weight_data data; /* EXACT: x of small integers, weights powers of two */
    int64_t gap;           /* elements between the rows of every array that has a stride */
    uint64_t seed;
};

struct call {
    const moe4_layer_config *config;
    struct call_plan plan;
    const char *label; /* for failures; "" */
    int64_t T, R;      /* R = T * A */
    int32_t A;
    int is_routed;    /* moe4_forward_router, not moe4_forward_experts */
    moe4_batch batch; /* its workspace is set by call_run */
    moe4_topk topk;
    moe4_logits logits;
    moe4_result result;
    void *y_before; /* a copy of y's rows, gaps included, before the call */
    size_t y_bytes;
    const char *workspace_end; /* of its memory: what lies between batch.workspace_bytes and here is 0xFF */
};

/* All inputs, and outputs filled with 0xFF (y: with numbers where it is added to).  The result of a given plan and
 * config is always the same, token for token: a plan with fewer tokens has the first of them. */
struct call call_create(struct buffers *buffers, const moe4_layer_config *config, const struct call_plan *plan);

/* Runs it in a workspace of exactly the size asked for, from `buffers`, filled with 0xFF. */
moe4_status call_run(struct buffers *buffers, moe4_context *context, const moe4_layer *layer, struct call *call);

/* The same, and it must succeed. */
void call_must_run(struct buffers *buffers, moe4_context *context, const moe4_layer *layer, struct call *call);

/* Fails the test unless every stage of a finished call is what the oracle says: routing, row map, intermediate and
 * gemm2 rows of up to max_rows routed rows, y of all tokens; and unless what lies beyond the results is untouched. */
void call_check(const struct call *call, const moe4_expert *experts, moe4_isa isa, int64_t max_rows);

/* The same with experts that are made when they are needed. */
void call_check_from(const struct call *call, const moe4_expert_source *source, moe4_isa isa, int64_t max_rows);

/* Fails the test unless the rounded stages of the routed rows are bit for bit those of exact sums. */
void call_check_exact(const struct call *call, const moe4_expert *experts);

/* Fails the test unless two finished calls of one config agree bit for bit, y and every stage, in token t of the first
 * and token u of the second. */
void call_compare_tokens(const struct call *first, int64_t t, const struct call *second, int64_t u);

/* The same for all of both. */
void call_compare(const struct call *first, const struct call *second);

/* Columns of y. */
int64_t output_columns(const moe4_layer_config *config);

/* Bytes of an element of the intermediate output. */
int64_t intermediate_bytes(moe4_compute compute);

/* Bytes of the scales of a row of it, in quantised modes. */
size_t intermediate_scale_bytes(moe4_compute compute, int64_t I);

#endif
