/* The stages of fp8 compute: x quantised into routed rows, both GEMMs on fp8 tensor cores, and in plain fp32 for the
 * experts whose scales e5m2 does not hold. */
#include "cuda/forward_state.h"

void fp8_place(struct cuda_forward *f)
{
    char *workspace = f->batch->workspace;
    const int64_t rows = f->plan.chunk_tokens * f->A;
    f->x_rows = (struct fp8_rows){(uint8_t *)(workspace + f->plan.x), (float *)(workspace + f->plan.x_scales), rows};
    f->v_rows =
        (struct fp8_rows){(uint8_t *)(workspace + f->plan.intermediate), (float *)(workspace + f->plan.v_scales), rows};
}

/* ---- Few rows an expert ------------------------------------------------------------------------------------------ */

/* The streaming GEMMs take x as it comes and leave nothing of the intermediate that a caller could have. */
static int can_stream(const struct cuda_forward *f)
{
    return is_direct(f) && !f->prepared->n_exact && !f->result->intermediate && !f->result->intermediate_scale &&
           f->plan.chunk_tokens * f->A <= (int64_t)f->layer->L * FP8_STREAM_MOST &&
           fp8_stream_buffers(f->prepared->gate_up.n_steps) && fp8_stream_buffers(f->prepared->down.n_steps);
}

void fp8_choose_kernels(struct cuda_forward *f, int32_t tuned)
{
    const int has_few_rows = f->plan.chunk_tokens * f->A <= (int64_t)f->layer->L * 5;
    f->is_streamed = can_stream(f) && (tuned ? tuned == STREAM_ROWS : has_few_rows);
    f->tile_rows = f->is_streamed ? STREAM_ROWS : tuned && tuned < FP8_MAX_ROWS ? tuned : FP8_MAX_ROWS;
}

static int32_t stream_block_count(const struct cuda_forward *f, const struct cuda_matrix *matrix)
{
    const int64_t items = f->plan.max_tiles * matrix->n_tiles;
    return items < f->prepared->n_multiprocessors ? (int32_t)items : f->prepared->n_multiprocessors;
}

static int stream_gate_up(const struct cuda_forward *f)
{
    const struct cuda_matrix *matrix = &f->prepared->gate_up, *next = &f->prepared->down;
    struct gemm_call gemm = gemm_call_of(f, matrix);
    gemm.x = x_of(f);
    gemm.ldx = f->batch->ldx;
    gemm.row_source = f->row_token;
    gemm.out = f->intermediate;
    gemm.ldout = f->layer->I;
    gemm.columns = (int32_t)f->layer->I;
    const struct fp8_stream_call call = {.stream = {.gemm = gemm,
                                                    .next_weights = next->packed,
                                                    .next_tiles = next->n_tiles,
                                                    .next_steps = next->n_steps},
                                         .tile_base = matrix->tile_base};
    return fp8_stream_gate_up(&call, f->layer->activation, stream_block_count(f, matrix), f->stream);
}

static int stream_down(const struct cuda_forward *f)
{
    const struct cuda_matrix *matrix = &f->prepared->down;
    struct gemm_call gemm = gemm_call_of(f, matrix);
    gemm.x = f->intermediate;
    gemm.ldx = f->layer->I;
    gemm.tiles_are_old = 1;
    gemm.out = f->z;
    gemm.ldout = f->plan.ldz;
    gemm.columns = (int32_t)f->layer->output_size;
    const struct fp8_stream_call call = {.stream = {.gemm = gemm}, .tile_base = matrix->tile_base};
    return fp8_stream_down(&call, stream_block_count(f, matrix), f->stream);
}

/* ---- Many -------------------------------------------------------------------------------------------------------- */

int fp8_gather_stage(const struct cuda_forward *f)
{
    const moe4_batch *batch = f->batch;
    const struct fp8_gather_call call = {.T = f->T,
                                         .top_k = f->A,
                                         .locals = f->locals + f->first_slot,
                                         .row_map = f->row_map + f->first_slot,
                                         .first = f->first,
                                         .x = x_of(f),
                                         .dtype = batch->x_dtype,
                                         .ldx = batch->ldx,
                                         .columns = f->layer->H,
                                         .is_direct = is_direct(f),
                                         .x_scale =
                                             row_at(batch->x_scale, f->first_token, batch->ldx_scale, MOE4_DTYPE_F32),
                                         .ldx_scale = batch->ldx_scale,
                                         .weights = input_weights(f),
                                         .out = f->x_rows};
    return fp8_gather(&call, f->stream);
}

/* Both kernels read what the kernel before them wrote, but token tiles are older than that. */
static struct fp8_call call_of(const struct cuda_forward *f, const struct cuda_matrix *matrix)
{
    return (struct fp8_call){.weights = matrix->packed,
                             .tile_base = matrix->tile_base,
                             .bias = matrix->bias,
                             .unit = matrix->unit,
                             .params = f->prepared->params,
                             .n_tiles = matrix->n_tiles,
                             .n_steps = matrix->n_steps,
                             .token_tiles = f->tiles,
                             .n_token_tiles = f->numbers + N_TILES,
                             .tiles_are_old = 1};
}

static int32_t block_count(const struct cuda_forward *f, const struct fp8_call *call)
{
    const int64_t items = f->plan.max_tiles * call->n_tiles;
    return items < f->prepared->n_multiprocessors ? (int32_t)items : f->prepared->n_multiprocessors;
}

static void take_exact_tiles(const struct cuda_forward *f, struct fp8_call *call)
{
    call->token_tiles = f->exact_tiles;
    call->n_token_tiles = f->numbers + N_EXACT_TILES;
}

int fp8_gate_up_stage(const struct cuda_forward *f)
{
    if (f->is_streamed) return stream_gate_up(f);
    struct fp8_call call = call_of(f, &f->prepared->gate_up);
    const int32_t n_blocks = block_count(f, &call);
    call.x = f->x_rows;
    call.v = f->v_rows;
    call.columns = (int32_t)f->layer->I;
    int error = fp8_gate_up(&call, f->layer->activation, n_blocks, f->stream);
    if (error || !f->prepared->n_exact) return error;
    take_exact_tiles(f, &call);
    return fp8_exact_gate_up(&call, f->layer->activation, 16 * n_blocks, f->stream);
}

int fp8_down_stage(const struct cuda_forward *f)
{
    if (f->is_streamed) return stream_down(f);
    struct fp8_call call = call_of(f, &f->prepared->down);
    const int32_t n_blocks = block_count(f, &call);
    call.x = f->v_rows;
    call.out = f->z;
    call.ldout = f->plan.ldz;
    call.columns = (int32_t)f->layer->output_size;
    int error = fp8_down(&call, n_blocks, f->stream);
    if (error || !f->prepared->n_exact) return error;
    take_exact_tiles(f, &call);
    return fp8_exact_down(&call, 16 * n_blocks, f->stream);
}

int fp8_output_stage(const struct cuda_forward *f)
{
    struct fp8_copy_call call = {.from = f->v_rows,
                                 .token_tiles = f->tiles,
                                 .n_token_tiles = f->numbers + N_TILES,
                                 .columns = f->layer->I,
                                 .row_output = f->row_output,
                                 .codes = f->result->intermediate,
                                 .scales = f->result->intermediate_scale};
    if (!call.codes && !call.scales) return 0;
    int error = fp8_copy(&call, f->stream);
    if (error || !f->prepared->n_exact) return error;
    call.token_tiles = f->exact_tiles;
    call.n_token_tiles = f->numbers + N_EXACT_TILES;
    return fp8_copy(&call, f->stream);
}
