/* Streaming packed weights through the caches (x86). */
#ifndef MOE4_CPU_KERNELS_PREFETCH_H
#define MOE4_CPU_KERNELS_PREFETCH_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/layout.h"
#include "cpu/read_ahead.h"

enum { PREFETCH_NEAR = 2 }; /* blocks ahead of their use that lines are brought from the second level to the first */

/* Asks for n lines from `at` on; where to go on.  Into the second level: the first alone can have few misses
 * outstanding, and lines for it would take them all up (25 % slower).  Best a few at a time, between other work, for
 * the same reason.  Always inlined: gcc 12 drops calls that only prefetch. */
static inline __attribute__((always_inline)) uintptr_t read_lines(uintptr_t at, int n)
{
    for (int i = 0; i < n; i++, at += LINE_BYTES) _mm_prefetch((const char *)at, _MM_HINT_T1);
    return at;
}

/* Lines that a pass over n_sub of a panel's subtiles asks for between two code lines, beside one a block: those that
 * are used up, or where a panel takes several passes, somewhat more. */
static inline int lines_ahead(int n_sub)
{
    return n_sub == 4 ? 4 : n_sub + 1;
}

/* Once a block: what follows the run that ends. */
static inline __attribute__((always_inline)) uintptr_t read_on(struct read_ahead *ahead, uintptr_t at)
{
    return at < ahead->end ? at : read_ahead_turn(ahead);
}

/* As much as a block, for kernels that take one at a time. */
static inline __attribute__((always_inline)) void read_block(struct read_ahead *ahead)
{
    ahead->at = read_lines(read_on(ahead, ahead->at), PANEL_BLOCK_BYTES / LINE_BYTES);
}

/* Lines first .. first+n-1 of the block that comes up soon, to the first level: with few tokens to multiply, nothing
 * else hides that way. */
static inline __attribute__((always_inline)) void prefetch_near(const uint8_t *block, int first, int n)
{
    const char *line = (const char *)block + PREFETCH_NEAR * PANEL_BLOCK_BYTES + first * LINE_BYTES;
    for (int i = 0; i < n; i++) _mm_prefetch(line + i * LINE_BYTES, _MM_HINT_T0);
}

#endif
