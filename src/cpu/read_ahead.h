/* Reading weights ahead of their use.  A thread knows the panel that it multiplies, and at the end the one that comes
 * next.  While kernels multiply they ask for the rest of the one, then for the other's beginning, at a pace of their
 * own, which need not be that of use: a kernel that passes over a panel twice reads all the while, not only at first.
 */
#ifndef MOE4_CPU_READ_AHEAD_H
#define MOE4_CPU_READ_AHEAD_H

#include <stdint.h>

#include "cpu/layout.h"

enum {
    READ_AHEAD_LEAST = 16 * PANEL_BLOCK_BYTES, /* bytes that reading is ahead of use; 8 to 64 KB make no difference */
    READ_AHEAD_MOST = 128 << 10,               /* of the next panel: with this one they fit a second-level cache */
    READ_AHEAD_REPEATED = 32 * LINE_BYTES      /* asked for again and again when nothing else is left */
};

/* Addresses rather than pointers: asking for what lies beyond an object does no harm. */
struct read_ahead {
    uintptr_t at, end;        /* asked for next */
    uintptr_t next, next_end; /* and then */
};

/* All up to `end` has been asked for: on to what is next, after which there is nothing. */
static inline uintptr_t read_ahead_turn(struct read_ahead *ahead)
{
    const uintptr_t at = ahead->next;
    ahead->end = ahead->next_end;
    ahead->next = ahead->end - READ_AHEAD_REPEATED;
    return at;
}

/* `panel` will be multiplied now.  Part of it has been asked for if it was next. */
static inline void read_ahead_begin(struct read_ahead *ahead, const uint8_t *panel, int64_t panel_bytes)
{
    const uintptr_t begin = (uintptr_t)panel;
    ahead->end = ahead->next_end = begin + (uintptr_t)panel_bytes;
    ahead->next = ahead->end - READ_AHEAD_REPEATED;
    if (ahead->at < begin || ahead->at > ahead->end) ahead->at = begin + READ_AHEAD_LEAST;
}

/* And `panel` next. */
static inline void read_ahead_then(struct read_ahead *ahead, const uint8_t *panel, int64_t panel_bytes)
{
    ahead->next = (uintptr_t)panel;
    ahead->next_end = ahead->next + (uintptr_t)(panel_bytes < READ_AHEAD_MOST ? panel_bytes : READ_AHEAD_MOST);
}

#endif
