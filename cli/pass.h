/* One pass of a batch through a layer: the inputs, and memory for every result that was asked for. */
#ifndef MOE4_CLI_PASS_H
#define MOE4_CLI_PASS_H

#include "moe4/moe4.h"

/* Where ids and weights come from. */
typedef enum pass_routing {
    PASS_LOGITS, /* logits given */
    PASS_IDS,    /* ids and weights given */
    PASS_ROUTER  /* the layer's own router */
} pass_routing;

/* Results beyond y, ids, weights and logits, which every pass has room for. */
enum { PASS_STAGES = 1, PASS_REPLAY = 2 };

struct pass {
    int64_t n_tokens, hidden_size, intermediate_size, output_size;
    int32_t n_experts, top_k;
    moe4_compute compute;
    pass_routing routing;

    moe4_dtype x_dtype;
    void *x;              /* [T, H] BF16, or F8_E4M3 with */
    void *x_scale;        /* MXFP8: [T, H/32] E8M0; FP8: [T] f32 */
    uint16_t *router_x;   /* [T, router_size] bf16, what the layer's own router sees; NULL = x */
    int64_t router_size;  /* columns of that */
    int32_t *token_ids;   /* [T], for hash routing; NULL = none */
    float *given_logits;  /* [T, E] */
    int32_t *given_ids;   /* [T, A] */
    float *given_weights; /* [T, A] */

    uint16_t *y;              /* [T, output_size] bf16 */
    float *logits;            /* [T, E]; unused for PASS_IDS */
    int32_t *ids;             /* [T, A] */
    float *weights;           /* [T, A] */
    void *intermediate;       /* [R, I] bf16, or e4m3 in MXFP8 and FP8 compute with; PASS_STAGES, as those below */
    void *intermediate_scale; /* MXFP8: [R, I/32] E8M0; FP8: [R, ceil(I/128)] f32 */
    uint16_t *gemm2_rows;     /* [R, output_size] bf16 */
    int32_t *row_map;         /* [T, A] */
    int64_t n_rows;
    int16_t *replay; /* [T, A]; PASS_REPLAY */

    void *workspace;
    size_t workspace_bytes;
};

/* Gives a pass its sizes, for bf16 inputs in bf16 compute.  The caller then puts in x and what the routing needs, made
 * with allocate(). */
struct pass pass_begin(const moe4_layer_config *config, pass_routing routing, int64_t n_tokens, int32_t top_k);

/* Allocates room for the results. */
int pass_allocate(struct pass *pass, int wants);

/* Workspace for passes through this layer. */
int pass_prepare(struct pass *pass, moe4_context *context, const moe4_layer *layer);

/* Runs the library for some of the results: what a caller usually wants, the same without the sum over slots (with
 * PASS_STAGES only), or all that was allocated. */
typedef enum pass_results {
    FORWARD_OUTPUT,   /* y, ids, weights */
    FORWARD_DEFERRED, /* gemm2_rows, row_map, ids, weights */
    FORWARD_ALL
} pass_results;
moe4_status pass_forward(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results);

/* x of a token, as the router [router_size] and as the experts [H] see it. */
void pass_router_input(const struct pass *pass, int64_t token, double *x);
void pass_expert_input(const struct pass *pass, int64_t token, double *x);

/* Bytes of an element of the intermediate: 2 for bf16, 1 for e4m3. */
size_t pass_intermediate_bytes(const struct pass *pass);

/* What a row of the intermediate has in scales: how many, and their dtype; 0 and NONE in BF16 compute. */
int64_t pass_scales(const struct pass *pass, moe4_dtype *dtype);
size_t pass_scale_bytes(const struct pass *pass);

/* A row of the intermediate as gemm2 sees it, from where it and its scales lie. */
void pass_widen_intermediate(const struct pass *pass, const void *intermediate, const void *scales, double *v);

/* load [E]: how many slots name each expert. */
void pass_count_load(const struct pass *pass, int64_t *load);

/* Local experts that are named at least once, and slots that name them. */
void pass_count_local(const struct pass *pass, const moe4_layer_config *config, int64_t *n_experts, int64_t *n_rows);

/* Frees everything, the inputs too. */
void pass_end(struct pass *pass);

#endif
