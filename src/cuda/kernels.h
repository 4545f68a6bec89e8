/* The CUDA backend's kernels, as C calls them.  Every pointer is device memory unless it says otherwise; every launch
 * returns cudaError_t as an int, so that nothing else needs CUDA's headers. */
#ifndef MOE4_CUDA_KERNELS_H
#define MOE4_CUDA_KERNELS_H

#include <stdint.h>

#include "cuda/fp8.h"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* what a cudaStream_t points to */
typedef struct CUstream_st *cuda_stream;

/* How many of the n_tokens tokens from `first` there are, of a call of T or fewer. */
struct token_count {
    int32_t first, n_tokens, T;
    const int32_t *on_device; /* the call's tokens; NULL = T.  What is not 0..T is cut */
};

/* What kernels find wrong with their input: one word of host memory a kind, 0 for nothing, else FAULT_SEEN, the token
 * in bits 32..62 and the offending value in bits 0..31.  The last one found stays. */
enum fault { FAULT_TOKEN_COUNT, FAULT_TOKEN_ID, FAULT_ROW_MAP, N_FAULTS };
#define FAULT_SEEN (1ull << 63)

/* ---- Packing (pack.cu) ------------------------------------------------------------------------------------------ */

/* The scales of one expert's matrix whose blocks are not all zeros. */
struct scale_range {
    int32_t least, most;
    int32_t is_wide; /* some tile's span more than e5m2 holds */
};

struct pack_call {
    const uint8_t *codes, *scales; /* dense rows */
    const void *bias;              /* NULL = none */
    moe4_dtype bias_dtype;
    int64_t rows, K; /* of the matrix */
    struct cuda_row_order order;
    int32_t n_tiles, n_steps;
    const struct scale_range *ranges; /* of the expert's two matrices, this one's first */
    int32_t other_range;              /* index of the other one's */
    uint8_t *packed;                  /* [n_tiles][n_steps] steps */
    float *packed_bias;               /* [n_tiles][64] */
    float *unit;                      /* 2^base of this matrix */
    uint8_t *tile_base;               /* [n_tiles] of the fp8 arrangement; NULL = the bf16 arrangement */
    uint8_t *is_exact; /* 1 = no base holds both matrices: scales are stored raw, in the bf16 arrangement */
};

/* All of the matrix's scales; and in the fp8 arrangement each tile's, of which tile_base keeps the least. */
int pack_range(const struct pack_call *call, struct scale_range *range, cuda_stream stream);
int pack_matrix(const struct pack_call *call, cuda_stream stream);

/* ---- Grouping (group.cu) ---------------------------------------------------------------------------------------- */

/* Where the routed rows of a call begin in the optional outputs, which hold all of them, when it runs in chunks. */
struct number_call {
    struct token_count T; /* of the whole call */
    int32_t top_k, L;
    const int32_t *locals; /* [T, A] */
    int64_t *output_rows;  /* [L] */
    int64_t *n_rows;       /* NULL = not wanted */
};
int number_rows(const struct number_call *call, cuda_stream stream);

enum { GROUP_BLOCKS = 8 }; /* that may each count slots of their own */

/* Sorts routed rows by local expert, slots ascending within one, and cuts them into token tiles. */
struct group_call {
    struct token_count T;
    int32_t top_k, L;
    int32_t tile_rows;                      /* most of a token tile, a multiple of 8 */
    const int32_t *locals;                  /* [T, A] */
    const uint8_t *is_exact;                /* [L] */
    int32_t *ticket;                        /* 0 before and after */
    int32_t *first;                         /* [L] */
    int32_t *counts;                        /* [GROUP_BLOCKS][L] */
    int32_t *row_token;                     /* [R] token of a routed row */
    int32_t *row_map;                       /* [T, A] routed row of a slot; those that are not local stay as they are */
    struct token_tile *tiles, *exact_tiles; /* by the experts' kernel; the latter NULL where no expert is exact */
    int32_t *n_tiles;                       /* [2] */
    int32_t *n_rows;
    int32_t *claims;       /* [2] set to 0, for fp8's GEMMs */
    int64_t *n_rows_copy;  /* NULL = not wanted */
    int64_t *output_rows;  /* [L] of the rows that follow; moves past this chunk's.  NULL = rows lie as they are */
    int64_t *row_output;   /* [R] row of the optional outputs for each routed row */
    int32_t *row_map_copy; /* [T, A] the same by slot; NULL = not wanted */
};
int group_rows(const struct group_call *call, cuda_stream stream);

/* What group_rows does on Hopper where there are many slots (group_cluster.cu). */
int is_grouped_by_cluster(const struct group_call *call);
int group_rows_by_cluster(const struct group_call *call, cuda_stream stream);

