/* Sizes that cannot wrap: each returns 0 and leaves *result alone when the true value does not fit. */
#ifndef MOE4_BASE_CHECKED_H
#define MOE4_BASE_CHECKED_H

#include <stddef.h>
#include <stdint.h>

static inline int size_add(size_t a, size_t b, size_t *result)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return 0;
    *result = sum;
    return 1;
}

static inline int size_multiply(size_t a, size_t b, size_t *result)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) return 0;
    *result = product;
    return 1;
}

static inline int i64_multiply(int64_t a, int64_t b, int64_t *result)
{
    int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) return 0;
    *result = product;
    return 1;
}

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static inline int64_t round_up(int64_t a, int64_t multiple)
{
    return ceil_div(a, multiple) * multiple;
}

#endif
