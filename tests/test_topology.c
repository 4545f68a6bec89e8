/* NUMA nodes that hwloc makes up: who belongs where, whose panels are whose, and that a layer of two nodes gives the
 * bits of one.  CPUs are numbered as in the machine, so threads really are bound. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "context.h"
#include "cpu/pool.h"
#include "cpu/topology.h"

static struct topology topology; /* two nodes of two CPUs each, or fewer where the machine has fewer */

static int is_known(void)
{
    return topology.n_nodes > 1;
}

static void test_made_up_nodes(void **state)
{
    (void)state;
    cpu_set_t allowed;
    assert_int_equal(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    topology_read(&topology, "numa:2 core:1 pu:1");
    if (!CPU_ISSET(0, &allowed) || !CPU_ISSET(1, &allowed)) skip();
#if defined(MOE4_HAS_HWLOC)
    assert_int_equal(topology.n_nodes, 2);
#endif
    if (!is_known()) skip();
    assert_int_equal(topology.node_of_cpu[0], 0);
    assert_int_equal(topology.node_of_cpu[1], 1);
    assert_int_equal(topology.n_cpus[0], 1);
    assert_int_equal(topology.n_cpus[1], 1);
}

static void test_nodes_without_allowed_cpus_do_not_count(void **state)
{
    (void)state;
    cpu_set_t before, one;
    struct topology narrow;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    CPU_SET(1, &one);
    if (sched_setaffinity(0, sizeof one, &one)) skip();
    topology_read(&narrow, "numa:2 core:1 pu:1");
    sched_setaffinity(0, sizeof before, &before);
    assert_int_equal(narrow.n_nodes, 1);
    assert_int_equal(narrow.n_cpus[0], 1);
    assert_int_equal(narrow.node_of_cpu[1], 0);
}

static void test_nonsense_is_one_node(void **state)
{
    (void)state;
    struct topology nonsense;
    topology_read(&nonsense, "no topology");
    assert_int_equal(nonsense.n_nodes, 1);
    assert_true(nonsense.n_cpus[0] >= 1);
}

static void test_workers_follow_cpus(void **state)
{
    (void)state;
    const struct topology uneven = {.n_nodes = 3, .n_cpus = {4, 1, 3}};
    static const int32_t nodes[8] = {0, 0, 0, 0, 1, 2, 2, 2};
    for (int32_t w = 0; w < 8; w++) assert_int_equal(topology_node_of_worker(&uneven, w, 8), nodes[w]);
    assert_int_equal(topology_node_of_worker(&uneven, 0, 2), 0);
    assert_int_equal(topology_node_of_worker(&uneven, 1, 2), 1);
    for (int32_t w = 0; w < 16; w++) assert_int_equal(topology_node_of_worker(&uneven, w, 16), nodes[w / 2]);
}

static void test_panels_are_dealt_out(void **state)
{
    (void)state;
    for (int32_t n_nodes = 1; n_nodes <= 5; n_nodes++)
        for (int64_t n_panels = 1; n_panels < 100; n_panels++) {
            assert_int_equal(topology_first_panel(n_nodes, 0, n_panels), 0);
            assert_int_equal(topology_first_panel(n_nodes, n_nodes, n_panels), n_panels);
            for (int32_t node = 0; node < n_nodes; node++) {
                int64_t n =
                    topology_first_panel(n_nodes, node + 1, n_panels) - topology_first_panel(n_nodes, node, n_panels);
                assert_in_range(n, n_panels / n_nodes, (n_panels + n_nodes - 1) / n_nodes);
            }
        }
}

struct place {
    int32_t node;   /* that a worker was on */
    int32_t n_cpus; /* that it may use */
};

static void look_around(void *argument, int32_t worker)
{
    struct place *places = argument;
    cpu_set_t cpus;
    sched_getaffinity(0, sizeof cpus, &cpus);
    places[worker] = (struct place){topology_node_here(&topology), CPU_COUNT(&cpus)};
}

/* Own threads are kept on the CPUs of their node; the caller's is left alone. */
static void test_threads_are_bound(void **state)
{
    (void)state;
    if (!is_known() || pool_available_cpus() != 2) skip();
    moe4_allocator allocator = memory_default_allocator();
    cpu_set_t before, after;
    struct place places[4];
    sched_getaffinity(0, sizeof before, &before);
    struct pool *pool = pool_create(&allocator, 4, &topology);
    assert_int_equal(pool_threads(pool), 2);
    for (int round = 0; round < 20; round++) { /* workers 1 and 3 are the second thread's */
        pool_run(pool, look_around, places);
        for (int32_t w = 1; w < 4; w += 2) {
            assert_int_equal(places[w].node, 1);
            assert_int_equal(places[w].n_cpus, 1);
        }
    }
    sched_getaffinity(0, sizeof after, &after);
    assert_true(CPU_EQUAL(&before, &after));
    pool_destroy(pool);
}

/* The context's threads as they would be on a machine of two nodes. */
static moe4_context *open_on_two_nodes(int32_t n_threads)
{
    moe4_context *context = context_open(MOE4_ISA_AUTO, n_threads);
    pool_destroy(context->pool);
    context->pool = pool_create(&context->allocator, n_threads, &topology);
    assert_non_null(context->pool);
    return context;
}

static void test_same_bits(void **state)
{
    (void)state;
    if (!is_known()) skip();
    static const int64_t n_tokens[] = {1, 3, 70};
    for (int i = 0; i < 12; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        moe4_layer_config config = layer_config(160, 96, 6, 2);
        if (i % 2) config.output_size = 32; /* fewer panels of down than there are: all of the first node */
        struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 3};
        moe4_expert *experts = weights_create(&buffers, &config, &weights);
        moe4_context *one = context_open(MOE4_ISA_AUTO, 1), *two = open_on_two_nodes(1 + i % 4);
        moe4_layer *expected = layer_open(one, &config, experts), *layer = layer_open(two, &config, experts);
        struct call_plan plan = {.n_tokens = n_tokens[i % 3], .compute = (moe4_compute)(i / 6), .seed = (uint64_t)i};
        struct call first = call_create(&buffers, &config, &plan), second = call_create(&buffers, &config, &plan);
        call_must_run(&buffers, one, expected, &first);
        call_must_run(&buffers, two, layer, &second);
        call_compare(&first, &second);
        moe4_layer_destroy(expected);
        moe4_layer_destroy(layer);
        moe4_context_destroy(one);
        moe4_context_destroy(two);
        buffers_release(&buffers);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_made_up_nodes),
        cmocka_unit_test(test_nodes_without_allowed_cpus_do_not_count),
        cmocka_unit_test(test_nonsense_is_one_node),
        cmocka_unit_test(test_workers_follow_cpus),
        cmocka_unit_test(test_panels_are_dealt_out),
        cmocka_unit_test(test_threads_are_bound),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
