/* What never changes a bit: threads, batch, position, other tokens' experts, chunks, expert numbers, repetition, a
 * borrowed pool, fork, and the host's floating-point environment. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "call.h"
#include "layer.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { H = 160, I = 96, E = 9, A = 3, T = 61 };

static moe4_isa levels[MAX_LEVELS];
static int32_t n_levels;

/* A layer, and a call of all T tokens run on it by one thread. */
struct fixture {
    struct buffers buffers;
    moe4_layer_config config;
    moe4_expert *experts;
    moe4_context *context;
    moe4_layer *layer;
    struct call_plan plan;
    struct call expected;
};

/* A call of all T tokens.  Some have an activation so large that kernels treat their rows apart. */
static struct call all_tokens(struct fixture *f)
{
    struct call call = call_create(&f->buffers, &f->config, &f->plan);
    for (int64_t t = 3; t < T; t += 7) ((uint16_t *)call.batch.x)[t * H + t] = 0x7C12;
    return call;
}

/* The forms of call that stages tell apart. */
enum form {
    FORM_IDS,
    FORM_LOGITS,
    FORM_LOGITS_MXFP8,
    FORM_LOGITS_FP8,
    FORM_LOGITS_INT8,
    FORM_WEIGHT_ON_INPUT,
    N_FORMS
};

static struct fixture *fixture_create(moe4_isa isa, enum form form)
{
    struct fixture *f = calloc(1, sizeof *f);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 11};
    f->config = layer_config(H, I, E, A);
    f->config.n_local_experts = E - 1;
    f->experts = weights_create(&f->buffers, &f->config, &weights);
    f->config.compute = form == FORM_LOGITS_FP8 ? MOE4_COMPUTE_FP8 : MOE4_COMPUTE_BF16;
    f->context = context_open(isa, 1);
    f->layer = layer_open(f->context, &f->config, f->experts);
    static const moe4_compute computes[N_FORMS] = {[FORM_LOGITS_MXFP8] = MOE4_COMPUTE_MXFP8,
                                                   [FORM_LOGITS_FP8] = MOE4_COMPUTE_FP8,
                                                   [FORM_LOGITS_INT8] = MOE4_COMPUTE_INT8};
    const int has_logits = form >= FORM_LOGITS && form <= FORM_LOGITS_INT8;
    f->plan =
        (struct call_plan){.n_tokens = T,
                           .top_k = form == FORM_WEIGHT_ON_INPUT ? 1 : A,
                           .routing = has_logits ? ROUTE_LOGITS_F32 : ROUTE_IDS_F32,
                           .ids = IDS_WILD,
                           .compute = computes[form],
                           .weight_use = form == FORM_WEIGHT_ON_INPUT ? MOE4_WEIGHT_ON_INPUT : MOE4_WEIGHT_ON_OUTPUT,
                           .seed = 12};
    f->expected = all_tokens(f);
    call_must_run(&f->buffers, f->context, f->layer, &f->expected);
    return f;
}

static void fixture_destroy(struct fixture *f)
{
    moe4_layer_destroy(f->layer);
    moe4_context_destroy(f->context);
    buffers_release(&f->buffers);
    free(f);
}

typedef void fixture_test(struct fixture *f, moe4_isa isa);

/* Every level, every form of call. */
static void on_every_level(fixture_test *test)
{
    for (int32_t i = 0; i < n_levels; i++)
        for (int form = 0; form < N_FORMS; form++) {
            const int is_compute = form >= FORM_LOGITS && form <= FORM_LOGITS_INT8; /* in moe4_compute's order */
            if (is_compute && form - FORM_LOGITS >= n_computes()) continue;
            struct fixture *f = fixture_create(levels[i], (enum form)form);
            test(f, levels[i]);
            fixture_destroy(f);
        }
}

static struct call run_again(struct fixture *f, moe4_context *context, const moe4_layer *layer)
{
    struct call call = all_tokens(f);
    call_must_run(&f->buffers, context, layer, &call);
    return call;
}

/* ---- Threads and pools ---- */

