/* A layer's own router, wide enough that its threads share the weights: the oracle's logits, and the same bits for any
 * threads, batch and position. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "call.h"

enum { H = 32, I = 32, E = 60, A = 2, WIDTH = 8192, T = 523 /* more than the logits of a block */ };

struct fixture {
    struct buffers buffers;
    moe4_layer_config config;
    moe4_expert *experts;
};

static struct fixture fixture_create(void)
{
    struct fixture f = {.config = layer_config(H, I, E, A)};
    const struct weight_plan weights = {.seed = 5};
    f.config.router.hidden_size = WIDTH;
    router_create(&f.buffers, &f.config, 6);
    f.experts = weights_create(&f.buffers, &f.config, &weights);
    return f;
}

/* The first n_tokens of the same batch, on n_threads. */
static struct call run(struct fixture *f, int32_t n_threads, int64_t n_tokens)
{
    const struct call_plan plan = {.n_tokens = n_tokens, .top_k = A, .routing = ROUTE_OWN_ROUTER, .seed = 7};
    struct call call = call_create(&f->buffers, &f->config, &plan);
    moe4_context *context = context_open(MOE4_ISA_AUTO, n_threads);
    moe4_layer *layer = layer_open(context, &f->config, f->experts);
    call_must_run(&f->buffers, context, layer, &call);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    return call;
}

static void test_oracle(void **state)
{
    (void)state;
    struct fixture f = fixture_create();
    moe4_context *context = context_open(MOE4_ISA_AUTO, 3);
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    assert_int_equal(moe4_context_describe(context, &info), MOE4_OK);
    moe4_context_destroy(context);
    for (int64_t n = 1; n <= 20; n += 6) {
        struct call call = run(&f, 3, n);
        call_check(&call, f.experts, info.isa, n * A);
    }
    buffers_release(&f.buffers);
}

static void test_same_bits(void **state)
{
    (void)state;
    struct fixture f = fixture_create();
    struct call expected = run(&f, 1, T);
    for (int32_t n_threads = 2; n_threads <= 5; n_threads++) {
        struct call call = run(&f, n_threads, T);
        call_compare(&expected, &call);
        for (int64_t n = 1; n <= 33; n += 8) {
            struct call few = run(&f, n_threads, n);
            for (int64_t t = 0; t < n; t++) call_compare_tokens(&expected, t, &few, t);
        }
    }
    buffers_release(&f.buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