/* ---- Routing (route.cu) ----------------------------------------------------------------------------------------- */

/* A layer's routing, as struct router but on the device. */
struct device_router {
    moe4_routing_method method;
    int32_t n_experts, top_k, n_group, topk_group;
    moe4_renormalize renormalize;
    double scale;
    const float *bias;
    const int32_t *table;
    int64_t vocab_size;
};

/* Where ids and weights go, either way they come about. */
struct route_outputs {
    int32_t *ids;          /* [T, A] */
    float *weights;        /* [T, A] */
    int32_t *locals;       /* [T, A] local expert, -1 = not here */
    int32_t *row_map;      /* [T, A] set to -1 */
    int32_t *row_map_copy; /* also; NULL = there is none */
    int32_t *ticket;       /* set to 0, for group_rows */
    int32_t *ids_copy;     /* these three may be NULL */
    float *weights_copy;
    int16_t *replay;
    const int32_t *local_of; /* [E] */
    int32_t n_experts;
    uint64_t *faults; /* [N_FAULTS] */
};

struct route_logits_call {
    struct token_count T;
    const void *logits;
    moe4_dtype dtype;
    int64_t ld;
    const int32_t *token_ids; /* HASH */
    int32_t is_after_x; /* 1 = the kernel before only converts x: not waited for, but it is over when this one is */
    float *logits_copy; /* [T, E] or NULL */
    struct device_router router;
    struct route_outputs out;
    struct group_call group; /* for route_logits_at_once */
};
int route_logits(const struct route_logits_call *call, cuda_stream stream);

struct route_given_call {
    struct token_count T;
    moe4_topk topk;
    int32_t is_after_x; /* as above */
    struct route_outputs out;
    struct group_call group; /* for route_given_at_once */
};
int route_given(const struct route_given_call *call, cuda_stream stream);

/* Whether the tokens are so few that one cluster of blocks routes and groups them: on Hopper these two then do what the
 * two above and group_rows do. */
int is_routed_at_once(int32_t n_tokens, int32_t top_k, const struct device_router *router, int32_t L);
int route_logits_at_once(const struct route_logits_call *call, cuda_stream stream);
int route_given_at_once(const struct route_given_call *call, cuda_stream stream);

/* The router's own GEMM. */
struct router_call {
    struct token_count T;
    const void *x;
    moe4_dtype dtype;
    int64_t ldx, K;
    const float *weight, *bias; /* [E, K], [E] */
    int32_t n_experts;
    float *logits; /* [T, E] */
};
int router_logits(const struct router_call *call, cuda_stream stream);

/* ---- GEMMs (gemm.cu, resident.cu, stream.cu, gemm_mma.cu, exact.cu) ---------------------------------------------- */

/* Once a device: what shared memory the kernels of gemm may use.  Fails where sm_90a's machine code does not run. */
int gemm_configure(void);

/* IDENTITY for the second GEMM.  Blocks that find no work leave at once.  The most rows of a token tile decide which
 * kernel it is: one that keeps x (resident.cu) where resident_stages says that it fits, one of two others else. */
