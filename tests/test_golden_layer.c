/* The golden layers on every level this CPU offers: the values that other programs computed for the same weights. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "golden.h"

/* How far two bf16 are apart in the order of bf16 numbers. */
static int32_t distance(uint16_t a, uint16_t b)
{
    int32_t place[2] = {a, b};
    for (int i = 0; i < 2; i++)
        if (place[i] & 0x8000) place[i] = -(place[i] & 0x7FFF);
    return abs(place[0] - place[1]);
}

/* At least 99 % equal, the rest one apart, in the rows that are not tainted; a row that differs becomes so.  What
 * follows from a tainted row is judged by its stage's own bounds (call_check) instead. */
static void check_rounded(const char *what, const uint16_t *got, const uint16_t *expected, int64_t rows,
                          int64_t columns, uint8_t *tainted)
{
    int64_t n_checked = 0, n_different = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t n_before = n_different;
        if (tainted[r]) continue;
        for (int64_t i = r * columns; i < (r + 1) * columns; i++) {
            int32_t apart = distance(got[i], expected[i]);
            if (apart > 1)
                fail_msg("%s [%lld][%lld] is %.9g, expected %.9g", what, (long long)r, (long long)(i % columns),
                         ref_bf16(got[i]), ref_bf16(expected[i]));
            n_different += apart;
        }
        n_checked += columns;
        tainted[r] = n_different > n_before;
    }
    if (n_different * 100 > n_checked)
        fail_msg("%s: %lld of %lld elements are one apart", what, (long long)n_different, (long long)n_checked);
    if (rows >= 8 && n_checked * 2 < rows * columns) fail_msg("%s: most rows are tainted", what);
}

/* Golden inputs in a call that asks for every output. */
static struct call golden_call(struct buffers *buffers, const golden_layer *golden, enum route_source routing)
{
    struct call_plan plan = {.n_tokens = golden->T, .top_k = golden->config.routing.top_k, .routing = routing};
    struct call call = call_create(buffers, &golden->config, &plan);
    call.batch.x = golden->hidden_states;
    call.logits.logits = golden->router_logits;
    call.topk.ids = golden->topk_ids;
    call.topk.weights = golden->topk_weights;
    return call;
}

static void check_unrounded(const struct call *call, const golden_layer *golden)
{
    const int64_t T = golden->T, H = golden->config.hidden_size;
    double *got = calloc((size_t)(T * H), sizeof *got), *expected = calloc((size_t)(T * H), sizeof *expected);
    ref_frobenius frobenius;
    for (int64_t i = 0; i < T * H; i++) {
        got[i] = ref_load(call->result.y, call->result.y_dtype, i);
        expected[i] = golden->output[i];
    }
    ref_compare(got, expected, T, H, &frobenius);
    if (!(frobenius.overall <= 4e-3)) fail_msg("output: relative Frobenius error %g", frobenius.overall);
    free(expected);
    free(got);
}

static void check_stages(const struct call *call, const golden_layer *golden)
{
    const int64_t T = golden->T, A = call->A, R = T * A;
    const int64_t H = golden->config.hidden_size, I = golden->config.intermediate_size;
    const moe4_result *result = &call->result;
    uint8_t *rows = calloc((size_t)R, 1), *tokens = calloc((size_t)T, 1);
    uint16_t *weights = calloc((size_t)R, sizeof *weights);
    for (int64_t i = 0; i < R; i++) weights[i] = ref_to_bf16(result->weights[i]);
    assert_memory_equal(result->ids, golden->topk_ids, (size_t)R * sizeof *result->ids);
    assert_memory_equal(result->row_map, golden->row_map, (size_t)R * sizeof *result->row_map);
    check_rounded("weights", weights, golden->expert_weights, T, A, tokens);
    check_rounded("intermediate", result->intermediate, golden->intermediate, R, I, rows);
    check_rounded("gemm2 rows", result->gemm2_rows, golden->gemm2_rows, R, H, rows);
    for (int64_t p = 0; p < R; p++) tokens[p / A] |= rows[result->row_map[p]];
    check_rounded("output", result->y, golden->rounded_output, T, H, tokens);
    free(weights);
    free(tokens);
    free(rows);
}

static void check_layer(const char *name, moe4_isa isa)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    golden_layer *golden = golden_layer_open(name);
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &golden->config, golden->experts);
    static const enum route_source sources[] = {ROUTE_LOGITS_F32, ROUTE_OWN_ROUTER, ROUTE_IDS_F32};
    for (int i = 0; i < 3; i++) {
        struct call call = golden_call(&buffers, golden, sources[i]);
        call.label = name;
        call_must_run(&buffers, context, layer, &call);
        call_check(&call, golden->experts, isa, call.R);
        check_unrounded(&call, golden);
        assert_memory_equal(call.result.ids, golden->topk_ids, (size_t)call.R * sizeof(int32_t));
        if (sources[i] == ROUTE_LOGITS_F32) check_stages(&call, golden);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    golden_layer_close(golden);
    buffers_release(&buffers);
}

static void test_golden_layers(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n_levels = isa_levels(levels);
    for (int32_t i = 0; i < n_levels; i++)
        for (int j = 0; j < 3; j++) check_layer(golden_layer_names[j], levels[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
