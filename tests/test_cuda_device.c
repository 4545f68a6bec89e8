/* What only a GPU has: faults that are found after a call has returned, graphs whose inputs and token count change
 * between replays, layers, contexts and devices side by side, tuning there. */
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "backend.h"
#include "call.h"
#include "test_cuda_host.h"
#include "tuning.h"

#undef moe4_forward_router /* the others wait for the device, which a capture must not */
moe4_status moe4_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                const moe4_logits *logits, const moe4_result *result);
moe4_status finished_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                    const moe4_logits *logits, const moe4_result *result);

enum { H = 160, I = 96, E = 9, A = 3, T = 61 };

static void check(cudaError_t error)
{
    if (error) fail_msg("%s", cudaGetErrorString(error));
}

/* ---- Layers and calls ---- */

struct layer_call {
    struct buffers buffers;
    moe4_layer_config config;
    moe4_context *context;
    moe4_layer *layer;
    struct call call;
};

static moe4_layer_config hash_config(struct buffers *buffers)
{
    enum { VOCABULARY = 50 };
    int32_t *table = buffers_allocate(buffers, VOCABULARY * A * sizeof *table);
    for (int i = 0; i < VOCABULARY * A; i++) table[i] = (i * 7 + i / A) % E;
    moe4_layer_config config = layer_config(H, I, E, A);
    config.routing.method = MOE4_ROUTING_HASH;
    config.routing.hash_table = table;
    config.routing.hash_table_dtype = MOE4_DTYPE_I32;
    config.routing.vocab_size = VOCABULARY;
    return config;
}

/* A layer and a call of T tokens that has not run. */
static struct layer_call *prepare_call(int is_hash, uint64_t seed)
{
    struct layer_call *c = calloc(1, sizeof *c);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = seed};
    struct call_plan plan = {.n_tokens = T, .routing = ROUTE_LOGITS_F32, .seed = seed + 1};
    c->config = is_hash ? hash_config(&c->buffers) : layer_config(H, I, E, A);
    c->context = context_open(MOE4_ISA_AUTO, 1);
    c->layer = layer_open(c->context, &c->config, weights_create(&c->buffers, &c->config, &weights));
    c->call = call_create(&c->buffers, &c->config, &plan);
    return c;
}

static void release_call(struct layer_call *c)
{
    moe4_layer_destroy(c->layer);
    moe4_context_destroy(c->context);
    buffers_release(&c->buffers);
    free(c);
}

static void expect_fault(moe4_context *context, const char *message)
{
    for (int i = 0; i < 2; i++) {
        assert_int_equal(moe4_context_check(context), MOE4_EINVAL);
        if (!strstr(moe4_context_message(context), message)) fail_msg("%s", moe4_context_message(context));
    }
    assert_int_equal(moe4_context_clear(context), MOE4_OK);
    assert_int_equal(moe4_context_check(context), MOE4_OK);
}

/* ---- Memory ---- */

/* What is packed of experts that nobody chose may be anything. */
static void test_unchosen_experts(void **state)
{
    (void)state;
    struct layer_call *c = prepare_call(0, 71);
    struct call_plan plan = {.n_tokens = T, .top_k = A, .routing = ROUTE_IDS_F32, .seed = 72};
    struct call calls[2];
    for (int i = 0; i < 2; i++) {
        calls[i] = call_create(&c->buffers, &c->config, &plan);
        for (int64_t p = 0; p < calls[i].R; p++)
            ((int32_t *)calls[i].topk.ids)[p] = p % 3 == 0 ? 1 : p % 3 == 1 ? 4 : -1;
        call_must_run(&c->buffers, c->context, c->layer, &calls[i]);
        struct layer_part parts[MAX_PARTS];
        int32_t n_parts;
        assert_int_equal(c->layer->backend->list_parts(c->context, c->layer, parts, &n_parts), MOE4_OK);
        for (int m = 0; m < n_parts - 1; m++) {
            const size_t bytes = (size_t)parts[m].n_bytes / E;
            for (int l = 0; l < E; l++)
                if (l != 1 && l != 4) check(cudaMemset((char *)*parts[m].slot + (size_t)l * bytes, 0xFF, bytes));
        }
    }
    call_compare(&calls[0], &calls[1]);
    release_call(c);
}

