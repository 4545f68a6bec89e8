/* Reading weights ahead of their use.  A thread knows the panel that it multiplies, and at the end the one that comes
 * next.  While kernels multiply they ask for the rest of the one, then for the other's beginning, at a pace of their
 * own, which need not be that of use: a kernel that passes over a panel twice reads all the while, not only at first.
 *
 * Lines are asked for in two runs at once, a line of one and a line of the other, which are the halves of a chunk of a
 * panel.  One run after the other is up to a fifth slower from memory. */
#ifndef MOE4_CPU_READ_AHEAD_H
#define MOE4_CPU_READ_AHEAD_H

#include <stdint.h>

#include "cpu/layout.h"

enum {
    READ_AHEAD_CHUNK = 50 << 10,          /* bytes of two runs, at most */
    READ_AHEAD_MOST = 128 << 10,          /* of the next panel: with this one they fit a second-level cache */
    READ_AHEAD_REPEATED = 32 * LINE_BYTES /* asked for again and again when nothing else is left */
};

/* Two lines.  Addresses rather than pointers: asking for what lies beyond an object does no harm. */
struct line_pair {
    uintptr_t at, apart; /* one, and how far behind it the other is */
};

struct read_ahead {
    struct line_pair pair; /* asked for next, and those behind it */
    uintptr_t run_end;     /* until here */
    uintptr_t run_bytes;   /* half a chunk */
    uintptr_t panel;       /* whose lines these are */
    uintptr_t rest, end;   /* of it, what is asked for then */
    uintptr_t next, next_end;
};

/* A run has been asked for: on to what is next, after which there is nothing. */
static inline void read_ahead_turn(struct read_ahead *ahead)
{
    if (ahead->end - ahead->rest < 2 * ahead->run_bytes && ahead->next) {
        ahead->panel = ahead->rest = ahead->next;
        ahead->end = ahead->next_end;
        ahead->next = 0;
    }
    if (ahead->end - ahead->rest < 2 * ahead->run_bytes) {
        ahead->pair = (struct line_pair){ahead->end - READ_AHEAD_REPEATED, 0};
        ahead->run_end = ahead->end;
    } else {
        ahead->pair = (struct line_pair){ahead->rest, ahead->run_bytes};
        ahead->run_end = ahead->rest + ahead->run_bytes;
        ahead->rest += 2 * ahead->run_bytes;
    }
}

/* `panel` will be multiplied now.  Part of it has been asked for if it was next.  If that is little or nothing, the
 * first lines of both runs are left to the hardware: they would come too late. */
static inline void read_ahead_begin(struct read_ahead *ahead, const uint8_t *panel, int64_t panel_bytes)
{
    const uintptr_t begin = (uintptr_t)panel, bytes = (uintptr_t)panel_bytes;
    const uintptr_t n_runs = 2 * ((bytes + READ_AHEAD_CHUNK - 1) / READ_AHEAD_CHUNK);
    ahead->run_bytes = bytes / n_runs / LINE_BYTES * LINE_BYTES;
    ahead->end = begin + bytes;
    ahead->next = 0;
    if (ahead->panel != begin) {
        ahead->panel = ahead->rest = begin;
        read_ahead_turn(ahead);
    }
    const uintptr_t least = begin + ahead->run_bytes / 4 * 3 / LINE_BYTES * LINE_BYTES;
    if (ahead->pair.at >= begin && ahead->pair.at < least) ahead->pair.at = least;
}

/* And `panel` next. */
static inline void read_ahead_then(struct read_ahead *ahead, const uint8_t *panel, int64_t panel_bytes)
{
    ahead->next = (uintptr_t)panel;
    ahead->next_end = ahead->next + (uintptr_t)(panel_bytes < READ_AHEAD_MOST ? panel_bytes : READ_AHEAD_MOST);
}

#endif
