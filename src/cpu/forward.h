/* One forward call on the CPU: the state that its stages share, all of it in the caller's workspace.
 *
 *   route        logits or the caller's routing -> ids, weights                            all tokens at once
 *   group        ids -> rows: routed rows sorted by local expert                           \
 *   convert      x -> bf16 or codes, where it is not what the kernels read                  |
 *   gate_up      gather: x -> packed activations of the rows, by token tile;                | a chunk of tokens
 *                GEMM, bias, activation -> packed intermediate v'                           | at a time
 *   down         GEMM, bias -> z', one bf16 row a routed row;                               |
 *                combine: z' and weights -> y                                              /
 *
 * A stage is a function over a range of items; stage_run, or for GEMMs panels_run, spreads the items over the pool's
 * threads, one fork and join a stage.  What few tokens need before gate_up is done by the caller's thread, so that such
 * a layer has two of them. */
#ifndef MOE4_CPU_FORWARD_H
#define MOE4_CPU_FORWARD_H

#include <stdint.h>

#include "backend.h"
#include "cpu/prepared.h"

/* Up to LARGE_TILE_TOKENS routed rows of one expert, which kernels take together. */
struct tile {
    int32_t first_row; /* in the chunk */
    int32_t n_rows;
    int32_t run;        /* consecutive k of a row in the packed activations (layout.h) */
    int64_t output_row; /* of its first row in the optional outputs */
};

/* An expert that some token of the chunk chose. */
struct active_expert {
    int32_t l;
    int32_t first_row, n_rows;
    int32_t first_tile, n_tiles;
    int64_t output_row; /* where its rows begin in the optional outputs, which hold the whole batch */
};

/* Where the rows of x come from: the caller's x as it is, converted once a token, or, where weights go on the input,
 * once a slot. */
enum rows_source { ROWS_AS_GIVEN, ROWS_BY_TOKEN, ROWS_BY_SLOT };

/* Where everything lies in the workspace, for calls of up to n_tokens tokens. */
struct workspace_plan {
    int64_t chunk_tokens, chunk_rows, max_active, max_tiles;
    size_t ids, weights, output_rows;                                                      /* of the whole batch */
    size_t router_logits;                                                                  /* of some of its tokens */
    size_t counts, row_of_slot, slot_of_row, active, tiles, x_factor, intermediate_factor; /* of a chunk */
    size_t x, operand, intermediate, z, converted_scale, gathered, experts_left;           /* of a chunk */
    size_t scratch, scratch_bytes;                                                         /* of each thread */
    size_t total;
};

struct forward {
    struct moe4_context *context;
    const struct moe4_layer *layer;
    const struct prepared *prepared;
    const struct forward_call *call;
    struct workspace_plan plan;
    int64_t T;
    int32_t A;
    int32_t tile_tokens, claim_share;           /* the tactic */
    const struct kernel *kernel, *exact_kernel; /* of the call's compute mode */
    int64_t group_size, n_groups; /* columns of I that share a factor in down: 128 in fp8 mode, else all */

    int64_t router_first, router_tokens; /* the tokens that are routed at a time */
    int64_t router_slices;               /* of the experts, when their logits are made */
    float *router_logits;                /* [router_tokens, E] by the layer's own router */

    int32_t *ids;         /* [T, A] global */
    float *weights;       /* [T, A] */
    int64_t *output_rows; /* [L] where the next routed row of l goes in the optional outputs */

    int64_t first_token, n_tokens; /* the chunk */
    int64_t n_rows;
    int32_t *counts;              /* [group_blocks, L] rows of each local expert, then where its next row goes */
    int32_t *row_of_slot;         /* [n_tokens, A] chunk row of a slot, -1 = not local */
    int32_t *slot_of_row;         /* [n_rows] t*A + a, t counted in the chunk */
    struct active_expert *active; /* most rows first */
    struct tile *tiles;
    int32_t n_active, n_tiles;

    enum rows_source rows_from;
    uint16_t *converted;           /* [n_tokens, H] ROWS_BY_TOKEN, in the memory of z, which is written later */
    float *converted_scale;        /* [n_tokens] what a token's sums of gate_up must be multiplied by */
    _Atomic int32_t *gathered;     /* [n_tiles] how far its operand is */
    _Atomic int32_t *experts_left; /* [panels of down] that still have to be multiplied before combine */

