/* What the checks share. */
#ifndef MOE4_REF_CHECK_H
#define MOE4_REF_CHECK_H

#include "ref_internal.h"

/* One more element, with its ratio. */
void ref_verdict_element(ref_verdict *verdict, int64_t row, int64_t column, double got, double low, double high,
                         double ratio);

/* The value of the activation at row j of the columns' last column, and its range. */
double ref_columns_exact(const ref_columns *columns, int32_t l, int64_t j);
ref_range ref_columns_range(const ref_columns *columns, int32_t l, int64_t j, const ref_arithmetic *arithmetic);

#endif
