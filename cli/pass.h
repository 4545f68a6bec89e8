/* One pass of a batch through a layer: the inputs, and memory for every result that was asked for. */
#ifndef MOE4_CLI_PASS_H
#define MOE4_CLI_PASS_H

#include "mirror.h"
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

    /* Inputs, of the type beside them. */
    void *x; /* [T, H] BF16, F16, F32, or F8_E4M3 with */
    moe4_dtype x_dtype;
    void *x_scale;  /* MXFP8: [T, H/32] E8M0; FP8: [T] f32 */
    void *router_x; /* [T, router_size], what the layer's own router sees; NULL = x */
    moe4_dtype router_x_dtype;
    int64_t router_size; /* columns of that */
    int32_t *token_ids;  /* [T], for hash routing; NULL = none */
    void *given_logits;  /* [T, E] */
    moe4_dtype logits_dtype;
    int32_t
        n_logit_sets; /* for how many calls given_logits has logits, one after another: 1, more where they are queued */
    moe4_topk_format topk_format;
    int32_t *given_ids;  /* [T, A]; PACKED: with the weights */
    void *given_weights; /* [T, A]; PACKED: NULL */
    moe4_dtype weights_dtype;
    moe4_weight_use weight_use; /* of given ids */
    void *addend;               /* [T, output_size] of y's type, what y is added to; NULL = y is overwritten */

    void *y; /* [T, output_size] */
    moe4_dtype y_dtype;
    float *logits;            /* [T, E]; unused for PASS_IDS */
    int32_t *ids;             /* [T, A] */
    float *weights;           /* [T, A] */
    void *intermediate;       /* [R, I] bf16, e4m3 or int8, the last three with; PASS_STAGES, as those below */
    void *intermediate_scale; /* MXFP8: [R, I/32] E8M0; FP8: [R, ceil(I/128)] f32; INT8: [R, I/32] f32 */
    uint16_t *gemm2_rows;     /* [R, output_size] bf16 */
    int32_t *row_map;         /* [T, A] */
    int64_t n_rows;
    int16_t *replay; /* [T, A]; PASS_REPLAY */

    struct mirror mirror; /* of all that, where the layer is on a GPU; its gpu is set before pass_prepare */
    void *workspace;      /* where the layer is */
    size_t workspace_bytes;
};

/* Gives a pass its sizes, for bf16 inputs and output in bf16 compute, with logits or weights in f32.  The caller then
 * puts in x and what the routing needs, made with allocate(). */
struct pass pass_begin(const moe4_layer_config *config, pass_routing routing, int64_t n_tokens, int32_t top_k);

/* Allocates room for the results. */
int pass_allocate(struct pass *pass, int wants);

/* Workspace for passes through this layer, and on a GPU room for all that has been allocated.  The pass must then stay
 * where it is. */
int pass_prepare(struct pass *pass, moe4_context *context, const moe4_layer *layer);

/* Some of the results: what a caller usually wants, the same without the sum over slots (with PASS_STAGES only), or all
 * that was allocated. */
typedef enum pass_results {
    FORWARD_OUTPUT,   /* y, ids, weights */
    FORWARD_DEFERRED, /* gemm2_rows, row_map, ids, weights */
    FORWARD_ALL
} pass_results;

/* Runs the library; the results are then in the pass.  On failure says why. */
int pass_forward(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results);

/* The two parts of it that can be timed apart.  Refreshing puts back into y what a call adds to, where it adds, which
 * every call needs anew; a call on a GPU is only queued, with the inputs that were last uploaded. */
int pass_refresh(struct pass *pass);
int pass_enqueue(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results);

/* What slot p = t*A + a was given (PASS_IDS). */
struct pass_choice {
    int32_t id;
    float weight;
};
struct pass_choice pass_given(const struct pass *pass, int64_t slot);

/* x as the router sees a token [router_size], and as the expert of a slot sees it [H]. */
void pass_router_input(const struct pass *pass, int64_t token, double *x);
void pass_expert_input(const struct pass *pass, int64_t slot, double *x);

/* Bytes of an element of the intermediate: 2 for bf16, 1 for codes. */
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
