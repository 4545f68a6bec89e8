/* The thread pool: every worker exactly once a round, whatever the width; made to run under a thread sanitizer too. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/memory.h"
#include "cpu/pool.h"
#include "fixture.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { MAX_WIDTH = 64 };

static const struct topology one_node = {.n_nodes = 1, .n_cpus = {1}};

struct job {
    int64_t n_calls[MAX_WIDTH]; /* plain: rounds must follow each other, not only atomics */
    int64_t sum;                /* of all n_calls, as worker 0 saw it a round ago */
    int32_t width;
};

static void count_task(void *argument, int32_t worker)
{
    struct job *job = argument;
    if (worker >= 0 && worker < job->width) job->n_calls[worker]++;
}

static void note_thread(void *argument, int32_t worker)
{
    ((pthread_t *)argument)[worker] = pthread_self();
}

/* Reads what every worker wrote in the round before. */
static void sum_task(void *argument, int32_t worker)
{
    struct job *job = argument;
    if (worker) return;
    job->sum = 0;
    for (int32_t w = 0; w < job->width; w++) job->sum += job->n_calls[w];
}

static void run_rounds(struct pool *pool, int32_t n_rounds)
{
    struct job job = {.width = pool_width(pool)};
    for (int32_t round = 1; round <= n_rounds; round++) {
        pool_run(pool, count_task, &job);
        pool_run(pool, sum_task, &job);
        assert_int_equal(job.sum, (int64_t)round * job.width);
    }
    for (int32_t w = 0; w < job.width; w++) assert_int_equal(job.n_calls[w], n_rounds);
}

static void test_widths(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    for (int32_t width = 1; width <= 9; width++) {
        struct pool *pool = pool_create(&allocator, width, &one_node);
        assert_non_null(pool);
        assert_int_equal(pool_width(pool), width);
        run_rounds(pool, width <= pool_available_cpus() ? 5000 : 500);
        pool_destroy(pool);
    }
}

static void test_far_more_threads_than_cpus(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    struct pool *pool = pool_create(&allocator, MAX_WIDTH, &one_node);
    assert_non_null(pool);
    run_rounds(pool, 200);
    pool_destroy(pool);
}

/* Rounds that come late find the threads asleep. */
static void test_pauses_between_rounds(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    struct pool *pool = pool_create(&allocator, 3, &one_node);
    struct job job = {.width = 3};
    for (int round = 0; round < 50; round++) {
        pool_run(pool, count_task, &job);
        usleep(round % 5 * 200);
    }
    for (int32_t w = 0; w < 3; w++) assert_int_equal(job.n_calls[w], 50);
    pool_destroy(pool);
}

static void test_destroyed_at_once(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    for (int i = 0; i < 300; i++) {
        struct pool *pool = pool_create(&allocator, 1 + i % 5, &one_node);
        if (i % 2) run_rounds(pool, 1);
        pool_destroy(pool);
    }
    pool_destroy(NULL);
}

static void test_default_width(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    struct pool *pool = pool_create(&allocator, 0, &one_node);
    assert_int_equal(pool_width(pool), pool_available_cpus());
    assert_true(pool_available_cpus() >= 1);
    run_rounds(pool, 10);
    pool_destroy(pool);
}

/* Threads beyond the CPUs would only take turns, so there are none; their workers are called all the same. */
static void check_as_in_one_cpu(struct pool *pool)
{
    pthread_t threads[MAX_WIDTH];
    pool_run(pool, note_thread, threads);
    for (int32_t w = 0; w < pool_width(pool); w++) assert_true(pthread_equal(threads[w], pthread_self()));
}

static void test_affinity_is_respected(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(pool_available_cpus(), 1);
    struct pool *all = pool_create(&allocator, 0, &one_node), *many = pool_create(&allocator, 4, &one_node);
    sched_setaffinity(0, sizeof before, &before);
    assert_int_equal(pool_width(all), 1);
    assert_int_equal(pool_width(many), 4);
    assert_int_equal(pool_threads(many), 1);
    check_as_in_one_cpu(many);
    run_rounds(many, 10);
    pool_destroy(all);
    pool_destroy(many);
}

static double cpu_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Whoever has nothing to do sleeps, soon. */
static void test_sleeps_when_idle(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    struct pool *pool = pool_create(&allocator, 0, &one_node);
    run_rounds(pool, 3);
    usleep(20000);
    double before = cpu_seconds();
    usleep(200000);
    assert_true(cpu_seconds() - before < 0.02);
    run_rounds(pool, 3);
    pool_destroy(pool);
}

static void note_mask(void *argument, int32_t worker)
{
    pthread_sigmask(SIG_SETMASK, NULL, &((sigset_t *)argument)[worker]);
}

