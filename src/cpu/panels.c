#include "cpu/panels.h"

#include <stdatomic.h>

#include "context.h"
#include "cpu/pool.h"

enum { READING_ROWS = 4 }; /* routed rows whose arithmetic takes as long as reading a panel, roughly */

/* Panels of one node that nobody has claimed, numbered expert by expert. */
struct panel_queue {
    _Alignas(64) _Atomic uint64_t left; /* first in the low half, end in the high half */
    int64_t first_panel, n_panels;      /* of each expert's */
};

struct panel_stage {
    struct forward *f;
    panel_fn *run;
    const struct packed_matrix *matrix;
    const struct active_expert *active;
    int64_t max_claim;
    int32_t width; /* threads of a queue */
    int32_t n_queues;
    struct panel_queue *queues;
};

/* The most panels that a thread may claim at once.  Long runs stream best, but all threads must finish together: even
 * if all panels of a claim belong to the largest expert, it is at most 1/claim_share of a thread's share. */
static int64_t largest_claim(const struct forward *f, int64_t n_panels)
{
    int64_t total = n_panels * (f->n_rows + f->n_active * READING_ROWS);
    return total / (f->claim_share * pool_threads(f->context->pool) * (f->active[0].n_rows + READING_ROWS));
}

/* Claims a run of panels: long while much is left, one at a time near the end, so that all threads finish together.
 * Even workers claim from the front, odd ones from the back. */
static int queue_claim(struct panel_reader *reader, struct panel_queue *queue)
{
    const struct panel_stage *stage = reader->stage;
    const int from_back = reader->worker % 2;
    uint64_t left = atomic_load_explicit(&queue->left, memory_order_relaxed), rest;
    int64_t begin, end, claim;
    do {
        begin = (int64_t)(left & UINT32_MAX);
        end = (int64_t)(left >> 32);
        if (begin == end) return 0;
        claim = (end - begin) / (2 * stage->width);
        if (claim > stage->max_claim) claim = stage->max_claim;
        if (claim < 1) claim = 1;
        rest = from_back ? (uint64_t)(end - claim) << 32 | (uint64_t)begin
                         : (uint64_t)end << 32 | (uint64_t)(begin + claim);
    } while (
        !atomic_compare_exchange_weak_explicit(&queue->left, &left, rest, memory_order_relaxed, memory_order_relaxed));
    reader->queue = queue;
    reader->first = from_back ? end - claim : begin;
    reader->last = reader->first + claim;
    return 1;
}

/* Fills reader->next, from the node's own queue first, then from what others have left; 0 if there is nothing. */
static int find_next(struct panel_reader *reader)
{
    const struct panel_stage *stage = reader->stage;
    if (reader->next.expert) return 1;
    while (reader->first == reader->last) {
        if (reader->n_empty == stage->n_queues) return 0;
        if (!queue_claim(reader, &stage->queues[(reader->own_queue + reader->n_empty) % stage->n_queues]))
            reader->n_empty++;
    }
    const int64_t item = reader->first++, n_panels = reader->queue->n_panels;
    reader->next.expert = &stage->active[item / n_panels];
    reader->next.panel = reader->queue->first_panel + item % n_panels;
    return 1;
}

static const uint8_t *weights_at(const struct packed_matrix *matrix, struct panel_place place)
{
    return packed_panel(matrix, place.expert->l, place.panel);
}

void panels_look_ahead(struct panel_reader *reader)
{
    const struct packed_matrix *matrix = reader->stage->matrix;
    if (find_next(reader)) read_ahead_then(&reader->ahead, weights_at(matrix, reader->next), matrix->panel_bytes);
}

static void panels_worker(void *argument, int32_t worker)
{
    const struct panel_stage *stage = argument;
    const struct pool *pool = stage->f->context->pool;
    struct panel_reader reader = {.stage = stage, .worker = worker % pool_threads(pool)};
    if (stage->n_queues > 1) reader.own_queue = topology_node_here(pool_topology(pool));
    while (find_next(&reader)) {
        const struct panel_place place = reader.next;
        reader.next.expert = NULL;
        read_ahead_begin(&reader.ahead, weights_at(stage->matrix, place), stage->matrix->panel_bytes);
        stage->run(stage->f, place, &reader);
    }
}

void panels_run(struct forward *f, panel_fn *run, const struct packed_matrix *matrix, int64_t n_panels)
{
    const int32_t n_nodes = pool_topology(f->context->pool)->n_nodes, width = pool_threads(f->context->pool);
    const int64_t most = UINT32_MAX / n_panels; /* experts whose panels can be numbered */
    struct panel_queue queues[MAX_NODES];
    if (!f->n_active) return;
    struct panel_stage stage = {.f = f,
                                .run = run,
                                .matrix = matrix,
                                .max_claim = largest_claim(f, n_panels),
                                .width = width > n_nodes ? width / n_nodes : 1,
                                .n_queues = n_nodes,
                                .queues = queues};
    for (int64_t first = 0; first < f->n_active; first += most) {
        const int64_t n = f->n_active - first < most ? f->n_active - first : most;
        stage.active = f->active + first;
        for (int32_t node = 0; node < n_nodes; node++) {
            const int64_t begin = topology_first_panel(n_nodes, node, matrix->n_panels);
            int64_t end = topology_first_panel(n_nodes, node + 1, matrix->n_panels);
            if (end > n_panels) end = n_panels;
            queues[node].first_panel = begin;
            queues[node].n_panels = end > begin ? end - begin : 0;
            atomic_init(&queues[node].left, (uint64_t)(n * queues[node].n_panels) << 32);
        }
        pool_run(f->context->pool, panels_worker, &stage);
    }
}
