/* Test cases in which every pair of values of any two factors occurs at least once: a fault that needs two conditions
 * is met by some hundred cases instead of millions. */
#ifndef MOE4_TEST_PAIRWISE_H
#define MOE4_TEST_PAIRWISE_H

#include <stdint.h>

#include "fixture.h"

enum { MAX_FACTORS = 32, MAX_VALUES = 12 };

struct pairwise {
    int32_t n_factors;
    const int32_t *n_values; /* [n_factors], each 1..MAX_VALUES */
    struct random random;
    int64_t n_uncovered;
    uint8_t covered[MAX_FACTORS][MAX_VALUES][MAX_FACTORS][MAX_VALUES];
};

void pairwise_init(struct pairwise *pairwise, const int32_t *n_values, int32_t n_factors, uint64_t seed);

/* The next case: values[f] of each factor, 0..n_values[f]-1.  Returns 0 when every pair has occurred. */
int pairwise_next(struct pairwise *pairwise, int32_t *values);

#endif
