/* layer_bench: whole layers on a GPU through the public functions, from logits to y, CUDA events around graph replay.
 * Weights are random and every expert has its own copy; each replay runs several calls with logits of their own, so
 * that no cache holds what the next call needs.  `layer_bench [fp8] [SHAPE ...]`.  Checks that a token's y has the same
 * bits at every T.  Not part of the library. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/moe4.h"

enum { MAX_T = 8192, MAX_SETS = 16, N_REPLAYS = 15 };

struct shape {
    const char *name;
    int32_t E, A;
    int64_t H, I;
    moe4_activation activation;
    moe4_routing_method method;
};

static const struct shape shapes[] = {
    {"oss120b", 128, 4, 2880, 2880, MOE4_ACTIVATION_SWIGLU_OAI, MOE4_ROUTING_RENORMALIZE},
    {"oss20b", 32, 4, 2880, 2880, MOE4_ACTIVATION_SWIGLU_OAI, MOE4_ROUTING_RENORMALIZE},
    {"dsv3", 256, 8, 7168, 2048, MOE4_ACTIVATION_SILU, MOE4_ROUTING_DEEPSEEK_V3},
    {"v4flash", 256, 6, 4096, 2048, MOE4_ACTIVATION_SILU, MOE4_ROUTING_SQRT_SOFTPLUS},
    {"k3", 896, 16, 3584, 3072, MOE4_ACTIVATION_SITU, MOE4_ROUTING_DEEPSEEK_V3},
};

static void check(int error, const char *what)
{
    if (error == 0) return;
    printf("FAIL %s: %s\n", what, cudaGetErrorString((cudaError_t)error));
    exit(1);
}

static void check_status(moe4_status status, const moe4_context *context)
{
    if (status == MOE4_OK) return;
    printf("FAIL %s: %s\n", moe4_status_name(status), moe4_context_message(context));
    exit(1);
}

static uint64_t random_state = 1;
static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

static void *device_array(size_t bytes)
{
    void *memory = NULL;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}

/* ---- The layer --------------------------------------------------------------------------------------------------- */

static moe4_matrix random_matrix(int64_t rows, int64_t K)
{
    uint8_t *codes = malloc((size_t)(rows * K / 2)), *scales = malloc((size_t)(rows * K / 32));
    float *bias = malloc((size_t)rows * sizeof *bias);
    for (int64_t i = 0; i < rows * K / 2; i++) codes[i] = (uint8_t)random_bits();
    for (int64_t i = 0; i < rows * K / 32; i++) scales[i] = (uint8_t)(118 + random_bits() % 4);
    for (int64_t i = 0; i < rows; i++) bias[i] = (float)(random_bits() % 256) / 512 - 0.25f;
    return (moe4_matrix){.codes = codes, .scales = scales, .bias = bias, .bias_dtype = MOE4_DTYPE_F32};
}

static moe4_status read_expert(void *user, int32_t l, moe4_expert *expert)
{
    *expert = ((const moe4_expert *)user)[l % 3];
    return MOE4_OK;
}

static moe4_layer *create_layer(moe4_context *context, const struct shape *shape, moe4_compute compute)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.compute = compute;
    config.hidden_size = shape->H;
    config.intermediate_size = shape->I;
    config.n_experts = shape->E;
    config.gate_up = MOE4_GATE_UP_INTERLEAVED;
    config.activation = shape->activation;
    if (shape->activation == MOE4_ACTIVATION_SWIGLU_OAI) {
        config.alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
        config.beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
        config.limit = (moe4_param){MOE4_SAME, 7.0f, NULL};
    } else if (shape->activation == MOE4_ACTIVATION_SITU) {
        config.alpha = (moe4_param){MOE4_SAME, 4.0f, NULL};
        config.beta = (moe4_param){MOE4_SAME, 25.0f, NULL};
    }
    config.routing.method = shape->method;
    config.routing.top_k = shape->A;
    moe4_expert experts[3];
    for (int i = 0; i < 3; i++)
        experts[i] = (moe4_expert){random_matrix(2 * shape->I, shape->H), random_matrix(shape->H, shape->I)};
    const moe4_expert_source source = {read_expert, experts};
    moe4_layer *layer;
    check_status(moe4_layer_create_from(context, &config, &source, &layer), context);
    return layer;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

