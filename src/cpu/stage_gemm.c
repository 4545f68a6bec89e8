/* gate_up and down: the two GEMMs with what follows each.  An item is one panel of one active expert; its tiles share
 * the panel while it is in the cache. */
#include <stdatomic.h>
#include <string.h>

#include "base/convert.h"
#include "base/fp8.h"
#include "cpu/forward.h"
#include "cpu/int8.h"
#include "cpu/panels.h"
#include "cpu/tame.h"

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
    const uint16_t *rows[LARGE_TILE_TOKENS];
    for (int32_t row = 0; row < tile->n_rows; row++) rows[row] = v + row * stride;
    gather_runs(rows, tile->n_rows, n, tile->run,
                f->intermediate + tile->first_row * f->layer->I + first * tile->n_rows);
}

/* What happens to a tile's rounded intermediate, v [n_rows][stride], before down sees it: quantised in mxfp8 mode, and
 * shown to a caller who wants it.  Columns first .. first+n-1 of I.  (A group of fp8 mode spans several panels, so
 * quantize_tiles does that when all are there.) */
static void finish_intermediate(const struct forward *f, const struct tile *tile, int64_t first, int64_t n, uint16_t *v,
                                int64_t stride)
{
    const moe4_result *result = f->call->result;
    const int64_t I = f->layer->I;
    const int is_mxfp8 = f->call->batch->compute == MOE4_COMPUTE_MXFP8;
    uint8_t codes[PANEL_ROWS], scales[PANEL_ROWS / BLOCK_SIZE];
    if (f->call->batch->compute == MOE4_COMPUTE_FP8 || (!is_mxfp8 && !result->intermediate)) return;
    for (int32_t row = 0; row < tile->n_rows; row++, v += stride) {
        int64_t at = (tile->output_row + row) * I + first;
        if (is_mxfp8) f->prepared->rows->quantize_mxfp8(v, n, codes, scales);
        if (result->intermediate && !is_mxfp8) memcpy((uint16_t *)result->intermediate + at, v, (size_t)n * 2);
        if (result->intermediate && is_mxfp8) memcpy((uint8_t *)result->intermediate + at, codes, (size_t)n);
        if (result->intermediate_scale && is_mxfp8)
            memcpy((uint8_t *)result->intermediate_scale + at / BLOCK_SIZE, scales, (size_t)(n / BLOCK_SIZE));
    }
}

/* The same in int8 compute, whose down kernel reads the codes themselves. */
static void finish_int8(const struct forward *f, const struct tile *tile, int64_t first, int64_t n, const uint16_t *v,
                        int64_t stride)
{
    const moe4_result *result = f->call->result;
    const int64_t I = f->layer->I, first_block = first / BLOCK_SIZE, n_blocks = n / BLOCK_SIZE;
    int32_t *packed = int8_tile(f->intermediate, tile->first_row, I) + first_block * INT8_BLOCK_WORDS * tile->n_rows;
    int8_t codes[PANEL_ROWS];
    float scales[PANEL_ROWS / BLOCK_SIZE];
    for (int32_t row = 0; row < tile->n_rows; row++, v += stride) {
        const int64_t output_row = tile->output_row + row;
        f->prepared->rows->quantize_int8(v, n, codes, scales);
        int8_pack(codes, scales, n_blocks, tile->n_rows, row, packed);
        if (result->intermediate) memcpy((int8_t *)result->intermediate + output_row * I + first, codes, (size_t)n);
        if (result->intermediate_scale)
            memcpy((float *)result->intermediate_scale + output_row * (I / BLOCK_SIZE) + first_block, scales,
                   (size_t)n_blocks * sizeof *scales);
    }
}

