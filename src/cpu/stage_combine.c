/* combine: each token's z' rows, weighted, in slot order.  A token without local experts gets zeros. */
#include "cpu/combine.h"
#include "cpu/forward.h"

static void combine_chunk(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    const moe4_result *result = f->call->result;
    const int on_input = f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
    const size_t y_bytes = result->y_dtype == MOE4_DTYPE_F32 ? 4 : 2;
    const struct combine c = {.rows = f->prepared->rows,
                              .round = f->prepared->round,
                              .z = f->z,
                              .width = f->layer->output_size,
                              .row_map = f->row_of_slot,
                              .weights = on_input ? NULL : f->weights + f->first_token * f->A,
                              .A = f->A,
                              .scale = 1.0f,
                              .y = (char *)result->y + (size_t)(f->first_token * result->ldy) * y_bytes,
                              .y_dtype = result->y_dtype,
                              .ldy = result->ldy,
                              .write = result->write};
    combine_tokens(&c, first, last);
}

void combine_stage(struct forward *f)
{
    stage_run(f, combine_chunk, f->n_tokens, 8);
}
