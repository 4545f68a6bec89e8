/* Deferral: the question whether to defer, and the combine that finishes a deferred call. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

enum { H = 96, I = 64, E = 7, A = 3, T = 29 };

/* A finished call whose y and deferred parts are all there. */
struct finished {
    struct buffers buffers;
    moe4_layer_config config;
    moe4_context *context;
    moe4_layer *layer;
    struct call call;
};

static struct finished *finish(moe4_dtype y_dtype, moe4_write write)
{
    struct finished *f = calloc(1, sizeof *f);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 3};
    struct call_plan plan = {.n_tokens = T,
                             .top_k = A,
                             .routing = ROUTE_IDS_F32,
                             .ids = IDS_WILD,
                             .y_dtype = y_dtype,
                             .write = write,
                             .gap = 5,
                             .seed = 4};
    f->config = layer_config(H, I, E, A);
    f->context = context_open(MOE4_ISA_AUTO, 2);
    f->layer = layer_open(f->context, &f->config, weights_create(&f->buffers, &f->config, &weights));
    f->call = call_create(&f->buffers, &f->config, &plan);
    call_must_run(&f->buffers, f->context, f->layer, &f->call);
    return f;
}

static void finished_destroy(struct finished *f)
{
    moe4_layer_destroy(f->layer);
    moe4_context_destroy(f->context);
    buffers_release(&f->buffers);
    free(f);
}

static moe4_deferred deferred_of(const struct finished *f)
{
    moe4_deferred deferred = MOE4_DEFERRED_INIT;
    deferred.n_tokens = T;
    deferred.top_k = A;
    deferred.output_size = H;
    deferred.gemm2_rows = f->call.result.gemm2_rows;
    deferred.n_rows = *f->call.result.n_rows;
    deferred.row_map = f->call.result.row_map;
    deferred.weights = f->call.result.weights;
    return deferred;
}

static void test_combine_is_the_call(void **state)
{
    (void)state;
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32};
    for (int i = 0; i < 6; i++) {
        struct finished *f = finish(dtypes[i % 3], i < 3 ? MOE4_WRITE_OVERWRITE : MOE4_WRITE_ADD);
        moe4_deferred deferred = deferred_of(f);
        moe4_result result = MOE4_RESULT_INIT;
        result.y = buffers_copy(&f->buffers, f->call.y_before, f->call.y_bytes);
        result.y_dtype = f->call.result.y_dtype;
        result.ldy = f->call.result.ldy;
        result.write = f->call.result.write;
        assert_int_equal(moe4_combine(f->context, &deferred, &result), MOE4_OK);
        assert_memory_equal(result.y, f->call.result.y, f->call.y_bytes);
        finished_destroy(f);
    }
}

static void test_scale_and_addend(void **state)
{
    (void)state;
    struct finished *f = finish(MOE4_DTYPE_F32, MOE4_WRITE_OVERWRITE);
    const float *sums = f->call.result.y;
    float *y = buffers_allocate(&f->buffers, T * H * sizeof *y);
    uint16_t *addend = buffers_allocate(&f->buffers, T * (H + 3) * sizeof *addend);
    for (int64_t i = 0; i < T * (H + 3); i++) store_value(addend, MOE4_DTYPE_F16, i, (double)(i % 17) - 8);
    moe4_deferred deferred = deferred_of(f);
    deferred.scale = 2.5f;
    deferred.addend = addend;
    deferred.addend_dtype = MOE4_DTYPE_F16;
    deferred.ld_addend = H + 3;
    moe4_result result = MOE4_RESULT_INIT;
    result.y = y;
    result.y_dtype = MOE4_DTYPE_F32;
    assert_int_equal(moe4_combine(f->context, &deferred, &result), MOE4_OK);
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < H; h++) {
            float scaled = sums[t * f->call.result.ldy + h] * 2.5f;
            float expected = scaled + (float)((t * (H + 3) + h) % 17 - 8);
            assert_true(y[t * H + h] == expected);
        }
    finished_destroy(f);
}

