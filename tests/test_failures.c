/* Memory and threads that cannot be had, and sources that fail: an error that says so, nothing leaked, and a context
 * that goes on working. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "cpu/pool.h"

enum { H = 64, I = 96, E = 6, A = 2, T = 7 };

/* A config that needs every array that a layer can have. */
static moe4_layer_config full_config(struct buffers *buffers)
{
    static const float alphas[E] = {1, 2, 3, 4, 5, 6};
    float *bias = buffers_allocate(buffers, E * sizeof *bias);
    moe4_layer_config config = layer_config(H, I, E, A);
    for (int e = 0; e < E; e++) bias[e] = 0.1f * (float)e;
    config.alpha = (moe4_param){MOE4_PER_EXPERT, 0, alphas};
    config.routing.method = MOE4_ROUTING_MINIMAX2;
    config.routing.correction_bias = bias;
    config.routing.correction_bias_dtype = MOE4_DTYPE_F32;
    router_create(buffers, &config, 1);
    return config;
}

static moe4_context *counted_context(struct test_allocator *memory, int32_t n_threads)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.n_threads = n_threads;
    config.allocator = &memory->allocator;
    assert_int_equal(moe4_context_create(&config, &context), MOE4_OK);
    return context;
}

static void assert_nothing_lives(const struct test_allocator *memory)
{
    assert_int_equal(memory->n_live, 0);
    assert_int_equal(memory->live_bytes, 0);
}

static void test_context_without_memory(void **state)
{
    (void)state;
    struct test_allocator memory;
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_status status = MOE4_ENOMEM;
    int64_t n = 0;
    config.n_threads = 3;
    config.allocator = &memory.allocator;
    while (status) {
        moe4_context *context = (moe4_context *)&memory; /* must be set */
        test_allocator_init(&memory);
        memory.fails_at = ++n;
        status = moe4_context_create(&config, &context);
        assert_int_equal(status, memory.n_requests >= n ? MOE4_ENOMEM : MOE4_OK);
        if (n == 1) assert_null(context);
        if (n > 1 && status) assert_non_null(strstr(moe4_context_message(context), "out of memory"));
        moe4_context_destroy(context);
        assert_nothing_lives(&memory);
    }
    assert_true(n > 2);
}

/* What the linker puts in pthread_create's place (--wrap), and pthread_create itself. */
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

static int32_t n_threads_left = -1; /* that can be had; -1 = any number */

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument)
{
    if (n_threads_left == 0) return EAGAIN;
    n_threads_left -= n_threads_left > 0;
    return __real_pthread_create(thread, attributes, run, argument);
}

/* As under RLIMIT_NPROC, or a control group's limit of tasks. */
static void test_context_without_threads(void **state)
{
    (void)state;
    const int32_t n_wanted = pool_available_cpus() - 1; /* beside the caller's */
    if (n_wanted == 0) skip();
    for (int32_t n = 0; n <= n_wanted; n++) {
        struct test_allocator memory;
        test_allocator_init(&memory);
        moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
        config.allocator = &memory.allocator;
        moe4_context *context;
        n_threads_left = n;
        moe4_status status = moe4_context_create(&config, &context);
        n_threads_left = -1;
        assert_int_equal(status, n < n_wanted ? MOE4_ENOMEM : MOE4_OK);
        if (status) {
            char words[32];
            snprintf(words, sizeof words, "a pool of %d threads", n_wanted + 1);
            assert_non_null(strstr(moe4_context_message(context), words));
        }
        moe4_context_destroy(context);
        assert_nothing_lives(&memory);
    }
}

/* The n-th request of a creation fails, n = 1, 2, ...; afterwards the same context makes the same layer. */
static void test_layer_without_memory(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 2};
    struct test_allocator memory;
    test_allocator_init(&memory);
    moe4_layer_config config = full_config(&buffers);
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = counted_context(&memory, 2);
    const int64_t n_live = memory.n_live, live_bytes = memory.live_bytes;
    moe4_status status = MOE4_ENOMEM;
    int64_t n = 0;
    while (status) {
        moe4_layer *layer = (moe4_layer *)&memory; /* must be set */
        memory.n_requests = 0;
        memory.fails_at = ++n;
        status = moe4_layer_create(context, &config, experts, &layer);
        assert_int_equal(status, memory.n_requests >= n ? MOE4_ENOMEM : MOE4_OK);
        if (status) assert_null(layer);
        if (status) assert_non_null(strstr(moe4_context_message(context), "out of memory: "));
        memory.fails_at = 0;
        if (!status) {
            struct call call = call_create(&buffers, &config, &(struct call_plan){.n_tokens = T});
            const int64_t before = memory.n_requests;
            call_must_run(&buffers, context, layer, &call);
            assert_int_equal(memory.n_requests, before); /* forward allocates nothing */
        }
        moe4_layer_destroy(layer);
        assert_int_equal(memory.n_live, n_live);
        assert_int_equal(memory.live_bytes, live_bytes);
    }
    assert_true(n > 10);
    moe4_context_destroy(context);
    assert_nothing_lives(&memory);
    buffers_release(&buffers);
}

