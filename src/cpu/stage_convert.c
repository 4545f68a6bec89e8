/* convert: each token's x, once, to what its rows are made of: bf16, in mxfp8 mode what the codes are worth, in fp8
 * mode the codes, whose scale becomes the row's factor. */
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/fp8.h"
#include "cpu/forward.h"

enum {
    RUN = 256,     /* elements converted at a time: whole blocks */
    FEW_TOKENS = 4 /* done sooner than another thread wakes up */
};

static int is_weighted(const struct forward *f)
{
    return f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
}

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

/* Elements k .. k+n-1 of a slot's x as bf16, times the router's weight where that goes on the input, in fp8 mode not
 * yet quantised. */
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
    if (is_weighted(f)) {
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

/* A slot's x to what a row of it holds, [H]; returns the scale that its sums must be multiplied by. */
static float convert_row(const struct forward *f, int64_t slot, uint16_t *row)
{
    const moe4_batch *batch = f->call->batch;
    const int64_t H = f->layer->H;
    const int is_fp8 = batch->compute == MOE4_COMPUTE_FP8, is_given = batch->x_dtype == MOE4_DTYPE_F8_E4M3;
    const float scale = is_fp8 ? fp8_row_scale(f, slot) : 1.0f;
    uint8_t codes[RUN];
    for (int64_t k = 0; k < H; k += RUN) {
        int64_t n = H - k < RUN ? H - k : RUN;
        load_run(f, slot, k, n, row + k);
        if (is_fp8 && !is_given) f->prepared->rows->quantize_fp8(row + k, n, scale, codes);
    }
    return scale;
}

static void convert_tokens(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t t = first; t < last; t++)
        f->converted_scale[t] = convert_row(f, t * f->A, f->converted + t * f->layer->H);
}

const uint16_t *converted_row(const struct forward *f, int64_t slot, uint16_t *room, float *scale)
{
    const int64_t t = slot / f->A, H = f->layer->H;
    *scale = 1.0f;
    switch (f->rows_from) {
    case ROWS_AS_GIVEN: return (const uint16_t *)f->call->batch->x + (f->first_token + t) * f->call->batch->ldx;
    case ROWS_BY_TOKEN: *scale = f->converted_scale[t]; return f->converted + t * H;
    default: *scale = convert_row(f, slot, room); return room;
    }
}

void convert_stage(struct forward *f)
{
    const moe4_batch *batch = f->call->batch;
    const int is_ready =
        batch->x_dtype == MOE4_DTYPE_BF16 && batch->compute != MOE4_COMPUTE_MXFP8 && batch->compute != MOE4_COMPUTE_FP8;
    f->rows_from = is_weighted(f) ? ROWS_BY_SLOT : is_ready ? ROWS_AS_GIVEN : ROWS_BY_TOKEN;
    if (f->rows_from != ROWS_BY_TOKEN) return;
    if (f->n_tokens <= FEW_TOKENS)
        convert_tokens(f, 0, f->n_tokens, 0);
    else
        stage_run(f, convert_tokens, f->n_tokens, 8);
}