/* Own threads run no handler of the host's, unless for what they did themselves; the caller's thread is left alone. */
static void test_signals_are_the_hosts(void **state)
{
    (void)state;
    static const int hosts[] = {SIGINT, SIGTERM, SIGHUP, SIGCHLD, SIGUSR1, SIGALRM};
    moe4_allocator allocator = memory_default_allocator();
    sigset_t masks[2], before;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    struct pool *pool = pool_create(&allocator, 2, &one_node);
    if (pool_threads(pool) == 2) {
        pool_run(pool, note_mask, masks);
        for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
            assert_true(sigismember(&masks[1], hosts[i]));
            assert_int_equal(sigismember(&masks[0], hosts[i]), sigismember(&before, hosts[i]));
        }
        assert_false(sigismember(&masks[1], SIGSEGV));
        assert_false(sigismember(&masks[1], SIGBUS));
    }
    pool_destroy(pool);
}

/* ---- A caller's threads ---- */

/* Runs the workers backwards, in threads of its own, counting the rounds. */
struct backwards {
    int32_t width, n_rounds;
    void (*task)(void *, int32_t);
    void *argument;
};

struct backwards_worker {
    const struct backwards *pool;
    int32_t worker;
};

static void *backwards_main(void *argument)
{
    const struct backwards_worker *self = argument;
    self->pool->task(self->pool->argument, self->worker);
    return NULL;
}

static void backwards_run(void *user, void (*task)(void *, int32_t), void *argument)
{
    struct backwards *pool = user;
    pthread_t threads[MAX_WIDTH];
    struct backwards_worker workers[MAX_WIDTH];
    pool->task = task;
    pool->argument = argument;
    pool->n_rounds++;
    for (int32_t w = pool->width - 1; w >= 0; w--) {
        workers[w] = (struct backwards_worker){pool, w};
        if (pthread_create(&threads[w], NULL, backwards_main, &workers[w])) abort();
    }
    for (int32_t w = 0; w < pool->width; w++) pthread_join(threads[w], NULL);
}

static void test_borrowed_threads(void **state)
{
    (void)state;
    struct test_allocator memory;
    test_allocator_init(&memory);
    struct backwards backwards = {.width = 4};
    moe4_thread_pool threads = {4, backwards_run, &backwards};
    struct pool *pool = pool_borrow(&memory.allocator, &threads, &one_node);
    assert_int_equal(pool_width(pool), 4);
    run_rounds(pool, 25);
    assert_int_equal(backwards.n_rounds, 50);
    pool_destroy(pool);
    assert_int_equal(memory.n_live, 0);
    assert_int_equal(memory.live_bytes, 0);
}

/* ---- The floating-point environment ---- */

#if defined(__x86_64__)
static void check_fpenv_task(void *argument, int32_t worker)
{
    uint32_t *seen = argument;
    seen[worker] = _mm_getcsr() & ~0x3Fu; /* without the sticky flags */
}

static void test_default_fpenv_in_every_worker(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    const uint32_t host = _mm_getcsr(), odd = 0xFFC0 & ~0x1000u; /* FTZ, DAZ, upwards, one exception unmasked */
    struct pool *pool = pool_create(&allocator, 3, &one_node);
    uint32_t seen[3] = {0};
    _mm_setcsr(odd);
    pool_run(pool, check_fpenv_task, seen);
    uint32_t after = _mm_getcsr();
    _mm_setcsr(host);
    assert_int_equal(after, odd);
    for (int w = 0; w < 3; w++) assert_int_equal(seen[w], 0x1F80);
    pool_destroy(pool);
}
#endif

/* ---- fork ---- */

#if defined(__SANITIZE_THREAD__)
#define HAS_FORK 0 /* the sanitizer does not follow a fork of a process with threads */
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAS_FORK 0
#endif
#endif
#ifndef HAS_FORK
#define HAS_FORK 1
#endif

#if HAS_FORK
static void test_child_has_no_threads_but_works(void **state)
{
    (void)state;
    moe4_allocator allocator = memory_default_allocator();
    struct pool *pool = pool_create(&allocator, 3, &one_node);
    run_rounds(pool, 10);
    pid_t child = fork();
    if (child == 0) {
        struct job job = {.width = 3};
        for (int i = 0; i < 5; i++) pool_run(pool, count_task, &job);
        pool_destroy(pool);
        _exit(job.n_calls[0] == 5 && job.n_calls[1] == 5 && job.n_calls[2] == 5 ? 0 : 1);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    run_rounds(pool, 10); /* the parent still has its own */
    pool_destroy(pool);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_widths),
        cmocka_unit_test(test_far_more_threads_than_cpus),
        cmocka_unit_test(test_pauses_between_rounds),
        cmocka_unit_test(test_destroyed_at_once),
        cmocka_unit_test(test_default_width),
        cmocka_unit_test(test_affinity_is_respected),
        cmocka_unit_test(test_sleeps_when_idle),
        cmocka_unit_test(test_signals_are_the_hosts),
        cmocka_unit_test(test_borrowed_threads),
#if defined(__x86_64__)
        cmocka_unit_test(test_default_fpenv_in_every_worker),
#endif
#if HAS_FORK
        cmocka_unit_test(test_child_has_no_threads_but_works),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
