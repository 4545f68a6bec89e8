/* Whole arrays against each other: relative Frobenius errors. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "ref_internal.h"

/* Sums of squares of the error and of what was expected. */
typedef struct squares {
    double error, expected;
} squares;

static squares element_squares(double got, double expected)
{
    if (got == expected || (isnan(got) && isnan(expected)))
        return (squares){0, isfinite(expected) ? expected * expected : 0};
    if (!isfinite(got) || !isfinite(expected)) return (squares){INFINITY, 0};
    return (squares){(got - expected) * (got - expected), expected * expected};
}

static void squares_add(squares *sum, squares part)
{
    sum->error += part.error;
    sum->expected += part.expected;
}

static double relative_error(squares sum)
{
    if (sum.error == 0) return 0;
    double ratio = sqrt(sum.error) / sqrt(sum.expected);
    return ratio < DBL_MAX ? ratio : DBL_MAX;
}

static void keep_worst(squares sum, int64_t index, double *worst, int64_t *worst_index)
{
    double error = relative_error(sum);
    if (*worst_index >= 0 && error <= *worst) return;
    *worst = error;
    *worst_index = index;
}

void ref_compare(const double *got, const double *expected, int64_t rows, int64_t columns, ref_frobenius *result)
{
    squares *by_column = ref_allocate(columns, sizeof *by_column), all = {0, 0};
    *result = (ref_frobenius){0, 0, 0, -1, -1};
    for (int64_t r = 0; r < rows; r++) {
        squares row = {0, 0};
        for (int64_t c = 0; c < columns; c++) {
            squares element = element_squares(got[r * columns + c], expected[r * columns + c]);
            squares_add(&row, element);
            squares_add(&by_column[c], element);
        }
        squares_add(&all, row);
        keep_worst(row, r, &result->worst_row, &result->worst_row_index);
    }
    for (int64_t c = 0; c < columns && rows; c++)
        keep_worst(by_column[c], c, &result->worst_column, &result->worst_column_index);
    result->overall = relative_error(all);
    free(by_column);
}

int ref_close(const ref_frobenius *frobenius, ref_mode mode)
{
    if (mode == REF_MODE_UNROUNDED) return frobenius->overall <= 3.7e-3;
    return frobenius->overall <= 2e-3 && frobenius->worst_row <= 6e-3 && frobenius->worst_column <= 6e-3;
}