static void check_threads(struct fixture *f, moe4_isa isa)
{
    for (int32_t n = 2; n <= 8; n++) {
        moe4_context *context = context_open(isa, n);
        moe4_layer *layer = layer_open(context, &f->config, f->experts); /* packed by n threads too */
        struct call call = run_again(f, context, layer);
        call_compare(&f->expected, &call);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
}

static void test_threads(void **state)
{
    (void)state;
    on_every_level(check_threads);
}

static void run_backwards(void *user, void (*task)(void *, int32_t), void *argument)
{
    for (int32_t w = *(int32_t *)user - 1; w >= 0; w--) task(argument, w);
}

static void check_borrowed_pool(struct fixture *f, moe4_isa isa)
{
    int32_t width = 5;
    moe4_thread_pool pool = {width, run_backwards, &width};
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_context *context;
    config.isa = isa;
    config.pool = &pool;
    assert_int_equal(moe4_context_create(&config, &context), MOE4_OK);
    assert_int_equal(moe4_context_describe(context, &info), MOE4_OK);
    assert_int_equal(info.n_threads, width);
    struct call call = run_again(f, context, f->layer);
    call_compare(&f->expected, &call);
    moe4_context_destroy(context);
}

static void test_borrowed_pool(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip();
    on_every_level(check_borrowed_pool);
}

static void test_fork(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip();
    struct fixture *f = fixture_create(MOE4_ISA_AUTO, FORM_LOGITS);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 3);
    struct call before = run_again(f, context, f->layer), call = all_tokens(f);
    call_compare(&f->expected, &before);
    pid_t child = fork();
    if (child == 0) {
        moe4_status status = call_run(&f->buffers, context, f->layer, &call);
        int differs = memcmp(call.result.y, f->expected.result.y, call.y_bytes);
        moe4_context_destroy(context);
        _exit(status || differs);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    struct call after = run_again(f, context, f->layer);
    call_compare(&f->expected, &after);
    moe4_context_destroy(context);
    fixture_destroy(f);
}

/* ---- Batches ---- */

/* A call of n of the expected call's tokens, in this order. */
static struct call take_tokens(struct fixture *f, const int64_t *tokens, int64_t n)
{
    struct call_plan plan = f->plan;
    plan.n_tokens = n;
    struct call call = call_create(&f->buffers, &f->config, &plan);
    const struct call *all = &f->expected;
    for (int64_t i = 0; i < n; i++) {
        memcpy((uint16_t *)call.batch.x + i * H, (const uint16_t *)all->batch.x + tokens[i] * H, H * 2);
        if (call.is_routed) {
            memcpy((float *)call.logits.logits + i * E, (const float *)all->logits.logits + tokens[i] * E, E * 4);
        } else {
            const int64_t a = call.A, from = tokens[i] * a;
            memcpy((int32_t *)call.topk.ids + i * a, all->topk.ids + from, (size_t)a * 4);
            memcpy((float *)call.topk.weights + i * a, (const float *)all->topk.weights + from, (size_t)a * 4);
        }
    }
    call_must_run(&f->buffers, f->context, f->layer, &call);
    return call;
}

static void check_tokens_alone(struct fixture *f, moe4_isa isa)
{
    (void)isa;
    for (int64_t t = 0; t < T; t += 4) {
        struct call call = take_tokens(f, &t, 1);
        call_compare_tokens(&f->expected, t, &call, 0);
    }
}

static void test_tokens_alone(void **state)
{
    (void)state;
    on_every_level(check_tokens_alone);
}

/* Batches of many sizes, of tokens drawn at random: the same token among others, elsewhere, twice. */
static void check_random_batches(struct fixture *f, moe4_isa isa)
{
    struct random random = {(uint64_t)isa};
    for (int64_t n = 2; n < 2 * T; n += 1 + n / 3) {
        int64_t tokens[2 * T];
        for (int64_t i = 0; i < n; i++) tokens[i] = random_below(&random, T);
        struct call call = take_tokens(f, tokens, n);
        for (int64_t i = 0; i < n; i++) call_compare_tokens(&f->expected, tokens[i], &call, i);
    }
}

static void test_random_batches(void **state)
{
    (void)state;
    on_every_level(check_random_batches);
}

/* Other kernels may serve who does not ask for the intermediate. */
static void check_without_intermediate(struct fixture *f, moe4_isa isa)
{
    (void)isa;
    int64_t tokens[T];
    for (int64_t t = 0; t < T; t++) tokens[t] = t;
    for (int64_t n = 1; n < 2 * T; n *= 2) {
        const int64_t n_tokens = n < T ? n : T;
        struct call call = take_tokens(f, tokens, n_tokens);
        const moe4_result all = call.result;
        memset(all.y, 0xA5, call.y_bytes);
        call.result.intermediate = NULL;
        call.result.intermediate_scale = NULL;
        call_must_run(&f->buffers, f->context, f->layer, &call);
        call.result = all;
        for (int64_t t = 0; t < n_tokens; t++) call_compare_tokens(&f->expected, t, &call, t);
    }
}

static void test_without_intermediate(void **state)
{
    (void)state;
    on_every_level(check_without_intermediate);
}

/* Matrices of several tiles that end within a block of any size, the second pair with so many experts a token that
 * there are more tiles than a GPU takes at once. */
static const struct wide {
    int64_t H, I;
    int32_t E, A;
} wide_layers[] = {{800, 544, 6, 3}, {1056, 160, 17, 16}};

/* A first token by itself: its rows are those of a batch. */
static void check_wide_token(const struct wide *wide, moe4_isa isa, moe4_compute compute, enum route_source routing)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 21};
    moe4_layer_config config = layer_config(wide->H, wide->I, wide->E, wide->A);
    config.n_local_experts = wide->E - 1;
    config.compute = compute == MOE4_COMPUTE_FP8 ? compute : MOE4_COMPUTE_BF16;
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call_plan plan = {.n_tokens = 3, .top_k = wide->A, .routing = routing, .compute = compute, .seed = 22};
    struct call all = call_create(&buffers, &config, &plan);
    const uint16_t largest = 0x4348; /* 200, in the last column: a scale that the whole row decides */
    ((uint16_t *)all.batch.x)[wide->H - 1] = largest;
    call_must_run(&buffers, context, layer, &all);
    plan.n_tokens = 1;
    struct call one = call_create(&buffers, &config, &plan);
    ((uint16_t *)one.batch.x)[wide->H - 1] = largest;
    const moe4_result result = one.result;
    call_must_run(&buffers, context, layer, &one);
    memset(result.y, 0xA5, one.y_bytes);
    memset(result.gemm2_rows, 0xA5, (size_t)(one.R * config.hidden_size) * 2);
    one.result.intermediate = one.result.intermediate_scale = NULL;
    call_must_run(&buffers, context, layer, &one);
    one.result = result;
    call_compare_tokens(&all, 0, &one, 0);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_wide_token(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 2 * n_levels; i++)
        for (int compute = 0; compute < n_computes(); compute++) {
            check_wide_token(&wide_layers[i % 2], levels[i / 2], (moe4_compute)compute, ROUTE_IDS_F32);
            check_wide_token(&wide_layers[i % 2], levels[i / 2], (moe4_compute)compute, ROUTE_LOGITS_F32);
        }
}

