/* combine: each token's z' rows, weighted, in slot order.  A token without local experts gets zeros.  A panel of
 * columns is combined by the thread that multiplies its last expert, while others still multiply other panels. */
#include <stdatomic.h>

#include "cpu/combine.h"
#include "cpu/forward.h"

static void combine_panel(const struct forward *f, int64_t panel)
{
    const moe4_result *result = f->call->result;
    const int on_input = f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
    const size_t y_bytes = result->y_dtype == MOE4_DTYPE_F32 ? 4 : 2;
    const int64_t first = panel * PANEL_ROWS, left = f->layer->output_size - first;
    const struct combine c = {.rows = f->prepared->rows,
                              .round = f->prepared->round,
                              .z = forward_z(f, panel, 0),
                              .ldz = PANEL_ROWS,
                              .z_column = first,
                              .width = f->layer->output_size,
                              .row_map = f->row_of_slot,
                              .weights = on_input ? NULL : f->weights + f->first_token * f->A,
                              .A = f->A,
                              .scale = 1.0f,
                              .y = (char *)result->y + (size_t)(f->first_token * result->ldy) * y_bytes,
                              .y_dtype = result->y_dtype,
                              .ldy = result->ldy,
                              .write = result->write};
    for (int64_t t = 0; t < f->n_tokens; t++) combine_columns(&c, t, first, left < PANEL_ROWS ? left : PANEL_ROWS);
}

static void combine_panels(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t panel = first; panel < last; panel++) combine_panel(f, panel);
}

void combine_begin(struct forward *f, int64_t n_panels)
{
    for (int64_t i = 0; i < n_panels; i++)
        atomic_store_explicit(&f->experts_left[i], f->n_active, memory_order_relaxed);
    if (f->n_active == 0 && f->call->result->y) stage_run(f, combine_panels, n_panels, 1);
}

void combine_multiplied(struct forward *f, int64_t panel)
{
    int32_t left = atomic_fetch_sub_explicit(&f->experts_left[panel], 1, memory_order_acq_rel);
    if (left == 1 && f->call->result->y) combine_panel(f, panel);
}
