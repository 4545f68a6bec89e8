/* group: sorts the chunk's routed rows by local expert, and cuts each expert's rows into token tiles. */
#include <string.h>

#include "cpu/forward.h"

enum { GROUP_SLOTS = 2048 /* counted and placed by one thread: fewer are done sooner than another wakes up */ };

int64_t group_blocks(int64_t slots)
{
    return (slots + GROUP_SLOTS - 1) / GROUP_SLOTS;
}

static int32_t slot_expert(const struct forward *f, int64_t slot)
{
    return layer_local_expert(f->layer, f->ids[f->first_token * f->A + slot]);
}

static int64_t n_slots(const struct forward *f)
{
    return f->n_tokens * f->A;
}

/* Rows of each expert, of every block of slots. */
static void count_blocks(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t block = first; block < last; block++) {
        int32_t *counts = f->counts + block * f->layer->L;
        int64_t slot = block * GROUP_SLOTS, end = slot + GROUP_SLOTS < n_slots(f) ? slot + GROUP_SLOTS : n_slots(f);
        memset(counts, 0, (size_t)f->layer->L * sizeof *counts);
        for (; slot < end; slot++) {
            int32_t l = slot_expert(f, slot);
            if (l >= 0) counts[l]++;
        }
    }
}

/* Lists the experts that have rows, and turns counts into the first row of each expert and block. */
static void list_active(struct forward *f, int64_t n_blocks)
{
    int32_t row = 0;
    f->n_active = 0;
    for (int32_t l = 0; l < f->layer->L; l++) {
        int32_t first_row = row;
        for (int64_t block = 0; block < n_blocks; block++) {
            int32_t *count = &f->counts[block * f->layer->L + l], n = *count;
            *count = row;
            row += n;
        }
        if (row > first_row)
            f->active[f->n_active++] = (struct active_expert){
                .l = l, .first_row = first_row, .n_rows = row - first_row, .output_row = f->output_rows[l]};
        f->output_rows[l] += row - first_row;
    }
    f->n_rows = row;
}

/* Rows keep the order of their slots within an expert. */
static void place_blocks(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t block = first; block < last; block++) {
        int32_t *next_row = f->counts + block * f->layer->L;
        int64_t slot = block * GROUP_SLOTS, end = slot + GROUP_SLOTS < n_slots(f) ? slot + GROUP_SLOTS : n_slots(f);
        for (; slot < end; slot++) {
            int32_t l = slot_expert(f, slot);
            f->row_of_slot[slot] = l < 0 ? -1 : next_row[l]++;
            if (l >= 0) f->slot_of_row[f->row_of_slot[slot]] = (int32_t)slot;
        }
    }
}

static int comes_first(const struct active_expert *x, const struct active_expert *y)
{
    return x->n_rows != y->n_rows ? x->n_rows > y->n_rows : x->l < y->l;
}

/* Most rows first, by Shell's sort: qsort may allocate. */
static void sort_active(struct forward *f)
{
    static const int32_t gaps[] = {3501, 1750, 701, 301, 132, 57, 23, 10, 4, 1};
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++)
        for (int32_t i = gaps[g]; i < f->n_active; i++) {
            struct active_expert expert = f->active[i];
            int32_t at = i;
            for (; at >= gaps[g] && comes_first(&expert, &f->active[at - gaps[g]]); at -= gaps[g])
                f->active[at] = f->active[at - gaps[g]];
            f->active[at] = expert;
        }
}

/* Tiles of nearly equal size: 13 rows are 7 + 6, not 12 + 1.  Where rows cost by grains, as few of these as can be: 40
 * are 32 + 8, not 20 + 20. */
static void cut_tiles(struct forward *f, struct active_expert *expert)
{
    const struct kernel *kernel = forward_kernel(f, expert);
    const int32_t grain = kernel->grain ? kernel->grain : 1;
    int32_t row = expert->first_row, left = expert->n_rows;
    expert->first_tile = f->n_tiles;
    expert->n_tiles = (left + f->tile_tokens - 1) / f->tile_tokens;
    for (int32_t n = expert->n_tiles; n > 0; n--) {
        int32_t rows = ((left + n - 1) / n + grain - 1) / grain * grain;
        if (rows > f->tile_tokens) rows = f->tile_tokens;
        if (rows > left) rows = left;
        f->tiles[f->n_tiles++] = (struct tile){row, rows, kernel->run, expert->output_row + row - expert->first_row};
        row += rows;
        left -= rows;
    }
}

void group_stage(struct forward *f)
{
    const int64_t n_blocks = group_blocks(n_slots(f));
    stage_run(f, count_blocks, n_blocks, 1);
    list_active(f, n_blocks);
    stage_run(f, place_blocks, n_blocks, 1);
    sort_active(f);
    f->n_tiles = 0;
    for (int32_t i = 0; i < f->n_active; i++) cut_tiles(f, &f->active[i]);
}
