/* Threads of the command's own: for generating weights and for the oracle, both far too slow on one. */
#ifndef MOE4_CLI_PARALLEL_H
#define MOE4_CLI_PARALLEL_H

#include <stdint.h>

/* Splits 0..n_items-1 into contiguous parts, one a thread, runs task(user, first, end) on each and waits for all. */
void parallel_for(int32_t n_threads, int64_t n_items, void (*task)(void *user, int64_t first, int64_t end), void *user);

#endif
