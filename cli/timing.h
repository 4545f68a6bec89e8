/* Repeated measurements. */
#ifndef MOE4_CLI_TIMING_H
#define MOE4_CLI_TIMING_H

#include <stdint.h>

/* The value below which `fraction` of the n values lie, interpolated; 0.5 = the median.  Sorts them. */
double quantile(double *values, int64_t n, double fraction);

#endif
