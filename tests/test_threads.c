/* Contexts of several threads that share a layer, made to run under a thread sanitizer. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
