/* The optional outputs that show the stages: routed rows of the whole batch, local experts ascending, whatever the
 * chunks were.  A chunk's rows of an expert follow those of the chunks before. */
#include <string.h>

#include "cpu/forward.h"

static int wanted(const moe4_result *result)
{
    return result->intermediate || result->gemm2_rows || result->row_map || result->n_rows;
}

void stage_outputs_begin(struct forward *f)
{
    if (!wanted(f->call->result)) return;
    memset(f->total_counts, 0, (size_t)f->layer->L * sizeof *f->total_counts);
    for (int64_t slot = 0; slot < f->T * f->A; slot++) {
        int32_t l = layer_local_expert(f->layer, f->ids[slot]);
        if (l >= 0) f->total_counts[l]++;
    }
    int64_t row = 0;
    for (int32_t l = 0; l < f->layer->L; l++) {
        int64_t n = f->total_counts[l];
        f->total_counts[l] = row;
        row += n;
    }
    if (f->call->result->n_rows) *f->call->result->n_rows = row;
}

/* A tile's row of the packed intermediate. */
static void unpack_row(const struct forward *f, const struct tile *tile, int32_t row, uint16_t *out)
{
    const uint16_t *packed = f->intermediate + tile->first_row * f->layer->I + row * 2;
    for (int64_t i = 0; i < f->layer->I; i += 2, packed += tile->n_rows * 2) memcpy(out + i, packed, 4);
}

static void copy_expert(struct forward *f, const struct active_expert *expert)
{
    const moe4_result *result = f->call->result;
    const int64_t I = f->layer->I, width = f->layer->output_size;
    const int64_t shift = f->total_counts[expert->l] - expert->first_row; /* from the chunk's rows to the batch's */
    for (int32_t i = 0; i < expert->n_tiles; i++) {
        const struct tile *tile = &f->tiles[expert->first_tile + i];
        for (int32_t row = 0; row < tile->n_rows; row++) {
            int64_t from = tile->first_row + row, to = from + shift;
            if (result->intermediate) unpack_row(f, tile, row, (uint16_t *)result->intermediate + to * I);
            if (result->gemm2_rows)
                memcpy(result->gemm2_rows + to * width, f->z + from * width, (size_t)width * sizeof *f->z);
            if (result->row_map) result->row_map[f->first_token * f->A + f->slot_of_row[from]] = (int32_t)to;
        }
    }
    f->total_counts[expert->l] += expert->n_rows;
}

void stage_outputs_copy(struct forward *f)
{
    const moe4_result *result = f->call->result;
    if (!wanted(result)) return;
    if (result->row_map)
        for (int64_t slot = 0; slot < f->n_tokens * f->A; slot++)
            if (f->row_of_slot[slot] < 0) result->row_map[f->first_token * f->A + slot] = -1;
    for (int32_t i = 0; i < f->n_active; i++) copy_expert(f, &f->active[i]);
}
