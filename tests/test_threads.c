/* Contexts of several threads that share a layer, and a caller's threads that are all at work at once, whatever the
 * number of CPUs; made to run under a thread sanitizer. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

enum { N_CALLERS = 3, N_CALLS = 6, T = 33 };

/* One thread's own context, which runs the shared layer. */
struct caller {
    pthread_t thread;
    const moe4_layer *layer;
    const struct call *expected;
    struct buffers buffers;
    struct call call;
    int32_t n_wrong;
};

static void *caller_main(void *argument)
{
    struct caller *caller = argument;
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.n_threads = 3;
    if (moe4_context_create(&config, &context)) caller->n_wrong = N_CALLS;
    for (int i = 0; i < N_CALLS && !caller->n_wrong; i++) {
        struct call *call = &caller->call;
        memset(call->result.y, 0xFF, call->y_bytes);
        caller->n_wrong += call_run(&caller->buffers, context, caller->layer, call) != MOE4_OK ||
                           memcmp(call->result.y, caller->expected->result.y, call->y_bytes);
    }
    moe4_context_destroy(context);
    return NULL;
}

static void check_shared_layer(const struct call_plan *plan)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(64, 96, 6, 2);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 8};
    if (plan->routing == ROUTE_OWN_ROUTER) router_create(&buffers, &config, 1);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 4);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    struct call expected = call_create(&buffers, &config, plan);
    call_must_run(&buffers, context, layer, &expected);
    struct caller callers[N_CALLERS] = {0};
    for (int i = 0; i < N_CALLERS; i++) {
        callers[i] = (struct caller){.layer = layer, .expected = &expected};
        callers[i].call = call_create(&callers[i].buffers, &config, plan);
        if (pthread_create(&callers[i].thread, NULL, caller_main, &callers[i])) fail_msg("no thread");
    }
    for (int i = 0; i < N_CALLERS; i++) {
        pthread_join(callers[i].thread, NULL);
        assert_int_equal(callers[i].n_wrong, 0);
        buffers_release(&callers[i].buffers);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_shared_layer(void **state)
{
    (void)state;
    static const enum route_source sources[] = {ROUTE_LOGITS_F32, ROUTE_OWN_ROUTER, ROUTE_IDS_PACKED};
    for (int i = 0; i < 8; i++) {
        struct call_plan plan = {.n_tokens = T,
                                 .top_k = 2,
                                 .routing = sources[i % 3],
                                 .compute = (moe4_compute)(i / 2),
                                 .seed = (uint64_t)i};
        check_shared_layer(&plan);
    }
}

static size_t workspace_of(int32_t n_threads)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(64, 96, 6, 2);
    struct weight_plan weights = {.seed = 8};
    moe4_context *context = context_open(MOE4_ISA_AUTO, n_threads);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    size_t bytes;
    assert_int_equal(moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, T, 0, &bytes), MOE4_OK);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
    return bytes;
}

/* Threads that would only take turns have no memory of their own. */
static void test_workspace_of_many_threads(void **state)
{
    (void)state;
    assert_int_equal(workspace_of(1000), workspace_of(0));
}

/* ---- A caller's threads ---- */

enum { N_WORKERS = 5 };

struct worker {
    pthread_t thread;
    pthread_barrier_t *start;
    void (*task)(void *, int32_t);
    void *argument;
    int32_t index;
};

static void *worker_main(void *argument)
{
    const struct worker *worker = argument;
    pthread_barrier_wait(worker->start);
    worker->task(worker->argument, worker->index);
    return NULL;
}

/* A new thread for each worker, with as little stack as they may have, and none begins before all are there. */
static void run_at_once(void *user, void (*task)(void *, int32_t), void *argument)
{
    (void)user;
    struct worker workers[N_WORKERS];
    pthread_barrier_t start;
    pthread_attr_t attributes;
    pthread_barrier_init(&start, NULL, N_WORKERS);
    pthread_attr_init(&attributes);
    if (!is_sanitized()) pthread_attr_setstacksize(&attributes, 128 << 10);
    for (int32_t w = 0; w < N_WORKERS; w++) {
        workers[w] = (struct worker){.start = &start, .task = task, .argument = argument, .index = w};
        if (pthread_create(&workers[w].thread, &attributes, worker_main, &workers[w])) abort();
    }
    for (int32_t w = 0; w < N_WORKERS; w++) pthread_join(workers[w].thread, NULL);
    pthread_attr_destroy(&attributes);
    pthread_barrier_destroy(&start);
}

