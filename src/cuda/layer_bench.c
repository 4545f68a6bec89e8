/* layer_bench: whole layers on a GPU through the public functions, from logits to y, CUDA events around graph replay.
 * Weights are random and every expert has its own copy; each replay runs several calls with logits of their own, so
 * that no cache holds what the next call needs.  Checks that a token's y has the same bits at every T.
 *
 *   layer_bench [SHAPE...] [T=COUNT...] [uniform|zipf|half...] [bf16|mxfp8|fp8...] [plain|hot|rested...]
 *
 * takes every combination; by default all shapes and counts, uniform, bf16, plain.  hot: after some time of the same
 * calls; rested: after some time of none; plain: after whatever came before.  Not part of the library. */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <time.h>

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
    const moe4_expert_source source = {.read = read_expert, .user = experts};
    moe4_layer *layer;
    check_status(moe4_layer_create_from(context, &config, &source, &layer), context);
    return layer;
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

enum routing { UNIFORM, ZIPF, HALF }; /* HALF: one expert is chosen by half of all tokens */

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
    enum routing routing;
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

static float random_unit(void)
{
    return ((float)(random_bits() & 0xFFFFFF) + 0.5f) / 16777216.0f;
}

static float random_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += random_unit() - 0.5f;
    return sum * 1.7f;
}

/* Logits whose largest follow the wanted popularity: Zipf's by adding Gumbel noise to its logarithms. */
static float random_logit(enum routing routing, int64_t e, int64_t E, int is_hot)
{
    if (routing == ZIPF) return -logf((float)((e * 37 + 11) % E + 1)) - logf(-logf(random_unit()));
    return random_normal() + (routing == HALF && e == E / 3 && is_hot ? 20.0f : 0.0f);
}

static void make_logits(const struct run *run)
{
    const int64_t E = run->shape->E;
    float *logits = malloc((size_t)(MAX_T * E) * 4);
    for (int64_t t = 0; t < MAX_T; t++) {
        int is_hot = random_bits() & 1;
        for (int64_t e = 0; e < E; e++) logits[t * E + e] = random_logit(run->routing, e, E, is_hot);
    }
    check(cudaMemcpy(run->logits, logits, (size_t)(MAX_T * E) * 4, cudaMemcpyHostToDevice), "logits");
    free(logits);
}

