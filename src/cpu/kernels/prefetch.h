/* Streaming packed weights through the caches (x86). */
#ifndef MOE4_CPU_KERNELS_PREFETCH_H
#define MOE4_CPU_KERNELS_PREFETCH_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/layout.h"

/* Brings the lines of a block that comes up in a while into the second-level cache.  Into the first alone, they would
 * take up the few misses that it can have outstanding: 25 % slower.  Always inlined: gcc 12 drops calls that only
 * prefetch. */
static inline __attribute__((always_inline)) void prefetch_block(const uint8_t *panel)
{
    enum { AHEAD = 16 * PANEL_BLOCK_BYTES };
    for (int i = 0; i < PANEL_BLOCK_BYTES; i += LINE_BYTES) _mm_prefetch((const char *)panel + AHEAD + i, _MM_HINT_T1);
}

/* From there into the first level: with one token to multiply, nothing else hides that way. */
static inline __attribute__((always_inline)) void prefetch_block_near(const uint8_t *panel)
{
    enum { AHEAD = 2 * PANEL_BLOCK_BYTES };
    for (int i = 0; i < PANEL_BLOCK_BYTES; i += LINE_BYTES) _mm_prefetch((const char *)panel + AHEAD + i, _MM_HINT_T0);
}

#endif