    float *x_factor;            /* [n_rows] what a row's sums of gate_up must be multiplied by (tame.h) */
    float *intermediate_factor; /* [n_rows, n_groups] the same for down: fp8 scales, or tame.h */
    _Atomic int has_wild;       /* an intermediate may be too large or too small to be summed as it is */
    uint16_t *x;                /* tile after tile, each [H/run][n_rows][run], or in int8 compute as int8.h says */
    int32_t *operand;           /* tile after tile, what kernels convert x to, and later the intermediate */
    uint16_t *intermediate;     /* tile after tile, each [I/run][n_rows][run], or the same */
    uint16_t *z;                /* [panels of down][n_rows][PANEL_ROWS] */
    char *scratch;              /* plan.scratch_bytes for each thread */
};

static inline int forward_is_int8(const struct forward *f)
{
    return f->call->batch->compute == MOE4_COMPUTE_INT8;
}

/* What multiplies an expert's rows of the intermediate, and of x. */
static inline const struct kernel *forward_kernel(const struct forward *f, const struct active_expert *expert)
{
    return f->prepared->is_exact[expert->l] ? f->exact_kernel : f->kernel;
}

static inline const struct kernel *forward_x_kernel(const struct forward *f, const struct active_expert *expert)
{
    const struct kernel *kernel = forward_kernel(f, expert);
    return kernel->for_x ? kernel->for_x : kernel;
}

/* A tile, [K] a row, from k on, as a kernel converts it. */
static inline int32_t *forward_operand(const struct forward *f, const struct kernel *kernel, const struct tile *tile,
                                       int64_t K, int64_t k)
{
    return f->operand + (tile->first_row * K + tile->n_rows * k) / BLOCK_SIZE * kernel->block_words;
}

/* A panel's columns of a row of z'. */
static inline uint16_t *forward_z(const struct forward *f, int64_t panel, int64_t row)
{
    return f->z + (panel * f->n_rows + row) * PANEL_ROWS;
}

/* Items first .. last-1, done by thread `worker`, 0 .. pool_threads-1. */
typedef void stage_fn(struct forward *f, int64_t first, int64_t last, int32_t worker);

/* Runs a stage over n_items items.  Threads claim runs of items, at most max_claim, smaller towards the end. */
void stage_run(struct forward *f, stage_fn *stage, int64_t n_items, int64_t max_claim);

moe4_status forward_plan(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens, int32_t top_k,
                         struct workspace_plan *plan);
moe4_status forward_run(struct moe4_context *context, const struct moe4_layer *layer, const struct forward_call *call);

/* The stages, one file each. */
void route_stage(struct forward *f);
void group_stage(struct forward *f);
void convert_stage(struct forward *f);
void gate_up_stage(struct forward *f);
void down_stage(struct forward *f);

/* Blocks of slots that group counts apart from each other. */
int64_t group_blocks(int64_t n_slots);

/* A slot's row of x [H], and the scale that its sums must be multiplied by.  `room` [H] may be used for it. */
const uint16_t *converted_row(const struct forward *f, int64_t slot, uint16_t *room, float *scale);

/* gather, part of gate_up: at its beginning, and before a thread multiplies panels of an expert.  Down begins in the
 * same way, and if its kernel wants the intermediate converted, that is when. */
void gather_begin(struct forward *f);
void gather_expert(struct forward *f, const struct active_expert *expert, int32_t worker);
void gather_intermediate(struct forward *f, const struct active_expert *expert, int32_t worker);

/* n elements of each row into a tile, [n/run][n_rows][run]; n is whole blocks. */
void gather_runs(const uint16_t *const *rows, int32_t n_rows, int64_t n, int32_t run, uint16_t *packed);

/* combine, part of down: at its beginning, and when one expert's product of a panel is there. */
void combine_begin(struct forward *f, int64_t n_panels);
void combine_multiplied(struct forward *f, int64_t panel);

/* The optional outputs hold the routed rows of the whole batch, local experts ascending, whatever the chunks are: a
 * chunk's rows of an expert follow those of the chunks before (stage_outputs.c).  gate_up writes its own. */
void stage_outputs_begin(struct forward *f); /* once a call, after routing: numbers the rows */
void stage_outputs_copy(struct forward *f);  /* once a chunk: z' and the row map */

/* Elements of the layer's own logits that routing keeps, for calls of n_tokens. */
int64_t route_stage_logits(const struct moe4_layer *layer, int64_t n_tokens);

/* Bytes of scratch that a thread wants for routing and for gathering n_rows at most. */
size_t route_stage_scratch_bytes(const struct moe4_layer *layer);
size_t gather_scratch_bytes(const struct moe4_layer *layer, int64_t n_rows);

#endif
