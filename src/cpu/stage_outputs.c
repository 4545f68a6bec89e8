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
    if (result->gemm2_rows)
        memcpy(result->gemm2_rows + expert->output_row * width, f->z + expert->first_row * width,
               (size_t)(expert->n_rows * width) * sizeof *f->z);
    if (!result->row_map) return;
    int32_t *map = result->row_map + f->first_token * f->A;
    for (int32_t i = 0; i < expert->n_rows; i++)
        map[f->slot_of_row[expert->first_row + i]] = (int32_t)(expert->output_row + i);
}

void stage_outputs_copy(struct forward *f)
{
    const moe4_result *result = f->call->result;
    if (!result->gemm2_rows && !result->row_map) return;
    if (result->row_map)
        for (int64_t slot = 0; slot < f->n_tokens * f->A; slot++)
            if (f->row_of_slot[slot] < 0) result->row_map[f->first_token * f->A + slot] = -1;
    for (int32_t i = 0; i < f->n_active; i++) copy_expert(f, &f->active[i]);
}