struct run {
    moe4_context *context;
    moe4_layer *layer;
    const struct shape *shape;
    moe4_compute compute;
    uint16_t *x, *y; /* [MAX_T, H] */
    float *logits;   /* [MAX_T * 2, E]: set n of T tokens begins at row n*T mod MAX_T */
    int32_t *ids;    /* [MAX_T, A] */
    void *workspace;
    size_t workspace_bytes;
    cudaStream_t stream;
};

static void forward(const struct run *run, int64_t T, int64_t first, int32_t *ids)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_logits logits = MOE4_LOGITS_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    batch.n_tokens = T;
    batch.compute = run->compute;
    batch.x = run->x + first * run->shape->H;
    batch.workspace = run->workspace;
    batch.workspace_bytes = run->workspace_bytes;
    batch.stream = run->stream;
    logits.logits = run->logits + first * run->shape->E;
    result.y = run->y;
    result.ids = ids;
    check_status(moe4_forward_router(run->context, run->layer, &batch, &logits, &result), run->context);
}

static float random_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)(random_bits() & 0xFFFF) / 65536.0f - 0.5f;
    return sum * 1.7f;
}

static struct run create_run(moe4_context *context, const struct shape *shape, moe4_compute compute)
{
    struct run run = {.context = context, .shape = shape, .compute = compute};
    run.layer = create_layer(context, shape, compute);
    size_t n_x = (size_t)MAX_T * (size_t)shape->H, n_logits = (size_t)MAX_T * (size_t)shape->E;
    uint16_t *x = malloc(n_x * 2);
    float *logits = malloc(n_logits * 4);
    for (size_t i = 0; i < n_x; i++) {
        float value = random_normal();
        uint32_t bits;
        memcpy(&bits, &value, 4);
        x[i] = (uint16_t)(bits >> 16);
    }
    for (size_t i = 0; i < n_logits; i++) logits[i] = random_normal();
    run.x = device_array(n_x * 2), run.y = device_array(n_x * 2), run.logits = device_array(n_logits * 4);
    run.ids = device_array((size_t)MAX_T * (size_t)shape->A * 4);
    check(cudaMemcpy(run.x, x, n_x * 2, cudaMemcpyHostToDevice), "x");
    check(cudaMemcpy(run.logits, logits, n_logits * 4, cudaMemcpyHostToDevice), "logits");
    free(x), free(logits);
    check_status(moe4_workspace_bytes(context, run.layer, compute, MAX_T, 0, &run.workspace_bytes), context);
    run.workspace = device_array(run.workspace_bytes);
    check(cudaStreamCreate(&run.stream), "stream");
    return run;
}

static void destroy_run(struct run *run)
{
    moe4_layer_destroy(run->layer);
    cudaFree(run->x), cudaFree(run->y), cudaFree(run->logits), cudaFree(run->ids), cudaFree(run->workspace);
    cudaStreamDestroy(run->stream);
}

/* ---- What a run says --------------------------------------------------------------------------------------------- */

static void fetch_y(const struct run *run, int64_t T, uint16_t *y)
{
    forward(run, T, 0, NULL);
    check(cudaStreamSynchronize(run->stream), "forward");
    check(cudaMemcpy(y, run->y, (size_t)(T * run->shape->H) * 2, cudaMemcpyDeviceToHost), "y");
}

