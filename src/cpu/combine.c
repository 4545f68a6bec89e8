#include "cpu/combine.h"

#include <stdatomic.h>
#include <string.h>

#include "base/convert.h"
#include "context.h"
#include "cpu/activation.h"
#include "cpu/pool.h"

enum { TOKENS_A_CLAIM = 8 };

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

void combine_columns(const struct combine *c, int64_t t, int64_t first, int64_t n)
{
    float sum[COMBINE_COLUMNS];
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int32_t a = 0; a < c->A; a++) {
        int64_t row = c->row_map[t * c->A + a];
        if (row < 0) continue;
        c->rows->combine(sum, c->z + row * c->ldz + first - c->z_column, c->weights ? c->weights[t * c->A + a] : 1.0f,
                         n);
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
        for (int64_t i = 0; i < c->width; i += COMBINE_COLUMNS)
            combine_columns(c, t, i, c->width - i < COMBINE_COLUMNS ? c->width - i : COMBINE_COLUMNS);
}

/* ---- moe4_combine ----------------------------------------------------------------------------------------------- */

struct combine_job {
    struct combine combine;
    int64_t n_tokens;
    _Atomic int64_t next;
};

static void combine_worker(void *argument, int32_t worker)
{
    (void)worker;
    struct combine_job *job = argument;
    for (;;) {
        int64_t first = atomic_fetch_add_explicit(&job->next, TOKENS_A_CLAIM, memory_order_relaxed);
        if (first >= job->n_tokens) return;
        int64_t left = job->n_tokens - first;
        combine_tokens(&job->combine, first, first + (left < TOKENS_A_CLAIM ? left : TOKENS_A_CLAIM));
    }
}

moe4_status combine_deferred(struct moe4_context *context, const moe4_deferred *d, const moe4_result *result)
{
    for (int64_t i = 0; i < d->n_tokens * d->top_k; i++)
        if (d->row_map[i] < -1 || d->row_map[i] >= d->n_rows)
            return context_fail(context, MOE4_EINVAL, "row_map[%lld] is %d, expected -1 to %lld", (long long)i,
                                d->row_map[i], (long long)d->n_rows - 1);
    struct combine_job job = {.combine = {.rows = row_kernels_for(context->isa),
                                          .round = activation_kernels_for(context->isa)->round,
                                          .z = d->gemm2_rows,
                                          .ldz = d->output_size,
                                          .width = d->output_size,
                                          .row_map = d->row_map,
                                          .weights = d->weights,
                                          .A = d->top_k,
                                          .scale = d->scale == 0.0f ? 1.0f : d->scale,
                                          .addend = d->addend,
                                          .addend_dtype = d->addend_dtype,
                                          .ld_addend = d->ld_addend,
                                          .y = result->y,
                                          .y_dtype = result->y_dtype,
                                          .ldy = result->ldy,
                                          .write = result->write},
                              .n_tokens = d->n_tokens};
    pool_run(context->pool, combine_worker, &job);
    return MOE4_OK;
}
