/* combine: each token's z' rows, weighted, in slot order.  A token without local experts gets zeros. */
#include <string.h>

#include "base/convert.h"
#include "cpu/forward.h"

enum { RUN = 512 }; /* columns whose sums stay in the cache */

/* y[0..n-1] = sum, or round(y + sum), in the caller's format. */
static void store_run(const moe4_result *result, int64_t index, const float *sum, int64_t n)
{
    for (int64_t i = 0; i < n; i++, index++) {
        float value = sum[i];
        if (result->write == MOE4_WRITE_ADD) value = load_f32(result->y, result->y_dtype, index) + value;
        uint16_t half = result->y_dtype == MOE4_DTYPE_F16 ? f16_from_f32(value) : bf16_from_f32(value);
        if (result->y_dtype == MOE4_DTYPE_F32)
            memcpy((char *)result->y + index * 4, &value, 4);
        else
            memcpy((char *)result->y + index * 2, &half, 2);
    }
}

static void combine_token(struct forward *f, int64_t t)
{
    const moe4_result *result = f->call->result;
    const int64_t width = f->layer->output_size, token = f->first_token + t;
    const int on_input = f->call->topk && f->call->topk->weight_use == MOE4_WEIGHT_ON_INPUT;
    const int plain = result->y_dtype == MOE4_DTYPE_BF16 && result->write == MOE4_WRITE_OVERWRITE;
    float sum[RUN];
    for (int64_t first = 0; first < width; first += RUN) {
        int64_t n = width - first < RUN ? width - first : RUN;
        memset(sum, 0, sizeof sum);
        for (int32_t a = 0; a < f->A; a++) {
            int64_t row = f->row_of_slot[t * f->A + a];
            if (row < 0) continue;
            float weight = on_input ? 1.0f : f->weights[token * f->A + a];
            f->prepared->rows->combine(sum, f->z + row * width + first, weight, n);
        }
        int64_t index = token * result->ldy + first;
        if (plain)
            f->prepared->round(sum, n, (uint16_t *)result->y + index);
        else
            store_run(result, index, sum, n);
    }
}

static void combine_tokens(struct forward *f, int64_t first, int64_t last, int32_t worker)
{
    (void)worker;
    for (int64_t t = first; t < last; t++) combine_token(f, t);
}

void combine_stage(struct forward *f)
{
    stage_run(f, combine_tokens, f->n_tokens, 8);
}
