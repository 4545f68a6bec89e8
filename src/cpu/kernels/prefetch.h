/* Streaming packed weights through the caches (x86). */
#ifndef MOE4_CPU_KERNELS_PREFETCH_H
#define MOE4_CPU_KERNELS_PREFETCH_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/layout.h"

/* Blocks ahead of their use that lines are brought into the second-level cache, and from there into the first. */
enum { PREFETCH_FAR = 16, PREFETCH_NEAR = 2 };

/* Lines first .. first+n-1 of the block that comes up in a while, to the second level.  Into the first alone, they
 * would take up the few misses that it can have outstanding: 25 % slower.  Best a few at a time, between other work,
 * for the same reason.  Always inlined: gcc 12 drops calls that only prefetch. */
static inline __attribute__((always_inline)) void prefetch_far(const uint8_t *block, int first, int n)
{
    const char *line = (const char *)block + PREFETCH_FAR * PANEL_BLOCK_BYTES + first * LINE_BYTES;
    for (int i = 0; i < n; i++) _mm_prefetch(line + i * LINE_BYTES, _MM_HINT_T1);
}

/* The same from there to the first level: with few tokens to multiply, nothing else hides that way. */
static inline __attribute__((always_inline)) void prefetch_near(const uint8_t *block, int first, int n)
{
    const char *line = (const char *)block + PREFETCH_NEAR * PANEL_BLOCK_BYTES + first * LINE_BYTES;
    for (int i = 0; i < n; i++) _mm_prefetch(line + i * LINE_BYTES, _MM_HINT_T0);
}

/* All of a block's lines. */
static inline __attribute__((always_inline)) void prefetch_block(const uint8_t *block)
{
    prefetch_far(block, 0, PANEL_BLOCK_BYTES / LINE_BYTES);
}

#endif