/* x and y of more than 2^32 elements, gaps included. */
static void test_rows_far_apart(void **state)
{
    (void)state;
    enum { N_TOKENS = 4200, LD = 1 << 20 };
    struct layer_call *c = prepare_call(0, 73);
    struct call_plan plan = {.n_tokens = N_TOKENS, .routing = ROUTE_LOGITS_F32, .seed = 74};
    struct call near = call_create(&c->buffers, &c->config, &plan), far = near;
    const size_t row_bytes = H * sizeof(uint16_t), stride = LD * sizeof(uint16_t);
    void *x = NULL, *y = NULL;
    if (cudaMalloc(&x, N_TOKENS * stride) || cudaMalloc(&y, N_TOKENS * stride)) skip(); /* a small GPU */
    check(cudaMemcpy2D(x, stride, near.batch.x, row_bytes, row_bytes, N_TOKENS, cudaMemcpyDefault));
    far.batch.x = x;
    far.result.y = y;
    far.batch.ldx = far.result.ldy = LD;
    call_must_run(&c->buffers, c->context, c->layer, &near);
    call_must_run(&c->buffers, c->context, c->layer, &far);
    void *rows = buffers_allocate(&c->buffers, N_TOKENS * row_bytes);
    check(cudaMemcpy2D(rows, row_bytes, y, stride, row_bytes, N_TOKENS, cudaMemcpyDefault));
    assert_memory_equal(rows, near.result.y, N_TOKENS * row_bytes);
    check(cudaFree(x));
    check(cudaFree(y));
    release_call(c);
}

/* ---- Faults ---- */

static void test_bad_token_ids(void **state)
{
    (void)state;
    static const int32_t bad[] = {-1, 50, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        struct layer_call *c = prepare_call(1, 21);
        int32_t *ids = buffers_allocate(&c->buffers, T * sizeof *ids);
        for (int t = 0; t < T; t++) ids[t] = t % 50;
        c->call.batch.token_ids = ids;
        call_must_run(&c->buffers, c->context, c->layer, &c->call);
        assert_int_equal(moe4_context_check(c->context), MOE4_OK);
        struct call second = call_create(&c->buffers, &c->config, &c->call.plan);
        second.batch.token_ids = ids;
        ids[17] = bad[i];
        call_must_run(&c->buffers, c->context, c->layer, &second);
        for (int h = 0; h < H; h++) assert_true(isnan(ref_bf16(((uint16_t *)second.result.y)[17 * H + h])));
        for (int a = 0; a < A; a++) assert_int_equal(second.result.ids[17 * A + a], -1);
        for (int t = 0; t < T; t++)
            if (t != 17)
                assert_memory_equal((uint16_t *)second.result.y + t * H, (uint16_t *)c->call.result.y + t * H, H * 2);
        expect_fault(c->context, "token_ids[17] was");
        release_call(c);
    }
}

static void test_bad_token_counts(void **state)
{
    (void)state;
    static const int32_t bad[] = {-1, T + 1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        struct layer_call *c = prepare_call(0, 22);
        call_must_run(&c->buffers, c->context, c->layer, &c->call);
        struct call second = call_create(&c->buffers, &c->config, &c->call.plan);
        second.batch.n_tokens_device = buffers_copy(&c->buffers, &bad[i], sizeof bad[i]);
        call_must_run(&c->buffers, c->context, c->layer, &second);
        if (bad[i] < 0)
            assert_memory_equal(second.result.y, second.y_before, second.y_bytes);
        else
            assert_memory_equal(second.result.y, c->call.result.y, second.y_bytes);
        expect_fault(c->context, "expected 0 to n_tokens 61");
        release_call(c);
    }
}

static void test_bad_row_map(void **state)
{
    (void)state;
    struct layer_call *c = prepare_call(0, 23);
    call_must_run(&c->buffers, c->context, c->layer, &c->call);
    const int32_t n_rows = (int32_t)*c->call.result.n_rows, wrong[] = {-2, n_rows, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        int32_t *map = buffers_copy(&c->buffers, c->call.result.row_map, T * A * sizeof *map);
        moe4_deferred deferred = MOE4_DEFERRED_INIT;
        moe4_result result = MOE4_RESULT_INIT;
        map[9 * A + 1] = wrong[i];
        deferred.n_tokens = T;
        deferred.top_k = A;
        deferred.output_size = H;
        deferred.gemm2_rows = c->call.result.gemm2_rows;
        deferred.n_rows = n_rows;
        deferred.row_map = map;
        deferred.weights = c->call.result.weights;
        result.y = buffers_allocate(&c->buffers, c->call.y_bytes);
        assert_int_equal(moe4_combine(c->context, &deferred, &result), MOE4_OK);
        const uint16_t *y = result.y, *expected = c->call.result.y;
        for (int64_t k = 0; k < T * H; k++) assert_true(k / H == 9 ? isnan(ref_bf16(y[k])) : y[k] == expected[k]);
        expect_fault(c->context, "row_map of token 9 had the entry");
    }
    release_call(c);
}

