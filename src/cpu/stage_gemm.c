/* gate_up and down: the two GEMMs with what follows each.  An item is one panel of one active expert; its tiles share
 * the panel while it is in the cache. */
#include <stdatomic.h>
#include <string.h>

#include "cpu/forward.h"
#include "cpu/pool.h"
#include "cpu/tame.h"

enum { READING_ROWS = 4 }; /* routed rows whose arithmetic takes as long as reading a panel, roughly */

static const struct kernel *expert_kernel(const struct prepared *prepared, int32_t l)
{
    return prepared->is_exact[l] ? kernel_exact() : prepared->kernel;
}

/* The most panels that a thread may claim at once.  Long runs stream best, but all threads must finish together: even
 * if all panels of a claim belong to the largest expert, it is at most 1/claim_share of a thread's share. */
static int64_t largest_claim(const struct forward *f, int64_t n_panels)
{
    int64_t total = 0;
    for (int32_t i = 0; i < f->n_active; i++) total += n_panels * (f->active[i].n_rows + READING_ROWS);
    return f->n_active ? total / (f->claim_share * pool_width(f->context->pool) * (f->active[0].n_rows + READING_ROWS))
                       : 0;
}

/* ---- gate_up -------------------------------------------------------------------------------------------------- */

/* Sums of a panel, one row, times its factor plus bias, split into gates and ups in the order of I. */
static void split_gated(const float *sums, float factor, const float *bias, float *gate, float *up)
{
    for (int32_t half = 0; half < 2; half++, sums += 2 * SUBTILE_ROWS, bias += 2 * SUBTILE_ROWS)
        for (int32_t i = 0; i < SUBTILE_ROWS; i++) {
            *gate++ = sums[i] * factor + bias[i];
            *up++ = sums[SUBTILE_ROWS + i] * factor + bias[SUBTILE_ROWS + i];
        }
}

static void add_bias(const float *sums, float factor, const float *bias, float *out)
{
    for (int32_t r = 0; r < PANEL_ROWS; r++) out[r] = sums[r] * factor + bias[r];
}

/* Columns first .. first+n-1 of a tile's intermediate, v [n_rows][stride], to the order in which down reads them. */
static void store_intermediate(const struct forward *f, const struct tile *tile, int64_t first, int64_t n,
                               const uint16_t *v, int64_t stride)
{
    uint16_t *packed = f->intermediate + tile->first_row * f->layer->I + first * tile->n_rows;
    for (int64_t pair = 0; pair < n / 2; pair++)
        for (int32_t row = 0; row < tile->n_rows; row++, packed += 2) memcpy(packed, v + row * stride + 2 * pair, 4);
}

/* What happens to a tile's rounded intermediate, v [n_rows][stride], before down sees it: quantised in mxfp8 mode, and
 * shown to a caller who wants it.  Columns first .. first+n-1 of I. */
static void finish_intermediate(const struct forward *f, int64_t output_row, int32_t n_rows, int64_t first, int64_t n,
                                uint16_t *v, int64_t stride)
{
    const moe4_result *result = f->call->result;
    const int64_t I = f->layer->I;
    const int is_mxfp8 = f->call->batch->compute == MOE4_COMPUTE_MXFP8;
    uint8_t codes[PANEL_ROWS], scales[PANEL_ROWS / BLOCK_SIZE];
    if (!is_mxfp8 && !result->intermediate) return;
    for (int32_t row = 0; row < n_rows; row++, v += stride, output_row++) {
        int64_t at = output_row * I + first;
        if (is_mxfp8) f->prepared->rows->quantize_mxfp8(v, n, codes, scales);
        if (result->intermediate && !is_mxfp8) memcpy((uint16_t *)result->intermediate + at, v, (size_t)n * 2);
        if (result->intermediate && is_mxfp8) memcpy((uint8_t *)result->intermediate + at, codes, (size_t)n);
        if (result->intermediate_scale && is_mxfp8)
            memcpy((uint8_t *)result->intermediate_scale + at / BLOCK_SIZE, scales, (size_t)(n / BLOCK_SIZE));
    }
}