static void check_chunks(struct fixture *f, moe4_isa isa)
{
    (void)isa;
    static const int64_t sizes[] = {1, 3, 7, 16, 50, T * A - 1};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        f->layer->chunk_rows = sizes[i];
        struct call call = run_again(f, f->context, f->layer);
        call_compare(&f->expected, &call);
    }
}

static void test_chunks(void **state)
{
    (void)state;
    on_every_level(check_chunks);
}

/* ---- Expert numbers ---- */

static void test_relabelled_experts(void **state)
{
    (void)state;
    struct fixture *f = fixture_create(MOE4_ISA_AUTO, FORM_IDS);
    moe4_expert experts[E - 1];
    int32_t map[E];
    for (int32_t e = 0; e < E - 1; e++) map[e] = (e * 3 + 2) % (E - 1), experts[map[e]] = f->experts[e];
    moe4_layer *layer = layer_open(f->context, &f->config, experts);
    struct call call = all_tokens(f);
    int32_t *ids = (int32_t *)call.topk.ids;
    for (int64_t p = 0; p < call.R; p++)
        if (ids[p] >= 0 && ids[p] < E - 1) ids[p] = map[ids[p]];
    call_must_run(&f->buffers, f->context, layer, &call);
    assert_memory_equal(call.result.y, f->expected.result.y, call.y_bytes);
    moe4_layer_destroy(layer);

    /* The same by an expert map over the original weights. */
    moe4_layer_config mapped = f->config;
    int32_t back[E];
    for (int32_t e = 0; e < E - 1; e++) back[map[e]] = e;
    back[E - 1] = -1;
    mapped.expert_map = back;
    layer = layer_open(f->context, &mapped, f->experts);
    call_must_run(&f->buffers, f->context, layer, &call);
    assert_memory_equal(call.result.y, f->expected.result.y, call.y_bytes);
    moe4_layer_destroy(layer);
    fixture_destroy(f);
}

/* ---- Repetition ---- */