/* ---- Graphs ---- */

/* One graph, replayed with other logits, x and token counts than it was captured with: the bits of direct calls. */
static void test_graph_replay(void **state)
{
    (void)state;
    struct layer_call *c = prepare_call(0, 31);
    int32_t *count = buffers_allocate(&c->buffers, sizeof *count);
    struct call *call = &c->call;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaStreamCreate(&stream));
    *count = T;
    call->batch.n_tokens_device = count;
    call_must_run(&c->buffers, c->context, c->layer, call); /* gives it a workspace */
    call->batch.stream = stream;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(moe4_forward_router(c->context, c->layer, &call->batch, &call->logits, &call->result), MOE4_OK);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    static const int32_t counts[] = {T, 1, 0, 33, 8, T - 1};
    for (int i = 0; i < 6; i++) {
        struct call_plan plan = call->plan;
        plan.seed = 100 + (uint64_t)i;
        struct call direct = call_create(&c->buffers, &c->config, &plan);
        call_must_run(&c->buffers, c->context, c->layer, &direct);
        memcpy((void *)call->batch.x, direct.batch.x, (size_t)(T * H) * 2);
        memcpy((void *)call->logits.logits, direct.logits.logits, (size_t)(T * E) * 4);
        memset(call->result.y, 0xFF, call->y_bytes);
        *count = counts[i];
        check(cudaGraphLaunch(replay, stream));
        check(cudaStreamSynchronize(stream));
        const size_t bytes = (size_t)counts[i] * H * 2;
        assert_memory_equal(call->result.y, direct.result.y, bytes);
        for (size_t b = bytes; b < call->y_bytes; b++) assert_int_equal(((uint8_t *)call->result.y)[b], 0xFF);
    }
    assert_int_equal(moe4_context_check(c->context), MOE4_OK);
    check(cudaGraphExecDestroy(replay));
    check(cudaGraphDestroy(graph));
    check(cudaStreamDestroy(stream));
    release_call(c);
}

/* ---- Side by side ---- */

static moe4_context *open_on(int32_t index, moe4_isa isa)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.device = MOE4_DEVICE_CUDA;
    config.device_index = index;
    config.isa = isa;
    if (moe4_context_create(&config, &context)) fail_msg("%s", moe4_context_message(context));
    return context;
}

