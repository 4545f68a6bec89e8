/* Threads.  A stage of the layer is one pool_run: fork, work, join.
 *
 * Own threads spin for 50 microseconds between stages, so that the stages of one layer follow each other without a
 * system call, then sleep.  They take none of the host's signals.  A pool may also borrow the caller's threads.  After
 * fork() the child, which has none of the threads, runs everything on its own. */
#ifndef MOE4_CPU_POOL_H
#define MOE4_CPU_POOL_H

#include <stdint.h>

#include "cpu/topology.h"
#include "moe4/moe4.h"

struct pool;

typedef void pool_task(void *argument, int32_t worker);

/* A pool of n_threads workers; 0 = as many as this process may run at once.  No more threads than that do their work,
 * the caller's included: others would only take turns.  Where there are several nodes, own threads are spread over them
 * and kept on theirs.  NULL when memory or threads cannot be had. */
struct pool *pool_create(const moe4_allocator *allocator, int32_t n_threads, const struct topology *topology);

/* A pool over the caller's threads. */
struct pool *pool_borrow(const moe4_allocator *allocator, const moe4_thread_pool *threads,
                         const struct topology *topology);

/* NULL is fine. */
void pool_destroy(struct pool *pool);

/* Workers that pool_run calls for, and threads that are at work at a time. */
int32_t pool_width(const struct pool *pool);
int32_t pool_threads(const struct pool *pool);
const struct topology *pool_topology(const struct pool *pool);

/* Calls task(argument, w) once for each w in 0..width-1, in the floating-point environment of fpenv.h, and returns when
 * all have returned.  One call at a time.  Workers that are equal modulo pool_threads follow each other. */
void pool_run(struct pool *pool, pool_task *task, void *argument);

/* Waits until *state is `value`, which another worker of this round, already at it, will make it. */
void pool_await(const _Atomic int32_t *state, int32_t value);

/* The number of CPUs this process may keep busy: affinity mask and cgroup quota, at least 1. */
int32_t pool_available_cpus(void);

#endif