int gemm(const struct gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

int gemm_resident_configure(void);
int gemm_resident(const struct gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* The same on the same GPUs for token tiles of up to STREAM_ROWS rows (stream.cu). */
int gemm_stream_configure(void);
int gemm_stream(const struct stream_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* The same on any GPU from sm_80 on. */
int gemm_mma(const struct gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* The same sums, plainly in double, for weights whose scales are stored raw. */
int gemm_exact(const struct gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* ---- fp8 compute (fp8.cu, fp8_exact.cu, fp8_rows.cu) ------------------------------------------------------------- */

int fp8_configure(void);
int fp8_gate_up(const struct fp8_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);
int fp8_down(const struct fp8_call *call, int32_t n_blocks, cuda_stream stream);

/* The same for token tiles of up to FP8_STREAM_ROWS rows (fp8_stream.cu). */
int fp8_stream_configure(void);
int fp8_stream_gate_up(const struct fp8_stream_call *call, moe4_activation activation, int32_t n_blocks,
                       cuda_stream stream);
int fp8_stream_down(const struct fp8_stream_call *call, int32_t n_blocks, cuda_stream stream);

/* The same for those of up to FP8_NARROW_ROWS rows (fp8_narrow.cu). */
int fp8_narrow_configure(void);
int fp8_narrow_gate_up(const struct fp8_stream_call *call, moe4_activation activation, int32_t n_blocks,
                       cuda_stream stream);
int fp8_narrow_down(const struct fp8_stream_call *call, int32_t n_blocks, cuda_stream stream);

/* The same in plain fp32 for weights whose scales are stored raw. */
int fp8_exact_gate_up(const struct fp8_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);
int fp8_exact_down(const struct fp8_call *call, int32_t n_blocks, cuda_stream stream);

/* Tokens to routed rows, quantised, or as they come; where row_map is NULL to a row each, chunks in their order. */
struct fp8_gather_call {
    struct token_count T;
    int32_t top_k;
    const int32_t *locals, *row_map, *first; /* as grouping left them */
    const void *x;
    moe4_dtype dtype; /* F8_E4M3: codes, with x_scale; else values to quantise */
    int64_t ldx, columns;
    int32_t is_direct; /* bf16 rows, 16-byte aligned, used as they are */
    const float *x_scale;
    int64_t ldx_scale;
    const float *weights; /* [T], NULL = none */
    struct fp8_rows out;
    float *v_scales; /* of the intermediate: the first n_cleared blocks' become 0 */
    int32_t n_cleared;
};
int fp8_gather(const struct fp8_gather_call *call, cuda_stream stream);

/* The intermediate as a caller wants it: codes [rows, columns] and scales [rows, ceil(columns/128)], NULL = not wanted.
 */
struct fp8_copy_call {
    struct fp8_rows from;
    const struct token_tile *token_tiles;
    const int32_t *n_token_tiles;
    int64_t columns;
    const int64_t *row_output; /* where a row goes; NULL = where it is */
    uint8_t *codes;
    float *scales;
};
int fp8_copy(const struct fp8_copy_call *call, cuda_stream stream);

/* ---- Rows (rows.cu) --------------------------------------------------------------------------------------------- */

/* x as dense bf16 rows, times the router's weight where that goes on the input. */
struct convert_call {
    struct token_count T;
    const void *x;
    moe4_dtype dtype;
    int64_t ldx, columns;
    const float *weights; /* [T], NULL = none */
    uint16_t *out;        /* [T, columns] */
};
int convert_rows(const struct convert_call *call, cuda_stream stream);

/* MXFP8 (quantize.cu): rows to what their codes are worth, dense bf16. */
struct quantize_call {
    struct token_count T;
    const int32_t *n_rows; /* NULL = T */
    int64_t max_rows;
    const void *x;
    moe4_dtype dtype; /* F8_E4M3: codes, with x_scale; else values to quantise */
    int64_t ldx, columns;
    const uint8_t *x_scale;
    int64_t ldx_scale;
    const float *weights;      /* [T], NULL = none */
    uint16_t *out;             /* may be x */
    uint8_t *codes, *scales;   /* dense; NULL = not wanted */
    const int64_t *row_output; /* of codes and scales; NULL = the same rows */
};
int quantize_rows(const struct quantize_call *call, cuda_stream stream);

/* The first *n_rows rows of a bf16 matrix. */
struct copy_call {
    const uint16_t *from;
    int64_t ld, columns;
    const int32_t *n_rows;
    uint16_t *to;              /* dense */
    const int64_t *row_output; /* of `to`; NULL = the same rows */
};
int copy_rows(const struct copy_call *call, cuda_stream stream);

/* y from z' and weights, slots in order. */
struct combine_call {
    struct token_count T;
    const uint16_t *z; /* bf16, rows 16-byte aligned */
    int64_t ldz;
    const int32_t *row_map; /* [T, A] */
    const int32_t *ids;     /* [T, A] of HASH routing, else NULL */
    const float *weights;   /* [T, A]; NULL = 1 */
    int32_t top_k;
    int64_t columns;
    void *y;
    moe4_dtype dtype;
    int64_t ldy;
    moe4_write write;
};
int combine_rows(const struct combine_call *call, cuda_stream stream);

/* What a deferred call has left undone (combine.cu): the same sums, then y = round(scale * sum + addend). */
struct deferred_call {
    struct token_count T;
    const uint16_t *z; /* [n_rows, columns] bf16 */
    int64_t n_rows;
    const int32_t *row_map; /* [T, A] */
    const float *weights;   /* [T, A] */
    int32_t top_k;
    int64_t columns;
    float scale;        /* 1 = none */
    const void *addend; /* NULL = none */
    moe4_dtype addend_dtype;
    int64_t ld_addend;
    void *y;
    moe4_dtype dtype;
    int64_t ldy;
    moe4_write write;
    uint64_t *faults; /* [N_FAULTS] */
};
int combine_deferred_rows(const struct deferred_call *call, cuda_stream stream);

#ifdef __cplusplus
}
#endif
#endif