/* Two layers, two contexts each, four streams, all under way together. */
static void test_layers_and_contexts(void **state)
{
    (void)state;
    enum { N_CALLS = 4, N_ROUNDS = 20 };
    struct layer_call *layers[2] = {prepare_call(0, 41), prepare_call(0, 42)};
    struct call calls[N_CALLS];
    moe4_context *contexts[N_CALLS];
    cudaStream_t streams[N_CALLS];
    for (int i = 0; i < 2; i++)
        call_must_run(&layers[i]->buffers, layers[i]->context, layers[i]->layer, &layers[i]->call);
    for (int i = 0; i < N_CALLS; i++) {
        struct layer_call *c = layers[i % 2];
        contexts[i] = open_on(0, gpu_isa());
        calls[i] = call_create(&c->buffers, &c->config, &c->call.plan);
        call_must_run(&c->buffers, contexts[i], c->layer, &calls[i]);
        memset(calls[i].result.y, 0xFF, calls[i].y_bytes);
        check(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        calls[i].batch.stream = streams[i];
    }
    for (int n = 0; n < N_ROUNDS * N_CALLS; n++) {
        const int i = n % N_CALLS;
        assert_int_equal(
            moe4_forward_router(contexts[i], layers[i % 2]->layer, &calls[i].batch, &calls[i].logits, &calls[i].result),
            MOE4_OK);
    }
    check(cudaDeviceSynchronize());
    for (int i = 0; i < N_CALLS; i++) {
        call_compare(&layers[i % 2]->call, &calls[i]);
        check(cudaStreamDestroy(streams[i]));
        moe4_context_destroy(contexts[i]);
    }
    for (int i = 0; i < 2; i++) release_call(layers[i]);
}

/* The same layer on every device of the machine, from a thread whose device is another: equal bits. */
static void test_devices(void **state)
{
    (void)state;
    int count, current;
    check(cudaGetDeviceCount(&count));
    if (count < 2) skip();
    struct layer_call *c = prepare_call(0, 51);
    call_must_run(&c->buffers, c->context, c->layer, &c->call);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 51};
    moe4_expert *experts = weights_create(&c->buffers, &c->config, &weights);
    for (int index = 1; index < count; index++) {
        moe4_context *context = open_on(index, gpu_isa());
        moe4_layer *layer = layer_open(context, &c->config, experts);
        struct call call = call_create(&c->buffers, &c->config, &c->call.plan);
        cudaStream_t stream;
        check(cudaSetDevice(index));
        check(cudaStreamCreate(&stream));
        check(cudaSetDevice(0));
        call.batch.stream = stream;
        call_must_run(&c->buffers, context, layer, &call);
        check(cudaStreamSynchronize(stream));
        check(cudaGetDevice(&current));
        assert_int_equal(current, 0);
        call_compare(&c->call, &call);
        assert_int_equal(moe4_forward_router(c->context, layer, &call.batch, &call.logits, &call.result), MOE4_EINVAL);
        assert_non_null(strstr(moe4_context_message(c->context), "the layer is on device"));
        check(cudaStreamDestroy(stream));
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
    release_call(c);
}

/* A thread that runs a call of its own again and again, on a device that is not its current one. */
struct caller {
    moe4_context *context;
    moe4_layer *layer;
    struct call call;
    cudaStream_t stream;
    moe4_status status;
    cudaError_t error;
};

static void *caller_run(void *user)
{
    struct caller *self = user;
    for (int i = 0; i < 100 && !self->status && !self->error; i++) {
        self->status =
            moe4_forward_router(self->context, self->layer, &self->call.batch, &self->call.logits, &self->call.result);
        self->error = cudaStreamSynchronize(self->stream);
    }
    return NULL;
}

/* Threads at once, each with its context and layer, on devices in turn: what the first device gives alone. */
static void test_threads(void **state)
{
    (void)state;
    enum { N_THREADS = 4 };
    int count;
    check(cudaGetDeviceCount(&count));
    struct layer_call *c = prepare_call(0, 52);
    call_must_run(&c->buffers, c->context, c->layer, &c->call);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 52};
    moe4_expert *experts = weights_create(&c->buffers, &c->config, &weights);
    struct caller callers[N_THREADS] = {{0}};
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        struct caller *caller = &callers[i];
        caller->context = open_on(i % count, gpu_isa());
        caller->layer = layer_open(caller->context, &c->config, experts);
        caller->call = call_create(&c->buffers, &c->config, &c->call.plan);
        check(cudaSetDevice(i % count));
        check(cudaStreamCreateWithFlags(&caller->stream, cudaStreamNonBlocking));
        check(cudaSetDevice(0));
        caller->call.batch.stream = caller->stream;
        call_must_run(&c->buffers, caller->context, caller->layer, &caller->call);
        check(cudaStreamSynchronize(caller->stream));
        memset(caller->call.result.y, 0xFF, caller->call.y_bytes);
    }
    for (int i = 0; i < N_THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, caller_run, &callers[i]), 0);
    for (int i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < N_THREADS; i++) {
        assert_int_equal(callers[i].status, MOE4_OK);
        check(callers[i].error);
        call_compare(&c->call, &callers[i].call);
        check(cudaStreamDestroy(callers[i].stream));
        moe4_layer_destroy(callers[i].layer);
        moe4_context_destroy(callers[i].context);
    }
    release_call(c);
}

/* ---- Levels ---- */