static void check_bits(const struct run *run)
{
    static const int64_t counts[] = {1, 8, 33, 300, 2048, 8192};
    const int64_t H = run->shape->H;
    size_t bytes = (size_t)(MAX_T * H) * 2;
    uint16_t *expected = malloc(bytes), *y = malloc(bytes);
    int64_t n_different = 0;
    fetch_y(run, MAX_T, expected);
    for (int i = 0; i < 6; i++) {
        check(cudaMemset(run->y, 0xFF, bytes), "poison");
        fetch_y(run, counts[i], y);
        n_different += memcmp(y, expected, (size_t)(counts[i] * H) * 2) != 0;
    }
    for (int i = 0; i < 200; i++) {
        fetch_y(run, 40, y);
        n_different += memcmp(y, expected, (size_t)(40 * H) * 2) != 0;
    }
    printf("%s: bits of y at every T and in 200 repeats: %s\n", run->shape->name,
           n_different ? "FAIL differ" : "equal");
    free(expected), free(y);
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static float median_replay(cudaGraphExec_t graph, cudaStream_t stream)
{
    float times[N_REPLAYS];
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event"), check(cudaEventCreate(&end), "event");
    for (int i = -3; i < N_REPLAYS; i++) {
        cudaEventRecord(begin, stream);
        check(cudaGraphLaunch(graph, stream), "replay");
        cudaEventRecord(end, stream);
        check(cudaEventSynchronize(end), "replay");
        if (i >= 0) cudaEventElapsedTime(&times[i], begin, end);
    }
    cudaEventDestroy(begin), cudaEventDestroy(end);
    qsort(times, N_REPLAYS, sizeof *times, compare_floats);
    return times[N_REPLAYS / 2];
}

/* Mean number of experts that a call of T tokens touches. */
static double experts_touched(const struct run *run, int64_t T, int n_sets)
{
    size_t n = (size_t)(T * run->shape->A);
    int32_t *ids = malloc(n * 4);
    int64_t touched = 0;
    for (int s = 0; s < n_sets; s++) {
        uint8_t seen[1024] = {0};
        forward(run, T, s * T % MAX_T, run->ids);
        check(cudaStreamSynchronize(run->stream), "forward");
        check(cudaMemcpy(ids, run->ids, n * 4, cudaMemcpyDeviceToHost), "ids");
        for (size_t i = 0; i < n; i++) touched += !seen[ids[i]], seen[ids[i]] = 1;
    }
    free(ids);
    return (double)touched / n_sets;
}

static void time_calls(const struct run *run, int64_t T)
{
    const struct shape *shape = run->shape;
    int n_sets = MAX_T / T < MAX_SETS ? (int)(MAX_T / T) : MAX_SETS;
    if (n_sets < 2) n_sets = 2;
    double experts = experts_touched(run, T, n_sets);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(run->stream, cudaStreamCaptureModeGlobal), "capture");
    for (int s = 0; s < n_sets; s++) forward(run, T, s * T % MAX_T, NULL);
    check(cudaStreamEndCapture(run->stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    double ms = median_replay(executable, run->stream) / n_sets;
    cudaGraphExecDestroy(executable), cudaGraphDestroy(graph);
    double bytes = experts * 3.0 * (double)(shape->H * shape->I) * 4.25 / 8;
    double flops = 6.0 * (double)(T * shape->A) * (double)(shape->H * shape->I);
    double floor_ms = fmax(bytes / 4.24e9, flops / 790e9);
    printf("%-8s T %5lld  %8.4f ms  floor %7.4f  ratio %5.2f  %6.0f GB/s  %6.1f TFLOP/s\n", shape->name, (long long)T,
           ms, floor_ms, ms / floor_ms, bytes / ms * 1e-6, flops / ms * 1e-9);
}

int main(int argc, char **argv)
{
    static const int64_t counts[] = {1, 8, 32, 128, 512, 2048, 8192};
    setvbuf(stdout, NULL, _IOLBF, 1 << 16);
    const int is_fp8 = argc > 1 && !strcmp(argv[1], "fp8");
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.device = MOE4_DEVICE_CUDA;
    check_status(moe4_context_create(&config, &context), context);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        int wanted = argc < 2 + is_fp8;
        for (int a = 1; a < argc; a++) wanted |= !strcmp(argv[a], shapes[i].name);
        if (!wanted) continue;
        struct run run = create_run(context, &shapes[i], is_fp8 ? MOE4_COMPUTE_FP8 : MOE4_COMPUTE_BF16);
        check_bits(&run);
        for (int c = 0; c < 7; c++) time_calls(&run, counts[c]);
        destroy_run(&run);
    }
    moe4_context_destroy(context);
    return 0;
}