static void check_threads_at_once(const struct call_plan *plan)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(96, 96, 6, 2);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 8};
    moe4_context_config context_config = MOE4_CONTEXT_CONFIG_INIT;
    const moe4_thread_pool pool = {N_WORKERS, run_at_once, NULL};
    context_config.pool = &pool;
    if (plan->routing == ROUTE_OWN_ROUTER) router_create(&buffers, &config, 1);
    moe4_context *one = context_open(MOE4_ISA_AUTO, 1), *many;
    assert_int_equal(moe4_context_create(&context_config, &many), MOE4_OK);
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_layer *expected = layer_open(one, &config, experts), *layer = layer_open(many, &config, experts);
    struct call first = call_create(&buffers, &config, plan), second = call_create(&buffers, &config, plan);
    call_must_run(&buffers, one, expected, &first);
    for (int i = 0; i < 2; i++) {
        memset(second.result.y, 0xFF, second.y_bytes);
        call_must_run(&buffers, many, layer, &second);
        call_compare(&first, &second);
    }
    moe4_layer_destroy(expected);
    moe4_layer_destroy(layer);
    moe4_context_destroy(one);
    moe4_context_destroy(many);
    buffers_release(&buffers);
}

static void test_threads_at_once(void **state)
{
    (void)state;
    static const enum route_source sources[] = {ROUTE_OWN_ROUTER, ROUTE_IDS_PACKED, ROUTE_LOGITS_F32};
    static const int64_t n_tokens[] = {1, 70, 9};
    for (int i = 0; i < 12; i++) {
        const int64_t n = i == 2 ? 1100 : n_tokens[i % 3]; /* 1100 are grouped by several threads */
        struct call_plan plan = {.n_tokens = n,
                                 .top_k = 2,
                                 .routing = sources[i % 3],
                                 .compute = (moe4_compute)(i / 3),
                                 .seed = (uint64_t)i};
        check_threads_at_once(&plan);
    }
}

/* ---- How often threads are called together ---- */

static void count_and_run(void *user, void (*task)(void *, int32_t), void *argument)
{
    ++*(int32_t *)user;
    for (int32_t w = 0; w < 2; w++) task(argument, w);
}

/* Two GEMMs, which is all for few tokens; routing, and conversion of an x that is not bf16, once there are more;
 * counting and placing once there are many. */
static void test_forks(void **state)
{
    (void)state;
    static const struct {
        int64_t n_tokens;
        moe4_compute compute;
        int32_t n_forks;
    } cases[] = {{1, MOE4_COMPUTE_BF16, 2},  {8, MOE4_COMPUTE_BF16, 2},  {1024, MOE4_COMPUTE_BF16, 3},
                 {1, MOE4_COMPUTE_MXFP8, 2}, {4, MOE4_COMPUTE_MXFP8, 2}, {8, MOE4_COMPUTE_MXFP8, 3},
                 {9, MOE4_COMPUTE_MXFP8, 4}, {8, MOE4_COMPUTE_INT8, 2},  {1025, MOE4_COMPUTE_BF16, 5}};
    int32_t n_forks = 0;
    moe4_context_config context_config = MOE4_CONTEXT_CONFIG_INIT;
    const moe4_thread_pool pool = {2, count_and_run, &n_forks};
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(64, 96, 6, 2);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 8};
    moe4_context *context;
    context_config.pool = &pool;
    assert_int_equal(moe4_context_create(&context_config, &context), MOE4_OK);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct call_plan plan = {.n_tokens = cases[i].n_tokens, .top_k = 2, .compute = cases[i].compute};
        struct call call = call_create(&buffers, &config, &plan);
        call.result.gemm2_rows = NULL;
        call.result.row_map = NULL;
        n_forks = 0;
        call_must_run(&buffers, context, layer, &call);
        assert_int_equal(n_forks, cases[i].n_forks);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_layer),
        cmocka_unit_test(test_workspace_of_many_threads),
        cmocka_unit_test(test_threads_at_once),
        cmocka_unit_test(test_forks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
