/* gather: the rows of x that a token tile needs, as bf16 (in mxfp8 mode what the codes are worth, in fp8 mode the
 * codes, whose scale becomes the row's factor) or as int8 with their scales, interleaved as the kernels read them. */
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/fp8.h"
#include "cpu/forward.h"
#include "cpu/int8.h"
#include "cpu/tame.h"

enum {
    RUN = 256,    /* elements converted at a time: whole blocks */
    FEW_ROWS = 16 /* done sooner than another thread wakes up */
};

/* Elements k .. k+n-1 of a token's x that came quantised. */
static void load_quantised_run(const struct forward *f, int64_t token, int64_t k, int64_t n, uint16_t *run)
{
    const moe4_batch *batch = f->call->batch;
    const uint8_t *codes = (const uint8_t *)batch->x + token * batch->ldx + k;
    if (batch->compute == MOE4_COMPUTE_FP8) {
        f->prepared->rows->decode_fp8(codes, n, run);
        return;
    }
    const uint8_t *scales = (const uint8_t *)batch->x_scale + token * batch->ldx_scale + k / BLOCK_SIZE;
    f->prepared->rows->dequantize_mxfp8(codes, scales, n, run);
}

/* Elements k .. k+n-1 of a slot's x as bf16, times the router's weight where that goes on the input. */
static void load_run(const struct forward *f, int64_t slot, int64_t k, int64_t n, uint16_t *run)
{
    const moe4_batch *batch = f->call->batch;
    int64_t token = f->first_token + slot / f->A, first = token * batch->ldx + k;
    if (batch->x_dtype == MOE4_DTYPE_F8_E4M3) {
        load_quantised_run(f, token, k, n, run);
        return;
    }
    if (batch->x_dtype == MOE4_DTYPE_BF16)
        memcpy(run, (const char *)batch->x + first * 2, (size_t)n * 2);
    else
        for (int64_t i = 0; i < n; i++) run[i] = bf16_from_f32(load_f32(batch->x, batch->x_dtype, first + i));
    if (f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT) {
        float weight = f->weights[f->first_token * f->A + slot];
        for (int64_t i = 0; i < n; i++) run[i] = bf16_from_f32(bf16_to_f32(run[i]) * weight);
    }
    if (batch->compute == MOE4_COMPUTE_MXFP8) {
        uint8_t codes[RUN], scales[RUN / BLOCK_SIZE];
        f->prepared->rows->quantize_mxfp8(run, n, codes, scales);
    }
}

/* The scale of a slot's x in fp8 mode: the caller's (one that is not finite counts as NaN), or the row's own. */
static float fp8_row_scale(const struct forward *f, int64_t slot)
{
    const moe4_batch *batch = f->call->batch;
    const int64_t H = f->layer->H;
    uint16_t run[RUN], largest = 0;
    if (batch->x_dtype == MOE4_DTYPE_F8_E4M3) {
        float scale = ((const float *)batch->x_scale)[(f->first_token + slot / f->A) * batch->ldx_scale];
        return isfinite(scale) ? scale : NAN;
    }
    for (int64_t k = 0; k < H; k += RUN) {
        int64_t n = H - k < RUN ? H - k : RUN;
        load_run(f, slot, k, n, run);
        uint16_t largest_of_run = f->prepared->rows->largest(run, n);
        if (largest_of_run > largest) largest = largest_of_run;
    }
    return fp8_scale(bf16_to_f32(largest));
}

/* One row of a tile; returns what its sums must be multiplied by. */
static float gather_row(const struct forward *f, const struct tile *tile, int32_t row)
{
    const struct row_kernels *rows = f->prepared->rows;
    const int64_t H = f->layer->H, slot = f->slot_of_row[tile->first_row + row];
    const int alone = tile->n_rows == 1; /* nothing to interleave with */
    const int is_fp8 = f->call->batch->compute == MOE4_COMPUTE_FP8;
    const float scale = is_fp8 ? fp8_row_scale(f, slot) : 0.0f;
    uint16_t apart[RUN], *packed = f->x + tile->first_row * H, largest = 0;
    uint8_t codes[RUN];
    for (int64_t k = 0; k < H; k += RUN) {
        int64_t n = H - k < RUN ? H - k : RUN;
        uint16_t *run = alone ? packed + k : apart;
        load_run(f, slot, k, n, run);
        if (is_fp8 && f->call->batch->x_dtype != MOE4_DTYPE_F8_E4M3) rows->quantize_fp8(run, n, scale, codes);
        uint16_t largest_of_run = rows->largest(run, n);
        if (largest_of_run > largest) largest = largest_of_run;
        for (int64_t pair = 0; !alone && pair < n / 2; pair++)
            memcpy(packed + ((k / 2 + pair) * tile->n_rows + row) * 2, run + 2 * pair, 4);
    }
    return is_fp8 ? scale : tame_row(packed, tile->n_rows, row, H, largest);
}

static void gather_tile(const struct forward *f, const struct tile *tile)
{
    for (int32_t row = 0; row < tile->n_rows; row++) f->x_factor[tile->first_row + row] = gather_row(f, tile, row);
}

static void gather_tile_int8(const struct forward *f, const struct tile *tile)
{
    const int64_t H = f->layer->H;
    for (int32_t row = 0; row < tile->n_rows; row++) {
        int32_t *packed = int8_tile(f->x, tile->first_row, H);
        for (int64_t k = 0; k < H; k += RUN) {
            int64_t n = H - k < RUN ? H - k : RUN;
            uint16_t run[RUN];
            int8_t codes[RUN];
            float scales[RUN / BLOCK_SIZE];
            load_run(f, f->slot_of_row[tile->first_row + row], k, n, run);
            f->prepared->rows->quantize_int8(run, n, codes, scales);
            packed = int8_pack(codes, scales, n / BLOCK_SIZE, tile->n_rows, row, packed);
        }
        f->x_factor[tile->first_row + row] = 1.0f;
    }
}

static void gather_tiles(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t i = first; i < last; i++)
        if (forward_is_int8(f))
            gather_tile_int8(f, &f->tiles[i]);
        else
            gather_tile(f, &f->tiles[i]);
}

void gather_stage(struct forward *f)
{
    if (f->n_rows <= FEW_ROWS)
        gather_tiles(f, 0, f->n_tiles, 0);
    else
        stage_run(f, gather_tiles, f->n_tiles, 4);
}
