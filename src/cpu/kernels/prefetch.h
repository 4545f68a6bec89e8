/* Streaming packed weights through the caches (x86). */
#ifndef MOE4_CPU_KERNELS_PREFETCH_H
#define MOE4_CPU_KERNELS_PREFETCH_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/layout.h"
#include "cpu/read_ahead.h"

enum { PREFETCH_NEAR = 2 }; /* blocks ahead of their use that lines are brought from the second level to the first */

/* Asks for n pairs of lines.  Into the second level: the first alone can have few misses outstanding, and lines for it
 * would take them all up (25 % slower).  Best a few at a time, between other work, for the same reason.  Always
 * inlined: gcc 12 drops calls that only prefetch. */
static inline __attribute__((always_inline)) void read_pairs(struct line_pair *pair, int n)
{
    for (int i = 0; i < n; i++, pair->at += LINE_BYTES) {
        _mm_prefetch((const char *)pair->at, _MM_HINT_T1);
        _mm_prefetch((const char *)(pair->at + pair->apart), _MM_HINT_T1);
    }
}

/* A block is 17 lines: 8 pairs, which are asked for between its code lines, and one more every other block.  A pass
 * over n_sub of a panel's subtiles asks at each of the four lines for its part, or where a panel takes several passes,
 * for somewhat more, and for one at each block's beginning. */
static inline int pairs_ahead(int n_sub, int line)
{
    return n_sub == 4 ? 2 : n_sub == 2 ? 1 : line % 2;
}

/* Once a block: what follows the run that ends. */
static inline __attribute__((always_inline)) void read_on(struct read_ahead *ahead, struct line_pair *pair)
{
    if (pair->at < ahead->run_end) return;
    read_ahead_turn(ahead);
    *pair = ahead->pair;
}

/* The 8 pairs for block b, for kernels that take one at a time. */
static inline __attribute__((always_inline)) struct line_pair read_block(struct read_ahead *ahead, int64_t b)
{
    read_on(ahead, &ahead->pair);
    if (b % 2) read_pairs(&ahead->pair, 1);
    const struct line_pair pair = ahead->pair;
    ahead->pair.at += 8 * LINE_BYTES;
    return pair;
}

/* Lines first .. first+n-1 of the block that comes up soon, to the first level: with few tokens to multiply, nothing
 * else hides that way. */
static inline __attribute__((always_inline)) void prefetch_near(const uint8_t *block, int first, int n)
{
    const char *line = (const char *)block + PREFETCH_NEAR * PANEL_BLOCK_BYTES + first * LINE_BYTES;
    for (int i = 0; i < n; i++) _mm_prefetch(line + i * LINE_BYTES, _MM_HINT_T0);
}

#endif
