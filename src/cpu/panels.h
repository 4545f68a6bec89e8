/* The order in which threads multiply a matrix's panels.  Active experts are sorted by rows, most first.  Half of the
 * threads begin with the largest, bound by arithmetic, the others with the smallest, bound by memory: together they use
 * both.  A thread knows the next panel early enough for kernels to read it ahead. */
#ifndef MOE4_CPU_PANELS_H
#define MOE4_CPU_PANELS_H

#include <stdint.h>

#include "cpu/forward.h"
#include "cpu/read_ahead.h"

struct panel_stage;
struct panel_queue;

/* A panel of an active expert. */
struct panel_place {
    const struct active_expert *expert; /* NULL = nowhere */
    int64_t panel;
};

/* A thread on its way through the panels. */
struct panel_reader {
    const struct panel_stage *stage;
    int32_t worker;             /* 0 .. pool_threads-1 */
    int32_t own_queue, n_empty; /* the queue that it began with, and how many it has seen empty since */
    struct panel_queue *queue;  /* the one of its last claim */
    int64_t first, last;        /* what is left of that */
    struct panel_place next;    /* after the panel at hand, once that is known */
    struct read_ahead ahead;
};

/* Multiplies a panel.  Kernels are given &reader->ahead; before the last of them panels_look_ahead is called. */
typedef void panel_fn(struct forward *f, struct panel_place place, struct panel_reader *reader);

/* Decides what comes next, so that it can be read ahead.  No earlier than needed: what a thread has claimed, others
 * cannot do. */
void panels_look_ahead(struct panel_reader *reader);

/* Runs a stage over the first n_panels of each active expert's matrix.  Where there are several nodes, threads take
 * those of theirs first. */
void panels_run(struct forward *f, panel_fn *run, const struct packed_matrix *matrix, int64_t n_panels);

#endif
