/* The stages of a forward call that move and convert rows (rows.cu, quantize.cu). */
#include "cuda/forward_state.h"

const void *x_of(const struct cuda_forward *f)
{
    return row_at(f->batch->x, f->first_token, f->batch->ldx, f->batch->x_dtype);
}

const float *input_weights(const struct cuda_forward *f)
{
    return f->weights_on_input ? f->weights + f->first_slot : NULL;
}

int is_mxfp8(const struct cuda_forward *f)
{
    return f->batch->compute == MOE4_COMPUTE_MXFP8;
}

int is_bf16(const struct cuda_forward *f)
{
    return f->batch->x_dtype == MOE4_DTYPE_BF16 && !f->weights_on_input && f->batch->ldx % 8 == 0 &&
           (uintptr_t)f->batch->x % 16 == 0;
}

int is_direct(const struct cuda_forward *f)
{
    return !is_mxfp8(f) && is_bf16(f);
}

static int quantize_x(const struct cuda_forward *f)
{
    const struct quantize_call call = {
        .T = f->T,
        .max_rows = f->T.n_tokens,
        .x = x_of(f),
        .dtype = f->batch->x_dtype,
        .ldx = f->batch->ldx,
        .columns = f->layer->H,
        .x_scale = row_at(f->batch->x_scale, f->first_token, f->batch->ldx_scale, MOE4_DTYPE_E8M0),
        .ldx_scale = f->batch->ldx_scale,
        .weights = input_weights(f),
        .out = f->converted};
    return quantize_rows(&call, f->stream);
}

/* Whether gate/up stores v' as its codes are worth, and nobody wants the codes. */
int is_quantized_at_once(const struct cuda_forward *f)
{
    return is_mxfp8(f) && f->is_streamed && !f->prepared->n_exact && !f->result->intermediate &&
           !f->result->intermediate_scale;
}

/* v' in mxfp8 compute, in place. */
int rows_quantize_stage(const struct cuda_forward *f)
{
    if (!is_mxfp8(f) || is_quantized_at_once(f)) return 0;
    const struct quantize_call call = {.T = f->T,
                                       .n_rows = f->numbers + N_ROWS,
                                       .max_rows = (int64_t)f->T.n_tokens * f->A,
                                       .x = f->intermediate,
                                       .dtype = MOE4_DTYPE_BF16,
                                       .ldx = f->layer->I,
                                       .columns = f->layer->I,
                                       .out = f->intermediate,
                                       .codes = f->result->intermediate,
                                       .scales = f->result->intermediate_scale,
                                       .row_output = f->row_output};
    return quantize_rows(&call, f->stream);
}

int rows_convert_stage(const struct cuda_forward *f)
{
    if (f->prepared->is_fp8) return fp8_gather_stage(f);
    if (is_mxfp8(f)) return quantize_x(f);
    if (is_direct(f)) return 0;
    const struct convert_call call = {.T = f->T,
                                      .x = x_of(f),
                                      .dtype = f->batch->x_dtype,
                                      .ldx = f->batch->ldx,
                                      .columns = f->layer->H,
                                      .weights = input_weights(f),
                                      .out = f->converted};
    return convert_rows(&call, f->stream);
}

int rows_output_stage(const struct cuda_forward *f)
{
    const struct copy_call copies[] = {
        {f->intermediate, f->layer->I, f->layer->I, f->numbers + N_ROWS,
         f->batch->compute == MOE4_COMPUTE_BF16 ? f->result->intermediate : NULL, f->row_output},
        {f->z, f->plan.ldz, f->layer->output_size, f->numbers + N_ROWS, f->result->gemm2_rows, f->row_output},
    };
    int error = f->prepared->is_fp8 ? fp8_output_stage(f) : 0;
    for (int i = 0; !error && i < 2; i++)
        if (copies[i].to) error = copy_rows(&copies[i], f->stream);
    return error;
}

int rows_combine_stage(const struct cuda_forward *f)
{
    if (!f->result->y) return 0;
    const int has_unknown = f->prepared->router.method == MOE4_ROUTING_HASH && !f->call->topk;
    const struct combine_call call = {
        .T = f->T,
        .z = f->z,
        .ldz = f->plan.ldz,
        .row_map = f->row_map + f->first_slot,
        .ids = has_unknown ? f->ids + f->first_slot : NULL,
        .weights = f->weights_on_input ? NULL : f->weights + f->first_slot,
        .top_k = f->A,
        .columns = f->layer->output_size,
        .y = (void *)row_at(f->result->y, f->first_token, f->result->ldy, f->result->y_dtype),
        .dtype = f->result->y_dtype,
        .ldy = f->result->ldy,
        .write = f->result->write};
    return combine_rows(&call, f->stream);
}