static void gate_up_panel(struct forward *f, const struct active_expert *expert, int64_t panel)
{
    const struct prepared *prepared = f->prepared;
    const struct packed_matrix *matrix = &prepared->gate_up;
    const struct activation_params *params = &f->layer->params[expert->l];
    const float *bias = packed_bias(matrix, expert->l, panel);
    const int gated = matrix->order.order == PANEL_GATED;
    const int64_t columns = gated ? GATED_PANEL_COLUMNS : PANEL_ROWS, first = panel * columns;
    const int64_t n = f->layer->I - first < columns ? f->layer->I - first : columns;
    float sums[TILE_TOKENS * PANEL_ROWS] __attribute__((aligned(64)));
    float gate[TILE_TOKENS * PANEL_ROWS], up[TILE_TOKENS * PANEL_ROWS], v[TILE_TOKENS * PANEL_ROWS];
    uint16_t rounded[TILE_TOKENS * PANEL_ROWS];

    for (int32_t i = 0; i < expert->n_tiles; i++) {
        const struct tile *tile = &f->tiles[expert->first_tile + i];
        expert_kernel(prepared, expert->l)
            ->gemm_tile(packed_panel(matrix, expert->l, panel), matrix->K / BLOCK_SIZE,
                        f->x + tile->first_row * matrix->K, tile->n_rows, sums);
        const float *factor = f->x_factor + tile->first_row;
        for (int32_t row = 0; row < tile->n_rows; row++)
            if (gated)
                split_gated(sums + row * PANEL_ROWS, factor[row], bias, gate + row * columns, up + row * columns);
            else
                add_bias(sums + row * PANEL_ROWS, factor[row], bias, up + row * columns);
        prepared->activate(gate, up, tile->n_rows * columns, params, v);
        prepared->round(v, tile->n_rows * columns, rounded);
        finish_intermediate(f, expert->output_row + tile->first_row - expert->first_row, tile->n_rows, first, n,
                            rounded, columns);
        for (int32_t row = 0; row < tile->n_rows; row++)
            if (tame_is_wild(prepared->rows->largest(rounded + row * columns, columns)))
                atomic_store_explicit(&f->has_wild, 1, memory_order_relaxed);
        store_intermediate(f, tile, first, n, rounded, columns);
    }
}

static void gate_up_panels(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    int64_t n_panels = f->prepared->gate_up.n_panels;
    for (int64_t i = first; i < last; i++) gate_up_panel(f, &f->active[i / n_panels], i % n_panels);
}

static void tame_tiles(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    const int64_t I = f->layer->I;
    for (int64_t i = first; i < last; i++) {
        const struct tile *tile = &f->tiles[i];
        uint16_t *packed = f->intermediate + tile->first_row * I;
        for (int32_t row = 0; row < tile->n_rows; row++)
            f->intermediate_factor[tile->first_row + row] =
                tame_row(packed, tile->n_rows, row, I, tame_largest(packed, tile->n_rows, row, I));
    }
}

void gate_up_stage(struct forward *f)
{
    atomic_store_explicit(&f->has_wild, 0, memory_order_relaxed);
    for (int64_t row = 0; row < f->n_rows; row++) f->intermediate_factor[row] = 1.0f;
    stage_run(f, gate_up_panels, f->n_active * f->prepared->gate_up.n_panels,
              largest_claim(f, f->prepared->gate_up.n_panels));
    if (atomic_load_explicit(&f->has_wild, memory_order_relaxed)) stage_run(f, tame_tiles, f->n_tiles, 1);
}

/* ---- down
 * ------------------------------------------------------------------------------------------------------------- */

/* Panels of the down matrix that reach into y. */
static int64_t down_panels_wanted(const struct forward *f)
{
    return (f->layer->output_size + PANEL_ROWS - 1) / PANEL_ROWS;
}

static void down_panel(struct forward *f, const struct active_expert *expert, int64_t panel)
{
    const struct prepared *prepared = f->prepared;
    const struct packed_matrix *matrix = &prepared->down;
    const float *bias = packed_bias(matrix, expert->l, panel);
    const int64_t width = f->layer->output_size, first = panel * PANEL_ROWS;
    const int64_t n = width - first < PANEL_ROWS ? width - first : PANEL_ROWS;
    float sums[TILE_TOKENS * PANEL_ROWS] __attribute__((aligned(64))), biased[PANEL_ROWS];

    for (int32_t i = 0; i < expert->n_tiles; i++) {
        const struct tile *tile = &f->tiles[expert->first_tile + i];
        expert_kernel(prepared, expert->l)
            ->gemm_tile(packed_panel(matrix, expert->l, panel), matrix->K / BLOCK_SIZE,
                        f->intermediate + tile->first_row * matrix->K, tile->n_rows, sums);
        for (int32_t row = 0; row < tile->n_rows; row++) {
            add_bias(sums + row * PANEL_ROWS, f->intermediate_factor[tile->first_row + row], bias, biased);
            prepared->round(biased, n, f->z + (tile->first_row + row) * width + first);
        }
    }
}

static void down_panels(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    int64_t n_panels = down_panels_wanted(f);
    for (int64_t i = first; i < last; i++) down_panel(f, &f->active[i / n_panels], i % n_panels);
}

void down_stage(struct forward *f)
{
    stage_run(f, down_panels, f->n_active * down_panels_wanted(f), largest_claim(f, down_panels_wanted(f)));
}
