#include "cpu/combine.h"

#include <string.h>

#include "base/convert.h"

enum { RUN = 512 }; /* columns whose sums stay in the cache */

/* y[index ..] = sum, or round(y + sum), in the caller's format. */
static void store_run(const struct combine *c, int64_t index, const float *sum, int64_t n)
{
    if (c->y_dtype == MOE4_DTYPE_BF16 && c->write == MOE4_WRITE_OVERWRITE) {
        c->round(sum, n, (uint16_t *)c->y + index);
        return;
    }
    for (int64_t i = 0; i < n; i++, index++) {
        float value = c->write == MOE4_WRITE_ADD ? load_f32(c->y, c->y_dtype, index) + sum[i] : sum[i];
        uint16_t half = c->y_dtype == MOE4_DTYPE_F16 ? f16_from_f32(value) : bf16_from_f32(value);
        if (c->y_dtype == MOE4_DTYPE_F32)
            memcpy((char *)c->y + index * 4, &value, 4);
        else
            memcpy((char *)c->y + index * 2, &half, 2);
    }
}

/* Columns first .. first+n-1 of a token. */
static void combine_run(const struct combine *c, int64_t t, int64_t first, int64_t n)
{
    float sum[RUN] = {0};
    for (int32_t a = 0; a < c->A; a++) {
        int64_t row = c->row_map[t * c->A + a];
        if (row < 0) continue;
        c->rows->combine(sum, c->z + row * c->width + first, c->weights ? c->weights[t * c->A + a] : 1.0f, n);
    }
    if (c->scale != 1.0f)
        for (int64_t i = 0; i < n; i++) sum[i] *= c->scale;
    if (c->addend)
        for (int64_t i = 0; i < n; i++) sum[i] += load_f32(c->addend, c->addend_dtype, t * c->ld_addend + first + i);
    store_run(c, t * c->ldy + first, sum, n);
}

void combine_tokens(const struct combine *c, int64_t first, int64_t last)
{
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < c->width; i += RUN) combine_run(c, t, i, c->width - i < RUN ? c->width - i : RUN);
}
