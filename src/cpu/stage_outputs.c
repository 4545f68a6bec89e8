/* The optional outputs that show the stages. */
#include <string.h>

#include "cpu/forward.h"

void stage_outputs_begin(struct forward *f)
{
    memset(f->output_rows, 0, (size_t)f->layer->L * sizeof *f->output_rows);
    for (int64_t slot = 0; slot < f->T * f->A; slot++) {
        int32_t l = layer_local_expert(f->layer, f->ids[slot]);
        if (l >= 0) f->output_rows[l]++;
    }
    int64_t row = 0;
    for (int32_t l = 0; l < f->layer->L; l++) {
        int64_t n = f->output_rows[l];
        f->output_rows[l] = row;
        row += n;
    }
    if (f->call->result->n_rows) *f->call->result->n_rows = row;
}

static void copy_expert(struct forward *f, const struct active_expert *expert)
{
    const moe4_result *result = f->call->result;
    const int64_t width = f->layer->output_size;
    for (int32_t i = 0; result->gemm2_rows && i < expert->n_rows; i++)
        for (int64_t k = 0; k < width; k += PANEL_ROWS)
            memcpy(result->gemm2_rows + (expert->output_row + i) * width + k,
                   forward_z(f, k / PANEL_ROWS, expert->first_row + i),
                   (size_t)(width - k < PANEL_ROWS ? width - k : PANEL_ROWS) * sizeof *f->z);
    if (!result->row_map) return;
    int32_t *map = result->row_map + f->first_token * f->A;
    for (int32_t i = 0; i < expert->n_rows; i++)
        map[f->slot_of_row[expert->first_row + i]] = (int32_t)(expert->output_row + i);
}

static void copy_experts(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t i = first; i < last; i++) copy_expert(f, &f->active[i]);
}

void stage_outputs_copy(struct forward *f)
{
    const moe4_result *result = f->call->result;
    if (!result->gemm2_rows && !result->row_map) return;
    if (result->row_map)
        for (int64_t slot = 0; slot < f->n_tokens * f->A; slot++)
            if (f->row_of_slot[slot] < 0) result->row_map[f->first_token * f->A + slot] = -1;
    stage_run(f, copy_experts, f->n_active, 1);
}
