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

/* How many a block takes, which is 17 lines, and of these a pass over n_sub of a panel's subtiles at each of a block's
 * four code lines, beside one at its beginning; somewhat more where a panel takes several passes. */
enum { BLOCK_READ_PAIRS = 9 };
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

/* The pairs that a block asks for, for kernels that take one at a time. */
static inline struct line_pair read_block(struct read_ahead *ahead)
{
    read_on(ahead, &ahead->pair);
    const struct line_pair pair = ahead->pair;
    ahead->pair.at += BLOCK_READ_PAIRS * LINE_BYTES;
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
