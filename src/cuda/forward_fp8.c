/* The stages of fp8 compute: x quantised into routed rows, both GEMMs on fp8 tensor cores, and in plain fp32 for the
 * experts whose scales e5m2 does not hold. */
#include "base/checked.h"
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

/* The most rows of token tiles for experts of up to so many rows on average; which kernel takes them follows. */
static const struct tile_choice {
    int32_t rows, mean;
} choices[] = {{8, 5}, {16, 10}, {24, 17}, {FP8_NARROW_ROWS, 64}};

/* Whether x fits into shared memory; and x of experts for the exact kernel would be missing. */
static int can_stream(const struct cuda_forward *f, int32_t rows)
{
    return !f->prepared->n_exact && rows <= FP8_STREAM_ROWS && fp8_stream_buffers(f->prepared->gate_up.n_steps, rows) &&
           fp8_stream_buffers(f->prepared->down.n_steps, rows);
}

static int32_t choose_rows(const struct cuda_forward *f)
{
    const int32_t mean = mean_rows(f);
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (mean <= choices[i].mean && (choices[i].rows > FP8_STREAM_ROWS || can_stream(f, choices[i].rows)))
            return choices[i].rows;
    return FP8_MAX_ROWS;
}

void fp8_choose_kernels(struct cuda_forward *f, int32_t tuned)
{
    const int32_t rows = tuned ? tuned : choose_rows(f);
    f->tile_rows = rows < FP8_MAX_ROWS ? rows : FP8_MAX_ROWS;
    f->is_streamed = can_stream(f, rows);
}

/* Whether rows may be those of bf16 compute, which leave nothing of the intermediate that a caller could have. */
int fp8_leaves_bf16(const struct cuda_forward *f)
{
    return f->is_streamed && f->tile_rows == STREAM_ROWS && is_direct(f) && !f->result->intermediate &&
           !f->result->intermediate_scale;
}

/* So few rows that another kernel, which quantises x, would cost more than it spares. */
int fp8_quantises_late(const struct cuda_forward *f)
{
    return fp8_leaves_bf16(f) && mean_rows(f) <= 1;
}

int fp8_takes_tokens(const struct cuda_forward *f)
{
    return f->is_streamed && !fp8_quantises_late(f);
}

static int few_gate_up(const struct cuda_forward *f)
{
    const struct cuda_matrix *matrix = &f->prepared->gate_up, *next = &f->prepared->down;
    struct fp8_stream_call call = {.stream = {.gemm = gemm_call_of(f, matrix),
                                              .next_weights = next->packed,
                                              .next_tiles = next->n_tiles,
                                              .next_steps = next->n_steps},
                                   .tile_base = matrix->tile_base,
                                   .x = f->x_rows,
                                   .v = f->v_rows};
    call.is_bf16 = fp8_quantises_late(f);
    call.stream.gemm.x = x_of(f);
    call.stream.gemm.ldx = f->batch->ldx;
    call.stream.gemm.out = call.is_bf16 ? f->intermediate : f->z;
    call.stream.gemm.ldout = f->layer->I;
    call.stream.gemm.row_source = f->row_token;
    call.stream.gemm.columns = (int32_t)f->layer->I;
    call.stream.gemm.tiles_are_old = !f->is_streamed; /* rows were gathered since */
    return (f->is_streamed ? fp8_stream_gate_up : fp8_narrow_gate_up)(&call, f->layer->activation,
                                                                      block_count(f, matrix->n_tiles), f->stream);
}

static int few_down(const struct cuda_forward *f)
{
    const struct cuda_matrix *matrix = &f->prepared->down;
    struct fp8_stream_call call = {
        .stream = {.gemm = gemm_call_of(f, matrix)}, .tile_base = matrix->tile_base, .x = f->v_rows};
    call.is_bf16 = fp8_quantises_late(f);
    call.stream.gemm.x = f->intermediate;
    call.stream.gemm.ldx = f->layer->I;
    call.stream.gemm.tiles_are_old = 1;
    call.stream.gemm.out = f->z;
    call.stream.gemm.ldout = f->plan.ldz;
    call.stream.gemm.columns = (int32_t)f->layer->output_size;
    return (f->is_streamed ? fp8_stream_down : fp8_narrow_down)(&call, block_count(f, matrix->n_tiles), f->stream);
}

/* ---- Many -------------------------------------------------------------------------------------------------------- */

int fp8_gather_stage(const struct cuda_forward *f)
{
    if (fp8_quantises_late(f)) return 0;
    const moe4_batch *batch = f->batch;
    const struct fp8_gather_call call = {.T = f->T,
                                         .top_k = f->A,
                                         .locals = f->locals + f->first_slot,
                                         .row_map = f->is_streamed ? NULL : f->row_map + f->first_slot,
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
                                         .out = f->x_rows,
                                         .v_scales = f->v_rows.scales,
                                         .n_cleared = f->is_streamed ? (int32_t)ceil_div(f->layer->I, FP8_BLOCK) : 0};
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

static void take_exact_tiles(const struct cuda_forward *f, struct fp8_call *call)
{
    call->token_tiles = f->exact_tiles;
    call->n_token_tiles = f->numbers + N_EXACT_TILES;
}

static int takes_few(const struct cuda_forward *f)
{
    return f->tile_rows <= FP8_NARROW_ROWS;
}

int fp8_gate_up_stage(const struct cuda_forward *f)
{
    struct fp8_call call = call_of(f, &f->prepared->gate_up);
    const int32_t n_blocks = block_count(f, f->prepared->gate_up.n_tiles);
    call.x = f->x_rows;
    call.v = f->v_rows;
    call.columns = (int32_t)f->layer->I;
    call.claims = f->numbers + N_CLAIMS;
    int error = takes_few(f) ? few_gate_up(f) : fp8_gate_up(&call, f->layer->activation, n_blocks, f->stream);
    if (error || !f->prepared->n_exact) return error;
    take_exact_tiles(f, &call);
    return fp8_exact_gate_up(&call, f->layer->activation, 16 * n_blocks, f->stream);
}

int fp8_down_stage(const struct cuda_forward *f)
{
    struct fp8_call call = call_of(f, &f->prepared->down);
    const int32_t n_blocks = block_count(f, f->prepared->down.n_tiles);
    call.x = f->v_rows;
    call.out = f->z;
    call.ldout = f->plan.ldz;
    call.columns = (int32_t)f->layer->output_size;
    call.claims = f->numbers + N_DOWN_CLAIMS;
    int error = takes_few(f) ? few_down(f) : fp8_down(&call, n_blocks, f->stream);
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