/* What becomes of a tile's sums of a panel [n_rows][PANEL_ROWS]. */
static void gate_up_tile(struct forward *f, const struct active_expert *expert, int64_t panel, const struct tile *tile,
                         const float *sums)
{
    const struct prepared *prepared = f->prepared;
    const float *bias = packed_bias(&prepared->gate_up, expert->l, panel), *factor = f->x_factor + tile->first_row;
    const int gated = prepared->gate_up.order.order == PANEL_GATED;
    const int64_t columns = gated ? GATED_PANEL_COLUMNS : PANEL_ROWS, first = panel * columns;
    const int64_t n = f->layer->I - first < columns ? f->layer->I - first : columns;
    uint16_t rounded[LARGE_TILE_TOKENS * PANEL_ROWS];

    for (int32_t row = 0; row < tile->n_rows; row++, sums += PANEL_ROWS) {
        float gate[PANEL_ROWS], up[PANEL_ROWS], v[PANEL_ROWS];
        if (gated)
            split_gated(sums, factor[row], bias, gate, up);
        else
            add_bias(sums, factor[row], bias, up);
        prepared->activate(gate, up, columns, &f->layer->params[expert->l], v);
        prepared->round(v, columns, rounded + row * columns);
    }
    if (forward_is_int8(f)) {
        finish_int8(f, tile, first, n, rounded, columns);
        return;
    }
    finish_intermediate(f, tile, first, n, rounded, columns);
    for (int32_t row = 0; row < tile->n_rows; row++)
        if (tame_is_wild(prepared->rows->largest(rounded + row * columns, columns)))
            atomic_store_explicit(&f->has_wild, 1, memory_order_relaxed);
    store_intermediate(f, tile, first, n, rounded, columns);
}

static void gate_up_panel(struct forward *f, struct panel_place place, struct panel_reader *reader)
{
    const struct packed_matrix *matrix = &f->prepared->gate_up;
    const struct active_expert *expert = place.expert;
    float sums[LARGE_TILE_TOKENS * PANEL_ROWS] __attribute__((aligned(64)));
    const struct kernel *kernel = forward_x_kernel(f, expert);
    gather_expert(f, expert, reader->worker);
    for (int32_t i = 0; i < expert->n_tiles; i++) {
        const struct tile *tile = &f->tiles[expert->first_tile + i];
        if (i == expert->n_tiles - 1) panels_look_ahead(reader);
        const uint16_t *x = f->x + tile->first_row * matrix->K;
        if (kernel->convert) x = (const uint16_t *)(const void *)forward_operand(f, kernel, tile, matrix->K, 0);
        kernel->gemm_tile(packed_panel(matrix, expert->l, place.panel), matrix->K / BLOCK_SIZE, x, tile->n_rows, sums,
                          &reader->ahead);
        gate_up_tile(f, expert, place.panel, tile, sums);
    }
}

static void tame_tiles(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    const int64_t I = f->layer->I;
    for (int64_t i = first; i < last; i++) {
        const struct tile *tile = &f->tiles[i];
        uint16_t *packed = f->intermediate + tile->first_row * I;
        for (int32_t row = 0; row < tile->n_rows; row++)
            f->intermediate_factor[tile->first_row + row] = tame_row(
                packed, tile->n_rows, tile->run, row, I, tame_largest(packed, tile->n_rows, tile->run, row, I));
    }
}

/* fp8 mode: columns first .. first+n-1 of a row, one group, become codes, and their scale its factor. */
static void quantize_group(struct forward *f, const struct tile *tile, int32_t row, int64_t first, int64_t n)
{
    const struct row_kernels *rows = f->prepared->rows;
    const moe4_result *result = f->call->result;
    const int64_t I = f->layer->I, group = first / FP8_GROUP, output_row = tile->output_row + row;
    const int32_t run = tile->run;
    uint16_t v[FP8_GROUP], *packed = f->intermediate + tile->first_row * I + first * tile->n_rows + row * run;
    uint8_t codes[FP8_GROUP];
    for (int64_t k = 0; k < n; k += run) memcpy(v + k, packed + k * tile->n_rows, (size_t)run * 2);
    float scale = fp8_scale(bf16_to_f32(rows->largest(v, n)));
    rows->quantize_fp8(v, n, scale, codes);
    for (int64_t k = 0; k < n; k += run) memcpy(packed + k * tile->n_rows, v + k, (size_t)run * 2);
    f->intermediate_factor[(tile->first_row + row) * f->n_groups + group] = scale;
    if (result->intermediate) memcpy((uint8_t *)result->intermediate + output_row * I + first, codes, (size_t)n);
    if (result->intermediate_scale) ((float *)result->intermediate_scale)[output_row * f->n_groups + group] = scale;
}

static void quantize_tiles(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    const int64_t I = f->layer->I;
    for (int64_t i = first; i < last; i++)
        for (int32_t row = 0; row < f->tiles[i].n_rows; row++)
            for (int64_t k = 0; k < I; k += FP8_GROUP)
                quantize_group(f, &f->tiles[i], row, k, I - k < FP8_GROUP ? I - k : FP8_GROUP);
}

