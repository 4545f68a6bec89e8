/* group: sorts the chunk's routed rows by local expert, and cuts each expert's rows into token tiles. */
#include <stdlib.h>
#include <string.h>

#include "cpu/forward.h"

static int32_t slot_expert(const struct forward *f, int64_t slot)
{
    return layer_local_expert(f->layer, f->ids[f->first_token * f->A + slot]);
}

/* Lists the experts that have rows, and turns counts into the first row of each. */
static void list_active(struct forward *f)
{
    int32_t row = 0;
    f->n_active = 0;
    for (int32_t l = 0; l < f->layer->L; l++) {
        int32_t n = f->counts[l];
        if (n)
            f->active[f->n_active++] =
                (struct active_expert){.l = l, .first_row = row, .n_rows = n, .output_row = f->output_rows[l]};
        f->counts[l] = row;
        f->output_rows[l] += n;
        row += n;
    }
    f->n_rows = row;
}

/* Rows keep the order of their slots within an expert. */
static void place_rows(struct forward *f)
{
    for (int64_t slot = 0; slot < f->n_tokens * f->A; slot++) {
        int32_t l = slot_expert(f, slot);
        f->row_of_slot[slot] = l < 0 ? -1 : f->counts[l]++;
        if (l >= 0) f->slot_of_row[f->row_of_slot[slot]] = (int32_t)slot;
    }
}

static int more_rows_first(const void *a, const void *b)
{
    const struct active_expert *x = a, *y = b;
    if (x->n_rows != y->n_rows) return x->n_rows < y->n_rows ? 1 : -1;
    return x->l < y->l ? -1 : 1;
}

/* Tiles of nearly equal size: 13 rows are 7 + 6, not 12 + 1. */
static void cut_tiles(struct forward *f, struct active_expert *expert)
{
    int32_t n = (expert->n_rows + f->tile_tokens - 1) / f->tile_tokens, row = expert->first_row;
    expert->first_tile = f->n_tiles;
    expert->n_tiles = n;
    for (int32_t i = 0; i < n; i++) {
        int32_t rows = expert->n_rows / n + (i < expert->n_rows % n);
        f->tiles[f->n_tiles++] = (struct tile){row, rows, expert->output_row + row - expert->first_row};
        row += rows;
    }
}

void group_stage(struct forward *f)
{
    memset(f->counts, 0, (size_t)f->layer->L * sizeof *f->counts);
    for (int64_t slot = 0; slot < f->n_tokens * f->A; slot++) {
        int32_t l = slot_expert(f, slot);
        if (l >= 0) f->counts[l]++;
    }
    list_active(f);
    place_rows(f);
    qsort(f->active, (size_t)f->n_active, sizeof *f->active, more_rows_first);
    f->n_tiles = 0;
    for (int32_t i = 0; i < f->n_active; i++) cut_tiles(f, &f->active[i]);
}
