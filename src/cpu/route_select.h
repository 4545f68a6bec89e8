/* The top_k best of a row of keys.  Keys are int32 whose order is the order of selection, so that NaN, signed zeros and
 * infinities are no special cases for the scans. */
#ifndef MOE4_CPU_ROUTE_SELECT_H
#define MOE4_CPU_ROUTE_SELECT_H

#include <stdint.h>

/* keys[e] orders as values[e] does, a NaN of any sign above +inf and -0 equal to +0.  values may be keys' memory. */
void select_order(const float *values, int32_t n, int32_t *keys);

/* The top_k largest of n keys in descending order, equal ones by ascending index.  1 <= top_k <= MAX_TOP_K, <= n. */
void select_best(const int32_t *keys, int32_t n, int32_t top_k, int32_t *ids);

/* The same among the experts of the topk_group best of n_group groups of equal size, a group's score being the sum of
 * its two largest keys (as floats).  groups is scratch for n_group numbers. */
void select_best_grouped(const int32_t *keys, int32_t n, int32_t n_group, int32_t topk_group, int32_t top_k,
                         int64_t *groups, int32_t *ids);

#endif