/* A layer of the portable level runs on both, with the same bits; one of Hopper's only there. */
static void test_levels(void **state)
{
    (void)state;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    struct layer_call *c = prepare_call(0, 61);
    assert_int_equal(moe4_context_describe(c->context, &info), MOE4_OK);
    moe4_context *portable = open_on(0, MOE4_ISA_SM_80);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 61};
    moe4_layer *layer = layer_open(portable, &c->config, weights_create(&c->buffers, &c->config, &weights));
    moe4_layer_info layer_info = MOE4_LAYER_INFO_INIT;
    assert_int_equal(moe4_layer_describe(layer, &layer_info), MOE4_OK);
    assert_string_equal(layer_info.kernel, "gemm_mma");
    struct call second = call_create(&c->buffers, &c->config, &c->call.plan);
    call_must_run(&c->buffers, portable, layer, &c->call);
    call_must_run(&c->buffers, c->context, layer, &second);
    call_compare(&c->call, &second);
    if (info.isa == MOE4_ISA_SM_90A) {
        assert_int_equal(finished_forward_router(portable, c->layer, &second.batch, &second.logits, &second.result),
                         MOE4_EINVAL);
        assert_non_null(strstr(moe4_context_message(portable), "gemm_sm90"));
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(portable);
    release_call(c);
}

/* ---- Tuning ---- */

static void use_tactic(moe4_context *context, const moe4_layer *layer, int32_t tile_tokens)
{
    moe4_tuning_entry entry = MOE4_TUNING_ENTRY_INIT;
    entry.hidden_size = layer->H;
    entry.intermediate_size = layer->I;
    entry.n_local_experts = layer->L;
    entry.top_k = A;
    entry.n_tokens = 64;
    entry.tactic.tile_tokens = tile_tokens;
    assert_true(context->backend->tactic_is_valid(&entry.tactic));
    assert_int_equal(tuning_put(context, &entry), MOE4_OK);
}

static void test_tactics_change_nothing(void **state)
{
    (void)state;
    static const int32_t tiles[] = {8, 16, 24, 40, 64, 96, 128, 160};
    struct layer_call *c = prepare_call(0, 71);
    call_must_run(&c->buffers, c->context, c->layer, &c->call);
    for (size_t i = 0; i < sizeof tiles / sizeof *tiles; i++) {
        struct call call = call_create(&c->buffers, &c->config, &c->call.plan);
        use_tactic(c->context, c->layer, tiles[i]);
        call_must_run(&c->buffers, c->context, c->layer, &call);
        call_compare(&c->call, &call);
    }
    release_call(c);
}

static int count_buckets(void *user, const moe4_tuning_entry *entry, int32_t n_done, int32_t n_buckets)
{
    (void)n_buckets;
    *(int32_t *)user = n_done;
    assert_true(entry->ms > 0 && entry->ms <= entry->default_ms);
    return 0;
}

/* Measured, saved, and loaded into another context of the device; the CPU's refuses it. */
static void test_tuning(void **state)
{
    (void)state;
    char path[] = "/tmp/moe4-tuning-XXXXXX";
    int32_t n_done = 0;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct layer_call *c = prepare_call(0, 72);
    moe4_tune_options options = MOE4_TUNE_OPTIONS_INIT;
    options.max_tokens = 600;
    options.ms_a_choice = 0.1;
    options.progress = count_buckets;
    options.user = &n_done;
    assert_int_equal(moe4_tune(c->context, c->layer, &options), MOE4_OK);
    assert_int_equal(n_done, 11); /* 1 2 4 .. 256 512 600 */
    assert_int_equal(moe4_tuning_save(c->context, path), MOE4_OK);
    moe4_context *same = open_on(0, c->context->isa);
    assert_int_equal(moe4_tuning_load(same, path), MOE4_OK);
    assert_int_equal(moe4_tuning_count(same), 11);
    moe4_context *cpu = NULL;
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    assert_int_equal(moe4_context_create(&config, &cpu), MOE4_OK);
    assert_int_equal(moe4_tuning_load(cpu, path), MOE4_EFORMAT);
    assert_non_null(strstr(moe4_context_message(cpu), "device is \""));
    assert_int_equal(moe4_tune(cpu, c->layer, &options), MOE4_EINVAL);
    moe4_context_destroy(cpu);
    moe4_context_destroy(same);
    release_call(c);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unchosen_experts),
        cmocka_unit_test(test_rows_far_apart),
        cmocka_unit_test(test_bad_token_ids),
        cmocka_unit_test(test_bad_token_counts),
        cmocka_unit_test(test_bad_row_map),
        cmocka_unit_test(test_graph_replay),
        cmocka_unit_test(test_layers_and_contexts),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_tactics_change_nothing),
        cmocka_unit_test(test_tuning),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