static void test_layer_outlives_its_context(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.seed = 2};
    struct test_allocator memory;
    test_allocator_init(&memory);
    moe4_layer_config config = full_config(&buffers);
    moe4_context *context = counted_context(&memory, 1);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    moe4_context_destroy(context);
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_int_equal(info.hidden_size, H);
    assert_int_equal(info.n_local_experts, E);
    moe4_layer_destroy(layer);
    assert_nothing_lives(&memory);
    buffers_release(&buffers);
}

static void test_routing_without_memory(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct test_allocator memory;
    test_allocator_init(&memory);
    moe4_layer_config config = full_config(&buffers);
    moe4_context *context = counted_context(&memory, 2);
    struct call call = call_create(&buffers, &config, &(struct call_plan){.n_tokens = T});
    const int64_t n_live = memory.n_live;
    int32_t *ids = call.result.ids;
    memory.n_requests = 0;
    memory.fails_at = 1;
    assert_int_equal(moe4_route(context, &config.routing, E, T, &call.logits, NULL, ids, call.result.weights),
                     MOE4_ENOMEM);
    assert_int_equal(ids[0], -1); /* untouched */
    assert_int_equal(moe4_route(context, &config.routing, E, T, &call.logits, NULL, ids, call.result.weights), MOE4_OK);
    assert_in_range(ids[0], 0, E - 1);
    assert_int_equal(memory.n_live, n_live);
    moe4_context_destroy(context);
    assert_nothing_lives(&memory);
    buffers_release(&buffers);
}

/* ---- Sources ---- */

struct failing_source {
    const moe4_expert *experts;
    int32_t n_reads, fails_at;
    moe4_status status;
};

static moe4_status read_or_fail(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct failing_source *source = user;
    assert_int_equal(local_expert, source->n_reads++); /* in ascending order, each once */
    if (local_expert == source->fails_at) return source->status;
    *expert = source->experts[local_expert];
    return MOE4_OK;
}

static void test_source_that_fails(void **state)
{
    (void)state;
    static const moe4_status statuses[] = {MOE4_EIO, MOE4_EFORMAT, MOE4_ENOMEM};
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.seed = 2};
    struct test_allocator memory;
    test_allocator_init(&memory);
    moe4_layer_config config = full_config(&buffers);
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = counted_context(&memory, 2);
    const int64_t n_live = memory.n_live, live_bytes = memory.live_bytes;
    for (int32_t l = 0; l < E; l++) {
        struct failing_source user = {experts, 0, l, statuses[l % 3]};
        const moe4_expert_source source = {.read = read_or_fail, .user = &user};
        char words[32] = "expert N";
        moe4_layer *layer;
        words[7] = (char)('0' + l);
        assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), statuses[l % 3]);
        assert_null(layer);
        assert_int_equal(user.n_reads, l + 1);
        assert_non_null(strstr(moe4_context_message(context), words));
        assert_int_equal(memory.n_live, n_live);
        assert_int_equal(memory.live_bytes, live_bytes);
    }
    struct failing_source user = {experts, 0, -1, MOE4_OK};
    const moe4_expert_source source = {.read = read_or_fail, .user = &user};
    moe4_layer *layer;
    assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), MOE4_OK);
    assert_int_equal(user.n_reads, E);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    assert_nothing_lives(&memory);
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_context_without_memory), cmocka_unit_test(test_context_without_threads),
        cmocka_unit_test(test_layer_without_memory),   cmocka_unit_test(test_layer_outlives_its_context),
        cmocka_unit_test(test_routing_without_memory), cmocka_unit_test(test_source_that_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
