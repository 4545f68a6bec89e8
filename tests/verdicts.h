/* Expectations on the oracle's verdicts. */
#ifndef MOE4_TEST_VERDICTS_H
#define MOE4_TEST_VERDICTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ref.h"

/* Looked at n elements and found each inside its bound. */
static inline void passes(const ref_verdict *verdict, int64_t n)
{
    if (verdict->n_checked == n && verdict->n_outside == 0 && verdict->worst_ratio <= 1) return;
    fail_msg("%lld of %lld outside, worst ratio %g at (%lld, %lld): got %g, expected %g..%g",
             (long long)verdict->n_outside, (long long)verdict->n_checked, verdict->worst_ratio,
             (long long)verdict->worst_row, (long long)verdict->worst_column, verdict->worst_got, verdict->worst_low,
             verdict->worst_high);
}

/* Found one element outside, this one. */
static inline void fails_at(const ref_verdict *verdict, int64_t row, int64_t column)
{
    if (verdict->n_outside == 1 && verdict->worst_ratio > 1 && verdict->worst_row == row &&
        verdict->worst_column == column)
        return;
    fail_msg("%lld outside, worst ratio %g at (%lld, %lld); expected one at (%lld, %lld)",
             (long long)verdict->n_outside, verdict->worst_ratio, (long long)verdict->worst_row,
             (long long)verdict->worst_column, (long long)row, (long long)column);
}

#endif
