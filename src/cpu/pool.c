#include "cpu/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/memory.h"
#include "cpu/fpenv.h"
#include "cpu/quota.h"

enum {
    MAX_THREADS = 1024,
    MAX_CPUS = 8192,         /* that Linux can be built for */
    SPIN_NANOSECONDS = 50000 /* longer than any gap between two stages of a layer */
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
    int32_t n_running; /* threads that do the work of `width`, the caller's included: no more than CPUs */
    int32_t n_started; /* own threads that exist */
    pid_t owner;       /* the process that has the threads */

    pool_task *task;
    void *argument;
    _Atomic uint32_t round;    /* grows by one per pool_run; threads wait for it to change */
    _Atomic int32_t n_working; /* own threads still in this round */
    _Atomic int32_t stopping;
    _Atomic int32_t n_sleeping;       /* threads that wait for a round in the kernel, or are about to */
    _Atomic int32_t caller_is_asleep; /* the same of the caller, for the end of a round */
    struct pool_thread threads[];     /* [n_running - 1], workers 1.. */
};

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

/* Waiting without sleep.  A pause is 1 to 140 clocks, as the CPU likes, so the clock says when it has been enough. */
struct spin {
    uint32_t n_pauses;
    int64_t end; /* 0 = not known yet */
};

static int64_t clock_nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Pauses; 0 when that has gone on for long. */
static int spin_on(struct spin *spin)
{
    pause_cpu();
    if (++spin->n_pauses % 32) return 1;
    const int64_t now = clock_nanoseconds();
    if (!spin->end) spin->end = now + SPIN_NANOSECONDS;
    return now < spin->end;
}

int32_t pool_available_cpus(void)
{
    int32_t cpus = 1, quota = quota_cpus("");
    cpu_set_t set[MAX_CPUS / CPU_SETSIZE]; /* the kernel refuses what is smaller than its own */
    if (sched_getaffinity(0, sizeof set, set) == 0)
        cpus = CPU_COUNT_S(sizeof set, set);
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

/* Sleeps while *word is `value`, until it is woken or for no reason.  Who changes the word after the kernel has looked
 * finds the sleeper announced: both sides are sequentially consistent. */
static void futex_wait(void *word, int32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL);
}

static void futex_wake(void *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX);
}

/* Waits until the round differs from `seen`; returns it. */
static uint32_t wait_for_round(struct pool *pool, uint32_t seen)
{
    uint32_t round;
    struct spin spin = {0};
    do {
        if ((round = atomic_load_explicit(&pool->round, memory_order_acquire)) != seen) return round;
    } while (spin_on(&spin));
    atomic_fetch_add(&pool->n_sleeping, 1);
    while ((round = atomic_load(&pool->round)) == seen) futex_wait(&pool->round, (int32_t)seen);
    atomic_fetch_sub(&pool->n_sleeping, 1);
    return round;
}

/* The work of a thread: its own and that of every n_running-th worker after it. */
static void run_workers(const struct pool *pool, int32_t worker)
{
    for (; worker < pool->width; worker += pool->n_running) run_task(pool->task, pool->argument, worker);
}

static void *thread_main(void *argument)
{
    const struct pool_thread *self = argument;
    struct pool *pool = self->pool;
    topology_bind(&pool->topology, topology_node_of_worker(&pool->topology, self->worker, pool->n_running));
    for (uint32_t seen = 0;;) {
        seen = wait_for_round(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        run_workers(pool, self->worker);
        if (atomic_fetch_sub(&pool->n_working, 1) == 1 && atomic_load(&pool->caller_is_asleep))
            futex_wake(&pool->n_working);
    }
}

static void begin_round(struct pool *pool)
{
    atomic_fetch_add(&pool->round, 1);
    if (atomic_load(&pool->n_sleeping)) futex_wake(&pool->round);
}

static void wait_for_end(struct pool *pool)
{
    int32_t n_working;
    struct spin spin = {0};
    do {
        if (atomic_load_explicit(&pool->n_working, memory_order_acquire) == 0) return;
    } while (spin_on(&spin));
    atomic_store(&pool->caller_is_asleep, 1);
    while ((n_working = atomic_load(&pool->n_working)) != 0) futex_wait(&pool->n_working, n_working);
    atomic_store(&pool->caller_is_asleep, 0);
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
    if (pool->n_running > 1 && getpid() != pool->owner) { /* forked */
        for (int32_t worker = 0; worker < pool->width; worker++) run_task(task, argument, worker);
        return;
    }
    pool->task = task;
    pool->argument = argument;
    atomic_store_explicit(&pool->n_working, pool->n_running - 1, memory_order_relaxed);
    if (pool->n_running > 1) begin_round(pool);
    run_workers(pool, 0);
    wait_for_end(pool);
}

void pool_await(const _Atomic int32_t *state, int32_t value)
{
    struct spin spin = {0};
    while (atomic_load_explicit(state, memory_order_acquire) != value)
        if (!spin_on(&spin)) sched_yield(); /* it may have lost its CPU */
}

int32_t pool_width(const struct pool *pool)
{
    return pool->width;
}

int32_t pool_threads(const struct pool *pool)
{
    return pool->borrowed.run ? pool->width : pool->n_running;
}

const struct topology *pool_topology(const struct pool *pool)
{
    return &pool->topology;
}

static size_t pool_bytes(int32_t n_running)
{
    return sizeof(struct pool) + (size_t)(n_running - 1) * sizeof(struct pool_thread);
}

static struct pool *pool_allocate(const moe4_allocator *allocator, int32_t width, int32_t n_running,
                                  const struct topology *topology)
{
    struct pool *pool = memory_allocate_zeroed(allocator, pool_bytes(n_running));
    if (!pool) return NULL;
    pool->allocator = *allocator;
    pool->topology = *topology;
    pool->width = width;
    pool->n_running = n_running;
    pool->owner = getpid();
    return pool;
}

/* Starts a thread that leaves signals to the host's, but for those that it brings upon itself, and profilers'. */
static int start_thread(struct pool_thread *thread)
{
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGPROF};
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) sigdelset(&blocked, own[i]);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    int failure = pthread_create(&thread->thread, NULL, thread_main, thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

struct pool *pool_create(const moe4_allocator *allocator, int32_t n_threads, const struct topology *topology)
{
    int32_t available = pool_available_cpus(), width = n_threads ? n_threads : available;
    if (width > MAX_THREADS) width = MAX_THREADS;
    struct pool *pool = pool_allocate(allocator, width, width < available ? width : available, topology);
    if (!pool) return NULL;
    for (; pool->n_started < pool->n_running - 1; pool->n_started++) {
        struct pool_thread *thread = &pool->threads[pool->n_started];
        *thread = (struct pool_thread){.pool = pool, .worker = pool->n_started + 1};
        if (start_thread(thread) != 0) {
            pool_destroy(pool);
            return NULL;
        }
    }
    return pool;
}

struct pool *pool_borrow(const moe4_allocator *allocator, const moe4_thread_pool *threads,
                         const struct topology *topology)
{
    struct pool *pool = pool_allocate(allocator, threads->width, 1, topology);
    if (pool) pool->borrowed = *threads;
    return pool;
}

void pool_destroy(struct pool *pool)
{
    if (!pool) return;
    if (getpid() == pool->owner) {
        atomic_store(&pool->stopping, 1);
        begin_round(pool);
        for (int32_t i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i].thread, NULL);
    }
    moe4_allocator allocator = pool->allocator;
    memory_release(&allocator, pool, pool_bytes(pool->n_running));
}
