#include "parallel.h"

#include <pthread.h>

enum { MAX_THREADS = 256 };

struct part {
    void (*task)(void *user, int64_t first, int64_t end);
    void *user;
    int64_t first, end;
    pthread_t thread;
    int is_running;
};

static void *part_run(void *argument)
{
    struct part *self = argument;
    self->task(self->user, self->first, self->end);
    return NULL;
}

void parallel_for(int32_t n_threads, int64_t n_items, void (*task)(void *user, int64_t first, int64_t end), void *user)
{
    struct part parts[MAX_THREADS];
    int64_t n_parts = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    if (n_parts > n_items) n_parts = n_items;
    for (int64_t i = 0; i < n_parts; ++i) {
        parts[i] = (struct part){
            .task = task, .user = user, .first = n_items * i / n_parts, .end = n_items * (i + 1) / n_parts};
        /* The last part runs here, and so does any whose thread cannot be had. */
        parts[i].is_running = i + 1 < n_parts && !pthread_create(&parts[i].thread, NULL, part_run, &parts[i]);
        if (!parts[i].is_running) part_run(&parts[i]);
    }
    for (int64_t i = 0; i < n_parts; ++i)
        if (parts[i].is_running) pthread_join(parts[i].thread, NULL);
}
