/* The weighted sum of a token's routed rows: the last stage of forward, and all of moe4_combine. */
#ifndef MOE4_CPU_COMBINE_H
#define MOE4_CPU_COMBINE_H

#include <stdint.h>

#include "cpu/kernels/rows.h"
#include "moe4/moe4.h"

struct combine {
    const struct row_kernels *rows;
    void (*round)(const float *v, int64_t n, uint16_t *rounded);
    const uint16_t *z; /* routed rows, bf16, ldz elements apart */
    int64_t ldz;
    int64_t z_column;       /* the column of y that a row of z begins with */
    int64_t width;          /* columns of y */
    const int32_t *row_map; /* [tokens, A] into z, -1 = none */
    const float *weights;   /* [tokens, A]; NULL = 1 */
    int32_t A;
    float scale;        /* 1 = none */
    const void *addend; /* NULL = none */
    moe4_dtype addend_dtype;
    int64_t ld_addend;
    void *y; /* row t of y, addend, row_map and weights belong together */
    moe4_dtype y_dtype;
    int64_t ldy;
    moe4_write write;
};

/* Columns first .. first+n-1 of y[t] = round(scale * sum + addend[t]). */
enum { COMBINE_COLUMNS = 512 }; /* the largest n: sums that stay in the cache */
void combine_columns(const struct combine *c, int64_t t, int64_t first, int64_t n);

/* All columns of tokens first .. last-1. */
void combine_tokens(const struct combine *c, int64_t first, int64_t last);

/* All of a deferred call, by the context's threads.  MOE4_EINVAL, with y untouched, for a bad entry of the row map. */
moe4_status combine_deferred(struct moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);

#endif
