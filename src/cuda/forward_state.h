/* What the stages of a forward call share (forward.h). */
#ifndef MOE4_CUDA_FORWARD_STATE_H
#define MOE4_CUDA_FORWARD_STATE_H

#include "cuda/forward.h"
#include "cuda/prepared.h"

struct cuda_forward {
    struct moe4_context *context;
    const struct moe4_layer *layer;
    const struct cuda_prepared *prepared;
    const struct forward_call *call;
    const moe4_batch *batch;
    const moe4_result *result;
    struct cuda_workspace_plan plan;
    int32_t A;
    int weights_on_input;
    int is_chunked;
    int is_routed_at_once, is_streamed; /* by route_.._at_once, by gemm_stream or fp8_stream_.. */
    int is_few;                         /* by gemm_one or gemm_few */
    int is_x_first;                     /* x is converted while routing runs */
    int32_t tile_rows;                  /* most of a token tile */
    cuda_stream stream;

    struct token_count T; /* the chunk's */
    int64_t first_token, first_slot;

    int32_t *ids, *locals, *row_map; /* of all tokens */
    float *weights;
    int32_t *first, *counts, *row_token, *numbers; /* of a chunk, as the rest */
    float *logits;
    struct token_tile *tiles, *exact_tiles;
    uint16_t *converted, *intermediate, *z;
    struct fp8_rows x_rows, v_rows;    /* fp8 compute */
    int64_t *output_rows, *row_output; /* NULL = the chunk's rows lie in the optional outputs as they are */
};

/* The stages that fp8 compute has of its own (forward_fp8.c). */
void fp8_place(struct cuda_forward *f);
void fp8_choose_kernels(struct cuda_forward *f, int32_t tuned); /* tuned: rows of token tiles, 0 = by rule */
int fp8_leaves_bf16(const struct cuda_forward *f);              /* rows may be those of bf16 compute */
int fp8_quantises_late(const struct cuda_forward *f);           /* rows are those */
int fp8_takes_tokens(const struct cuda_forward *f);             /* x quantised, a row a token */
int fp8_gather_stage(const struct cuda_forward *f);
int fp8_gate_up_stage(const struct cuda_forward *f);
int fp8_down_stage(const struct cuda_forward *f);
int fp8_output_stage(const struct cuda_forward *f);

/* Those that move and convert rows (forward_rows.c). */
int rows_convert_stage(const struct cuda_forward *f);
int rows_quantize_stage(const struct cuda_forward *f);
int rows_output_stage(const struct cuda_forward *f);
int rows_combine_stage(const struct cuda_forward *f);

int is_mxfp8(const struct cuda_forward *f);
/* Whether gate/up stores v' as its codes are worth, and nobody wants the codes. */
int is_quantized_at_once(const struct cuda_forward *f);

/* Row `row` of an array of the caller's, NULL if there is none. */
const void *row_at(const void *array, int64_t row, int64_t ld, moe4_dtype dtype);

/* The chunk's x as the caller has it. */
const void *x_of(const struct cuda_forward *f);

/* Whether x is bf16 in rows of whole 16 bytes, and whether a GEMM can gather it as it is. */
int is_bf16(const struct cuda_forward *f);
int is_direct(const struct cuda_forward *f);

/* A GEMM of all of a matrix on the chunk's token tiles; what it reads and writes is left to fill in. */
struct gemm_call gemm_call_of(const struct cuda_forward *f, const struct cuda_matrix *matrix);

/* Blocks of a GEMM of so many weight tiles: one a multiprocessor, no more than it can have items. */
int32_t block_count(const struct cuda_forward *f, int32_t n_tiles);

/* An expert's rows on average, rounded up. */
int32_t mean_rows(const struct cuda_forward *f);

/* The chunk's router weights where they go on the input, else NULL. */
const float *input_weights(const struct cuda_forward *f);

#endif