static void test_2000_runs(void **state)
{
    (void)state;
    struct fixture *f = fixture_create(MOE4_ISA_AUTO, FORM_LOGITS);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    struct call call = run_again(f, context, f->layer);
    for (int i = 0; i < 2000; i++) {
        memset(call.result.y, i, call.y_bytes);
        assert_int_equal(moe4_forward_router(context, f->layer, &call.batch, &call.logits, &call.result), MOE4_OK);
        assert_memory_equal(call.result.y, f->expected.result.y, call.y_bytes);
    }
    call_compare(&f->expected, &call);
    moe4_context_destroy(context);
    fixture_destroy(f);
}

/* ---- The floating-point environment ---- */

#if defined(__x86_64__)

/* Subnormals where they can be: in x, in weights' scales, in biases, in the caller's weights. */
static struct call subnormal_call(struct fixture *f)
{
    f->plan.x_dtype = MOE4_DTYPE_F16;
    f->plan.y_dtype = MOE4_DTYPE_F32;
    struct call call = call_create(&f->buffers, &f->config, &f->plan);
    uint16_t *x = (uint16_t *)call.batch.x;
    for (int64_t i = 0; i < call.T * H; i += 3) x[i] &= 0x83FF;
    if (!call.is_routed)
        for (int64_t p = 0; p < call.R; p += 2) ((float *)call.topk.weights)[p] *= 0x1p-130f;
    return call;
}

static void set_subnormal_weights(struct fixture *f)
{
    f->config.activation = MOE4_ACTIVATION_GEGLU;
    f->config.limit = (moe4_param)MOE4_PARAM_INIT;
    for (int32_t l = 0; l < E - 1; l += 2) {
        memset((uint8_t *)f->experts[l].gate_up.scales, 1, H / 32 * I);
        for (int64_t h = 0; h < H; h += 2) ((float *)f->experts[l].down.bias)[h] *= 0x1p-127f;
    }
}

struct route_output {
    int32_t ids[T * A];
    float weights[T * A];
};

static void run_under(uint32_t mxcsr, struct fixture *f, struct call *call, struct route_output *routed)
{
    moe4_routing routing = f->config.routing;
    moe4_logits logits = MOE4_LOGITS_INIT;
    moe4_layer *layer = NULL;
    logits.logits = call->batch.x; /* any numbers */
    logits.dtype = MOE4_DTYPE_F16;
    logits.ld = H;
    routing.method = MOE4_ROUTING_SIGMOID_RENORM;
    const uint32_t host = _mm_getcsr();
    _mm_setcsr(mxcsr);
    moe4_status status = moe4_layer_create(f->context, &f->config, f->experts, &layer);
    if (!status) status = call_run(&f->buffers, f->context, layer, call);
    if (!status) status = moe4_route(f->context, &routing, E, T, &logits, NULL, routed->ids, routed->weights);
    moe4_layer_destroy(layer);
    const uint32_t after = _mm_getcsr();
    _mm_setcsr(host);
    assert_int_equal(status, MOE4_OK);
    assert_int_equal(after & ~0x3Fu, mxcsr & ~0x3Fu);
}

static void check_fpenv(struct fixture *f, moe4_isa isa)
{
    (void)isa;
    static const uint32_t hosts[] = {
        0x9FC0,          /* subnormals flushed, in and out */
        0x3F80,          /* round down */
        0x5F80,          /* round up */
        0x7F80 | 0x8040, /* towards zero, and flushed */
        0x1F80 & ~0xF80u /* every exception but "inexact" kills */
    };
    struct route_output expected_route = {0};
    set_subnormal_weights(f);
    struct call expected = subnormal_call(f);
    run_under(0x1F80, f, &expected, &expected_route);
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        struct route_output routed = {0};
        struct call call = subnormal_call(f);
        run_under(hosts[i], f, &call, &routed);
        call_compare(&expected, &call);
        assert_memory_equal(&routed, &expected_route, sizeof routed);
    }
}

static void test_fpenv(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip();
    on_every_level(check_fpenv);
}

#endif

int main(void)
{
    n_levels = isa_levels(levels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_borrowed_pool),
        cmocka_unit_test(test_fork),
        cmocka_unit_test(test_tokens_alone),
        cmocka_unit_test(test_random_batches),
        cmocka_unit_test(test_without_intermediate),
        cmocka_unit_test(test_wide_token),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_relabelled_experts),
        cmocka_unit_test(test_2000_runs),
#if defined(__x86_64__)
        cmocka_unit_test(test_fpenv),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
