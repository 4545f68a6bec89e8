/* The true shapes of gpt-oss-20b and -120b, from no token to 1024.  The largest batch is judged by the oracle, the
 * smaller ones must have its bits. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

enum { H = 2880, I = 2880, A = 4, N_COUNTS = 10 };
static const int64_t counts[N_COUNTS] = {0, 1, 2, 3, 7, 8, 31, 64, 257, 1024};

/* Weights made when they are asked for, one expert at a time. */
struct source {
    const moe4_layer_config *config;
    struct weight_plan plan;
    struct buffers buffers;
};

static moe4_status read_expert(void *user, int32_t l, moe4_expert *expert)
{
    struct source *source = user;
    buffers_release(&source->buffers);
    *expert = weights_expert(&source->buffers, source->config, &source->plan, l);
    return MOE4_OK;
}

static void check_shape(int32_t n_experts, moe4_isa isa, int32_t n_counts, int64_t max_rows)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, n_experts, A);
    struct source source = {&config, {.biases = BIAS_BOTH, .bias_dtype = MOE4_DTYPE_BF16, .seed = 20}, {0}};
    const moe4_expert_source reader = {.read = read_expert, .user = &source};
    moe4_context *context = context_open(isa, 0);
    moe4_layer *layer;
    assert_int_equal(moe4_layer_create_from(context, &config, &reader, &layer), MOE4_OK);

    struct call_plan plan = {.n_tokens = counts[n_counts - 1], .seed = 21};
    struct call largest = call_create(&buffers, &config, &plan);
    largest.label = "largest batch";
    call_must_run(&buffers, context, layer, &largest);
    call_check_from(&largest, &reader, isa, max_rows);
    buffers_release(&source.buffers);
    for (int32_t i = 0; i < n_counts - 1; i++) {
        struct buffers small = {BUFFERS_PLAIN, NULL};
        plan.n_tokens = counts[i];
        struct call call = call_create(&small, &config, &plan);
        call_must_run(&small, context, layer, &call);
        for (int64_t t = 0; t < counts[i]; t++) call_compare_tokens(&largest, t, &call, t);
        buffers_release(&small);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_120b(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    if (is_sanitized()) skip();
    check_shape(128, levels[isa_levels(levels) - 1], N_COUNTS, 12);
}

/* The slower levels with fewer tokens. */
static void test_20b_on_every_level(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n_levels = isa_levels(levels);
    for (int32_t i = 0; i < n_levels; i++) {
        const int is_best = i == n_levels - 1;
        if (is_sanitized() && is_best) check_shape(32, levels[i], 7, 2);
        if (!is_sanitized()) check_shape(32, levels[i], is_best ? N_COUNTS : i ? 7 : 4, is_best ? 16 : 6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_20b_on_every_level),
        cmocka_unit_test(test_120b),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
