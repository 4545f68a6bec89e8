#include "cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/memory.h"
#include "cpu/fpenv.h"

enum {
    MAX_THREADS = 1024,
    SPINS = 4000 /* some 30 to 60 microseconds: longer than any gap between two stages of a layer */
};

struct pool_thread {
    struct pool *pool;
    pthread_t thread;
    int32_t worker;
};

struct pool {
    moe4_allocator allocator;
    moe4_thread_pool borrowed; /* run != NULL: the caller's threads */
    struct topology topology;
    int32_t width;
    int32_t n_started; /* own threads that exist */
    int32_t n_spins;
    pid_t owner; /* the process that has the threads */

    pool_task *task;
    void *argument;
    _Atomic uint32_t round;    /* grows by one per pool_run; threads wait for it to change */
    _Atomic int32_t n_working; /* own threads still in this round */
    _Atomic int32_t stopping;
    pthread_mutex_t mutex; /* a change that somebody may sleep on is announced under it: no wake-up is missed */
    pthread_cond_t round_began, round_ended;
    struct pool_thread threads[]; /* [width - 1], workers 1.. */
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* CPUs by the cgroup's quota; a large number without one. */
static int32_t quota_cpus(void)
{
    long long quota, period;
    int32_t cpus = MAX_THREADS;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!file) return cpus;
    if (fscanf(file, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0) {
        long long whole = (quota + period - 1) / period;
        if (whole < cpus) cpus = (int32_t)whole;
    }
    fclose(file);
    return cpus;
}

int32_t pool_available_cpus(void)
{
    int32_t cpus = 1, quota = quota_cpus();
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        cpus = CPU_COUNT(&set);
    else
        cpus = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    if (cpus > quota) cpus = quota;
    return cpus < 1 ? 1 : cpus;
}

static void run_task(pool_task *task, void *argument, int32_t worker)
{
    uint32_t host = fpenv_enter();
    task(argument, worker);
    fpenv_leave(host);
}

/* Waits until the round differs from `seen`; returns it. */
static uint32_t wait_for_round(struct pool *pool, uint32_t seen)
{
    for (int32_t i = 0; i < pool->n_spins; i++) {
        uint32_t round = atomic_load_explicit(&pool->round, memory_order_acquire);
        if (round != seen) return round;
        pause_cpu();
    }
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->round) == seen) pthread_cond_wait(&pool->round_began, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
    return atomic_load(&pool->round);
}

static void *thread_main(void *argument)
{
    const struct pool_thread *self = argument;
    struct pool *pool = self->pool;
    topology_bind(&pool->topology, topology_node_of_worker(&pool->topology, self->worker, pool->width));
    for (uint32_t seen = 0;;) {
        seen = wait_for_round(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        run_task(pool->task, pool->argument, self->worker);
        if (atomic_fetch_sub_explicit(&pool->n_working, 1, memory_order_acq_rel) != 1) continue;
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_signal(&pool->round_ended);
        pthread_mutex_unlock(&pool->mutex);
    }
}

static void begin_round(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add_explicit(&pool->round, 1, memory_order_release);
    pthread_cond_broadcast(&pool->round_began);
    pthread_mutex_unlock(&pool->mutex);
}

static void wait_for_end(struct pool *pool)
{
    for (int32_t i = 0; i < pool->n_spins; i++) {
        if (atomic_load_explicit(&pool->n_working, memory_order_acquire) == 0) return;
        pause_cpu();
    }
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->n_working) != 0) pthread_cond_wait(&pool->round_ended, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

struct borrowed_task {
    pool_task *task;
    void *argument;
};

static void run_borrowed_task(void *argument, int32_t worker)
{
    const struct borrowed_task *borrowed = argument;
    run_task(borrowed->task, borrowed->argument, worker);
}

void pool_run(struct pool *pool, pool_task *task, void *argument)
{
    if (pool->borrowed.run) {
        struct borrowed_task borrowed = {task, argument};
        pool->borrowed.run(pool->borrowed.user, run_borrowed_task, &borrowed);
        return;
    }
    int forked = pool->width > 1 && getpid() != pool->owner;
    if (pool->width == 1 || forked) {
        for (int32_t worker = 0; worker < pool->width; worker++) run_task(task, argument, worker);
        return;
    }
    pool->task = task;
    pool->argument = argument;
    atomic_store_explicit(&pool->n_working, pool->width - 1, memory_order_relaxed);
    begin_round(pool);
    run_task(task, argument, 0);
    wait_for_end(pool);
}

void pool_await(const _Atomic int32_t *state, int32_t value)
{
    for (int32_t i = 0; atomic_load_explicit(state, memory_order_acquire) != value; i++)
        if (i < SPINS)
            pause_cpu();
        else
            sched_yield(); /* it may have lost its CPU */
}

int32_t pool_width(const struct pool *pool)
{
    return pool->width;
}

const struct topology *pool_topology(const struct pool *pool)
{
    return &pool->topology;
}

static size_t pool_bytes(int32_t width)
{
    return sizeof(struct pool) + (size_t)(width - 1) * sizeof(struct pool_thread);
}

static struct pool *pool_allocate(const moe4_allocator *allocator, int32_t width, const struct topology *topology)
{
    struct pool *pool = memory_allocate_zeroed(allocator, pool_bytes(width));
    if (!pool) return NULL;
    pool->allocator = *allocator;
    pool->topology = *topology;
    pool->width = width;
    pool->owner = getpid();
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->round_began, NULL);
    pthread_cond_init(&pool->round_ended, NULL);
    return pool;
}

struct pool *pool_create(const moe4_allocator *allocator, int32_t n_threads, const struct topology *topology)
{
    int32_t available = pool_available_cpus();
    int32_t width = n_threads ? n_threads : available;
    if (width > MAX_THREADS) width = MAX_THREADS;
    struct pool *pool = pool_allocate(allocator, width, topology);
    if (!pool) return NULL;
    pool->n_spins = width <= available ? SPINS : 0;
    for (; pool->n_started < width - 1; pool->n_started++) {
        struct pool_thread *thread = &pool->threads[pool->n_started];
        *thread = (struct pool_thread){.pool = pool, .worker = pool->n_started + 1};
        if (pthread_create(&thread->thread, NULL, thread_main, thread) != 0) {
            pool_destroy(pool);
            return NULL;
        }
    }
    return pool;
}

struct pool *pool_borrow(const moe4_allocator *allocator, const moe4_thread_pool *threads,
                         const struct topology *topology)
{
    struct pool *pool = pool_allocate(allocator, 1, topology);
    if (!pool) return NULL;
    pool->borrowed = *threads;
    pool->width = threads->width;
    return pool;
}

void pool_destroy(struct pool *pool)
{
    if (!pool) return;
    if (getpid() == pool->owner) {
        atomic_store(&pool->stopping, 1);
        begin_round(pool);
        for (int32_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i].thread, NULL);
        pthread_cond_destroy(&pool->round_ended);
        pthread_cond_destroy(&pool->round_began);
        pthread_mutex_destroy(&pool->mutex);
    }
    moe4_allocator allocator = pool->allocator;
    memory_release(&allocator, pool, pool_bytes(pool->borrowed.run ? 1 : pool->width));
}
