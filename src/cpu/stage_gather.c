/* gather: the rows of x that a token tile needs, as bf16 (in mxfp8 mode what the codes are worth), interleaved as the
 * kernels read them. */
#include <string.h>

#include "base/convert.h"
#include "cpu/forward.h"
#include "cpu/tame.h"

enum {
    RUN = 256,    /* elements converted at a time: whole blocks */
    FEW_ROWS = 16 /* done sooner than another thread wakes up */
};

/* Elements k .. k+n-1 of a token's x that came as MXFP8. */
static void load_quantised_run(const struct forward *f, int64_t token, int64_t k, int64_t n, uint16_t *run)
{
    const moe4_batch *batch = f->call->batch;
    const uint8_t *codes = (const uint8_t *)batch->x + token * batch->ldx + k;
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

static void gather_tile(const struct forward *f, const struct tile *tile)
{
    const int64_t H = f->layer->H;
    const int alone = tile->n_rows == 1; /* nothing to interleave with */
    uint16_t run[RUN], *packed = f->x + tile->first_row * H;
    for (int32_t row = 0; row < tile->n_rows; row++) {
        uint16_t largest = 0;
        int64_t slot = f->slot_of_row[tile->first_row + row];
        for (int64_t k = 0; k < H; k += RUN) {
            int64_t n = H - k < RUN ? H - k : RUN;
            load_run(f, slot, k, n, alone ? packed + k : run);
            uint16_t largest_of_run = f->prepared->rows->largest(alone ? packed + k : run, n);
            if (largest_of_run > largest) largest = largest_of_run;
            for (int64_t pair = 0; !alone && pair < n / 2; pair++)
                memcpy(packed + ((k / 2 + pair) * tile->n_rows + row) * 2, run + 2 * pair, 4);
        }
        f->x_factor[tile->first_row + row] = tame_row(packed, tile->n_rows, row, H, largest);
    }
}

static void gather_tiles(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t i = first; i < last; i++) gather_tile(f, &f->tiles[i]);
}

void gather_stage(struct forward *f)
{
    if (f->n_rows <= FEW_ROWS)
        gather_tiles(f, 0, f->n_tiles, 0);
    else
        stage_run(f, gather_tiles, f->n_tiles, 4);
}