static struct run create_run(moe4_context *context, const struct shape *shape, moe4_compute compute)
{
    struct run run = {.context = context, .shape = shape, .compute = compute};
    run.layer = create_layer(context, shape, compute);
    size_t n_x = (size_t)MAX_T * (size_t)shape->H, n_logits = (size_t)MAX_T * (size_t)shape->E;
    uint16_t *x = malloc(n_x * 2);
    for (size_t i = 0; i < n_x; i++) {
        float value = random_normal();
        uint32_t bits;
        memcpy(&bits, &value, 4);
        x[i] = (uint16_t)(bits >> 16);
    }
    run.x = device_array(n_x * 2), run.y = device_array(n_x * 2), run.logits = device_array(n_logits * 4);
    run.ids = device_array((size_t)MAX_T * (size_t)shape->A * 4);
    check(cudaMemcpy(run.x, x, n_x * 2, cudaMemcpyHostToDevice), "x");
    free(x);
    make_logits(&run);
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

/* ---- What is timed ------------------------------------------------------------------------------------------------
 */

static const char *const routing_names[] = {"uniform", "zipf", "half"}, *const compute_names[] = {"bf16", "mxfp8",
                                                                                                  "fp8"};
static const char *const state_names[] = {"plain", "hot", "rested"};
static const int64_t all_counts[] = {1, 2, 4, 8, 32, 128, 512, 2048, 8192};

/* Whether `word` is among the arguments, or is what is meant where none of its group is. */
static int is_wanted(char **arguments, const char *word, const char *const *group, int n_group, int by_default)
{
    int any = 0;
    for (char **argument = arguments; *argument; argument++) {
        if (!strcmp(*argument, word)) return 1;
        for (int g = 0; g < n_group; g++) any |= !strcmp(*argument, group[g]);
    }
    return !any && by_default;
}

static int is_wanted_count(char **arguments, int64_t T)
{
    int any = 0;
    for (char **argument = arguments; *argument; argument++) {
        if (strncmp(*argument, "T=", 2)) continue;
        if (atoll(*argument + 2) == T) return 1;
        any = 1;
    }
    return !any;
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
    static const int64_t counts[] = {1, 2, 3, 5, 7, 8, 33, 128, 300, 2048, 8192};
    const int64_t H = run->shape->H;
    size_t bytes = (size_t)(MAX_T * H) * 2;
    uint16_t *expected = malloc(bytes), *y = malloc(bytes);
    int64_t n_different = 0;
    fetch_y(run, MAX_T, expected);
    for (int i = 0; i < (int)(sizeof counts / sizeof *counts); i++) {
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

enum state { PLAIN, HOT, RESTED };

static double seconds(void)
{
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void bring_into(enum state state, cudaGraphExec_t graph, cudaStream_t stream)
{
    const double begin = seconds(), hot = 0.2, rested = 1.0;
    while (state == RESTED && seconds() < begin + rested) thrd_sleep(&(struct timespec){0, 10000000}, NULL);
    while (state == HOT && seconds() < begin + hot) {
        check(cudaGraphLaunch(graph, stream), "replay");
        check(cudaStreamSynchronize(stream), "replay");
    }
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

/* In each of the states that are wanted; `words` begins the lines. */
static void time_calls(const struct run *run, int64_t T, char **arguments, const char *words)
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
    double bytes = experts * 3.0 * (double)(shape->H * shape->I) * 4.25 / 8;
    double flops = 6.0 * (double)(T * shape->A) * (double)(shape->H * shape->I);
    double floor_ms = fmax(bytes / 4.24e9, flops / 790e9);
    for (int state = 0; state < 3; state++) {
        if (!is_wanted(arguments, state_names[state], state_names, 3, state == PLAIN)) continue;
        bring_into((enum state)state, executable, run->stream);
        double ms = median_replay(executable, run->stream) / n_sets;
        printf("%s %-8s T %5lld  %8.4f ms  floor %7.4f  ratio %5.2f  %6.0f GB/s  %6.1f TFLOP/s  %s\n", words,
               shape->name, (long long)T, ms, floor_ms, ms / floor_ms, bytes / ms * 1e-6, flops / ms * 1e-9,
               state_names[state]);
    }
    cudaGraphExecDestroy(executable), cudaGraphDestroy(graph);
}

static void time_routings(struct run *run, char **arguments, const char *compute)
{
    for (int r = 0; r < 3; r++) {
        if (!is_wanted(arguments, routing_names[r], routing_names, 3, r == UNIFORM)) continue;
        run->routing = (enum routing)r;
        make_logits(run);
        for (size_t n = 0; n < sizeof all_counts / sizeof *all_counts; n++) {
            if (!is_wanted_count(arguments, all_counts[n])) continue;
            char words[32];
            snprintf(words, sizeof words, "%-7s %-5s", routing_names[r], compute);
            time_calls(run, all_counts[n], arguments, words);
        }
    }
}

int main(int argc, char **argv)
{
    enum { N_SHAPES = sizeof shapes / sizeof *shapes };
    static const moe4_compute computes[] = {MOE4_COMPUTE_BF16, MOE4_COMPUTE_MXFP8, MOE4_COMPUTE_FP8};
    setvbuf(stdout, NULL, _IOLBF, 1 << 16);
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.device = MOE4_DEVICE_CUDA;
    check_status(moe4_context_create(&config, &context), context);
    char **arguments = argv + (argc > 0);
    const char *names[N_SHAPES];
    for (int i = 0; i < N_SHAPES; i++) names[i] = shapes[i].name;
    for (int i = 0; i < N_SHAPES * 3; i++) {
        const char *compute = compute_names[i % 3];
        if (!is_wanted(arguments, names[i / 3], names, N_SHAPES, 1) ||
            !is_wanted(arguments, compute, compute_names, 3, i % 3 == 0))
            continue;
        struct run run = create_run(context, &shapes[i / 3], computes[i % 3]);
        check_bits(&run);
        time_routings(&run, arguments, compute);
        destroy_run(&run);
    }
    moe4_context_destroy(context);
    return 0;
}
