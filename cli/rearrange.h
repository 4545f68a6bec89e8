/* The rows of gate and up in whatever order a layer's config names. */
#ifndef MOE4_CLI_REARRANGE_H
#define MOE4_CLI_REARRANGE_H

#include "moe4/io.h"
#include "storage.h"

/* Where the rows of one projection lie in its matrix: first, first + step, ... */
struct row_place {
    int64_t first, step, count;
};
struct row_place row_place(const moe4_layer_config *config, enum projection_role role);

/* The matrix of a projection. */
const moe4_matrix *projection_matrix(const moe4_expert *expert, enum projection_role role);

/* Gathers these rows of codes, scales or bias (part 0, 1, 2) into rows to_first, to_first + to_step, ... of `to`. */
void rows_gather(const moe4_matrix *matrix, enum matrix_part part, int64_t K, struct row_place from, int64_t to_first,
                 int64_t to_step, char *to);

/* Those rows where they are, if that is as rows_gather with to_first 0 would have them; otherwise NULL.  Rows of
 * another projection between them are those of UP behind GATE's. */
const char *rows_in_place(const moe4_matrix *matrix, enum matrix_part part, int64_t K, struct row_place from,
                          int64_t to_step);

/* Bytes of one row of a part. */
int64_t row_bytes(const moe4_matrix *matrix, enum matrix_part part, int64_t K);

#endif
