#include "timing.h"

#include <stdlib.h>

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double quantile(double *values, int64_t n, double fraction)
{
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    double place = fraction * (double)(n - 1);
    int64_t below = (int64_t)place, above = below + 1 < n ? below + 1 : below;
    return values[below] + (place - (double)below) * (values[above] - values[below]);
}