static void test_bad_map_is_refused(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip(); /* test_cuda_device.c */
    struct finished *f = finish(MOE4_DTYPE_BF16, MOE4_WRITE_OVERWRITE);
    int32_t *map = buffers_copy(&f->buffers, f->call.result.row_map, T * A * sizeof *map);
    uint16_t *y = buffers_allocate(&f->buffers, T * H * sizeof *y);
    moe4_deferred deferred = deferred_of(f);
    moe4_result result = MOE4_RESULT_INIT;
    result.y = y;
    deferred.row_map = map;
    const int32_t wrong[] = {-2, (int32_t)*f->call.result.n_rows, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        map[T * A - 1] = wrong[i];
        assert_int_equal(moe4_combine(f->context, &deferred, &result), MOE4_EINVAL);
        assert_non_null(strstr(moe4_context_message(f->context), "row_map[86]"));
        for (int64_t k = 0; k < T * H; k++) assert_int_equal(y[k], 0xFFFF);
    }
    map[T * A - 1] = -1;
    result.ids = map;
    assert_int_equal(moe4_combine(f->context, &deferred, &result), MOE4_EINVAL);
    result.ids = NULL;
    deferred.n_tokens = 0;
    deferred.row_map = NULL;
    assert_int_equal(moe4_combine(f->context, &deferred, &result), MOE4_OK);
    finished_destroy(f);
}

/* ---- The question ---- */

static moe4_deferral tensor_parallel(void)
{
    moe4_deferral deferral = MOE4_DEFERRAL_INIT;
    deferral.by_deployment = 1;
    deferral.parallel.tensor_size = 4;
    deferral.hidden_size = 2880;
    return deferral;
}

static int defers(moe4_deferral deferral, int64_t n_tokens)
{
    moe4_context *context = context_open(MOE4_ISA_C, 1);
    int32_t defer = -1;
    assert_int_equal(moe4_should_defer(context, &deferral, n_tokens, &defer), MOE4_OK);
    moe4_context_destroy(context);
    return defer;
}

static void test_who_defers(void **state)
{
    (void)state;
    moe4_deferral d = tensor_parallel();
    assert_int_equal(defers(d, 1), 1);
    assert_int_equal(defers(d, 0), 0);
    assert_int_equal(defers(d, 1 << 20), 1);

    d.by_deployment = 0;
    assert_int_equal(defers(d, 1), 0);
    d.by_scope = 1;
    d.scope_capacity = 128;
    assert_int_equal(defers(d, 128), 1);
    assert_int_equal(defers(d, 129), 0);

    d = tensor_parallel();
    d.deployment_max_tokens = 64;
    assert_int_equal(defers(d, 64), 1);
    assert_int_equal(defers(d, 65), 0);
    d.producer_max_tokens = 32;
    assert_int_equal(defers(d, 33), 0);
    d.deployment_max_tokens = d.producer_max_tokens = -1;
    assert_int_equal(defers(d, 1000), 1);

    d.output_size = 2880;
    assert_int_equal(defers(d, 1), 1);
    d.output_size = 2816;
    assert_int_equal(defers(d, 1), 0);
}

static void test_where_it_defers(void **state)
{
    (void)state;
    moe4_deferral d = tensor_parallel();
    int32_t *const others[] = {&d.parallel.data_size, &d.parallel.context_size, &d.parallel.sequence_size,
                               &d.parallel.expert_size};
    for (int i = 0; i < 4; i++) {
        *others[i] = 2;
        assert_int_equal(defers(d, 1), 0);
        *others[i] = 1;
        assert_int_equal(defers(d, 1), 1);
    }
    d.parallel.tensor_size = 1;
    assert_int_equal(defers(d, 1), 0);

    d.parallel.expert_size = 8;
    d.by_scope = 1;
    d.scope_capacity = 16;
    assert_int_equal(defers(d, 1), 0);
    d.scope_allows_experts = 1;
    assert_int_equal(defers(d, 1), 1);
    d.parallel.data_size = 2;
    assert_int_equal(defers(d, 1), 0);
}

static void test_scope_without_capacity(void **state)
{
    (void)state;
    moe4_context *context = context_open(MOE4_ISA_C, 1);
    moe4_deferral d = tensor_parallel();
    int32_t defer;
    d.by_scope = 1;
    for (d.scope_capacity = -1; d.scope_capacity <= 0; d.scope_capacity++) {
        assert_int_equal(moe4_should_defer(context, &d, 1, &defer), MOE4_EINVAL);
        assert_non_null(strstr(moe4_context_message(context), "positive"));
    }
    moe4_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_combine_is_the_call), cmocka_unit_test(test_scale_and_addend),
        cmocka_unit_test(test_bad_map_is_refused),  cmocka_unit_test(test_who_defers),
        cmocka_unit_test(test_where_it_defers),     cmocka_unit_test(test_scope_without_capacity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