void gate_up_stage(struct forward *f)
{
    atomic_store_explicit(&f->has_wild, 0, memory_order_relaxed);
    gather_begin(f);
    panels_run(f, gate_up_panel, &f->prepared->gate_up, f->prepared->gate_up.n_panels);
    if (f->call->batch->compute == MOE4_COMPUTE_FP8) {
        stage_run(f, quantize_tiles, f->n_tiles, 1);
        return;
    }
    for (int64_t row = 0; row < f->n_rows; row++) f->intermediate_factor[row] = 1.0f;
    if (atomic_load_explicit(&f->has_wild, memory_order_relaxed)) stage_run(f, tame_tiles, f->n_tiles, 1);
}

/* ---- down -------------------------------------------------------------------------------------------------------- */

/* A tile's intermediate from k on, as the kernel reads it. */
static const uint16_t *intermediate_from(const struct forward *f, const struct kernel *kernel, const struct tile *tile,
                                         int64_t k)
{
    const int64_t I = f->layer->I;
    return kernel->convert ? (const uint16_t *)(const void *)forward_operand(f, kernel, tile, I, k)
                           : f->intermediate + tile->first_row * I + k * tile->n_rows;
}

/* total [n_rows][PANEL_ROWS]: a tile's sums of each group of k, times its factor, added in ascending order. */
static void down_tile(const struct forward *f, const struct active_expert *expert, const struct tile *tile,
                      int64_t panel, struct read_ahead *ahead, float *total)
{
    const struct packed_matrix *matrix = &f->prepared->down;
    const uint8_t *weights = packed_panel(matrix, expert->l, panel);
    const struct kernel *kernel = forward_kernel(f, expert);
    float sums[LARGE_TILE_TOKENS * PANEL_ROWS] __attribute__((aligned(64)));
    for (int64_t group = 0; group < f->n_groups; group++) {
        const int64_t k = group * f->group_size, left = matrix->K - k;
        const float *factor = f->intermediate_factor + tile->first_row * f->n_groups + group;
        kernel->gemm_tile(weights + k / BLOCK_SIZE * PANEL_BLOCK_BYTES,
                          (left < f->group_size ? left : f->group_size) / BLOCK_SIZE,
                          intermediate_from(f, kernel, tile, k), tile->n_rows, sums, ahead);
        for (int32_t row = 0; row < tile->n_rows; row++)
            for (int32_t r = row * PANEL_ROWS; r < (row + 1) * PANEL_ROWS; r++) {
                float scaled = sums[r] * factor[row * f->n_groups];
                total[r] = group ? total[r] + scaled : scaled;
            }
    }
}

static void down_panel(struct forward *f, struct panel_place place, struct panel_reader *reader)
{
    const struct prepared *prepared = f->prepared;
    const struct active_expert *expert = place.expert;
    const float *bias = packed_bias(&prepared->down, expert->l, place.panel);
    const int64_t width = f->layer->output_size, first = place.panel * PANEL_ROWS;
    const int64_t n = width - first < PANEL_ROWS ? width - first : PANEL_ROWS;
    float total[LARGE_TILE_TOKENS * PANEL_ROWS], biased[PANEL_ROWS];

    gather_intermediate(f, expert, reader->worker);
    for (int32_t i = 0; i < expert->n_tiles; i++) {
        const struct tile *tile = &f->tiles[expert->first_tile + i];
        if (i == expert->n_tiles - 1) panels_look_ahead(reader);
        down_tile(f, expert, tile, place.panel, &reader->ahead, total);
        for (int32_t row = 0; row < tile->n_rows; row++) {
            add_bias(total + row * PANEL_ROWS, 1.0f, bias, biased);
            prepared->round(biased, n, forward_z(f, place.panel, tile->first_row + row));
        }
    }
    combine_multiplied(f, place.panel);
}

void down_stage(struct forward *f)
{
    const int64_t n_panels = (f->layer->output_size + PANEL_ROWS - 1) / PANEL_ROWS; /* that reach into y */
    gather_begin(f);
    combine_begin(f, n_panels);
    panels_run(f, down_panel, &f->prepared->down, n_panels);
}
