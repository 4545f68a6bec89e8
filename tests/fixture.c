#include "fixture.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "cpu/isa.h"
#include "ref.h"

#if !defined(__has_feature)
#define __has_feature(x) 0
#endif

int is_sanitized(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 1;
#else
    return __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#endif
}

int is_cpu_tested(void)
{
    return 1;
}

int32_t n_computes(void)
{
    return 4;
}

/* ---- Random numbers ---- */

/* splitmix64 */
uint64_t random_bits(struct random *random)
{
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

int64_t random_below(struct random *random, int64_t n)
{
    return (int64_t)(random_bits(random) >> 1) % n;
}

double random_normal(struct random *random)
{
    double u = (double)(random_bits(random) >> 11) * 0x1p-53, v = (double)(random_bits(random) >> 11) * 0x1p-53;
    return sqrt(-2 * log(1 - u)) * cos(6.283185307179586 * v);
}

/* ---- Memory ---- */

struct buffer {
    struct buffer *previous;
    void *memory;
    size_t mapped_bytes; /* 0 = from the heap */
};

static void *map_guarded(enum buffers_kind kind, size_t bytes, struct buffer *buffer)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + page - 1) / page * page;
    if (inner == 0) inner = page;
    buffer->mapped_bytes = inner + 2 * page;
    buffer->memory = mmap(NULL, buffer->mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer->memory == MAP_FAILED) fail_msg("cannot map %zu bytes", buffer->mapped_bytes);
    char *first = (char *)buffer->memory + page;
    if (mprotect(first, inner, PROT_READ | PROT_WRITE)) fail_msg("cannot unprotect %zu bytes", inner);
    memset(first, 0xFF, inner);
    return kind == BUFFERS_GUARD_AFTER ? first + inner - bytes : first;
}

void *buffers_allocate(struct buffers *buffers, size_t bytes)
{
    struct buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) fail_msg("out of memory");
    buffer->previous = buffers->last;
    buffers->last = buffer;
    if (buffers->kind != BUFFERS_PLAIN) return map_guarded(buffers->kind, bytes, buffer);
    buffer->memory = aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (!buffer->memory) fail_msg("out of memory for %zu bytes", bytes);
    return memset(buffer->memory, 0xFF, bytes);
}

void *buffers_copy(struct buffers *buffers, const void *data, size_t bytes)
{
    return memcpy(buffers_allocate(buffers, bytes), data, bytes);
}

void buffers_release(struct buffers *buffers)
{
    while (buffers->last) {
        struct buffer *buffer = buffers->last;
        buffers->last = buffer->previous;
        if (buffer->mapped_bytes)
            munmap(buffer->memory, buffer->mapped_bytes);
        else
            free(buffer->memory);
        free(buffer);
    }
}

static void *counting_allocate(void *user, size_t bytes, size_t alignment)
{
    struct test_allocator *memory = user;
    if (++memory->n_requests == memory->fails_at) return NULL;
    void *data = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!data) return NULL;
    memory->n_live++;
    memory->live_bytes += (int64_t)bytes;
    if (memory->live_bytes > memory->peak_bytes) memory->peak_bytes = memory->live_bytes;
    return memset(data, 0xFF, bytes);
}

static void counting_release(void *user, void *data, size_t bytes)
{
    struct test_allocator *memory = user;
    memory->n_live--;
    memory->live_bytes -= (int64_t)bytes;
    free(data);
}

void test_allocator_init(struct test_allocator *memory)
{
    *memory = (struct test_allocator){.allocator = {counting_allocate, counting_release, memory}};
}

/* ---- Contexts and layers ---- */

int32_t isa_levels(moe4_isa levels[MAX_LEVELS])
{
    struct cpu_features features = isa_read_features();
    int32_t n = 0;
    for (moe4_isa isa = MOE4_ISA_C; isa_name(isa); isa++)
        if (isa_is_offered(&features, isa) && isa_enable(isa)) levels[n++] = isa;
    return n;
}

moe4_context *context_open(moe4_isa isa, int32_t n_threads)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.isa = isa;
    config.n_threads = n_threads;
    if (moe4_context_create(&config, &context)) fail_msg("no context: %s", moe4_context_message(context));
    return context;
}

moe4_layer *layer_open(moe4_context *context, const moe4_layer_config *config, const moe4_expert *experts)
{
    moe4_layer *layer;
    if (moe4_layer_create(context, config, experts, &layer)) fail_msg("no layer: %s", moe4_context_message(context));
    return layer;
}

moe4_layer_config layer_config(int64_t hidden_size, int64_t intermediate_size, int32_t n_experts, int32_t top_k)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = hidden_size;
    config.intermediate_size = intermediate_size;
    config.n_experts = n_experts;
    config.gate_up = MOE4_GATE_UP_INTERLEAVED;
    config.activation = MOE4_ACTIVATION_SWIGLU_OAI;
    config.alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
    config.beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
    config.limit = (moe4_param){MOE4_SAME, 7.0f, NULL};
    config.routing.method = MOE4_ROUTING_RENORMALIZE;
    config.routing.top_k = top_k;
    return config;
}

int32_t local_experts(const moe4_layer_config *config)
{
    if (config->n_local_experts) return config->n_local_experts;
    if (!config->expert_map) return config->n_experts - config->first_expert;
    int32_t n = 0;
    for (int32_t e = 0; e < config->n_experts; e++)
        if (config->expert_map[e] >= n) n = config->expert_map[e] + 1;
    return n;
}

/* ---- Weights ---- */

size_t dtype_bytes(moe4_dtype dtype)
{
    return dtype == MOE4_DTYPE_F32 ? 4 : 2;
}

void store_value(void *array, moe4_dtype dtype, int64_t index, double value)
{
    float wide = (float)value;
    uint16_t half = dtype == MOE4_DTYPE_F16 ? ref_to_f16(value) : ref_to_bf16(value);
    const void *bytes = dtype == MOE4_DTYPE_F32 ? (const void *)&wide : (const void *)&half;
    memcpy((char *)array + index * (int64_t)dtype_bytes(dtype), bytes, dtype_bytes(dtype));
}

void set_code(uint8_t *row, int64_t k, unsigned code)
{
    int shift = k % 2 ? 4 : 0;
    row[k / 2] = (uint8_t)((row[k / 2] & ~(15 << shift)) | code << shift);
}

/* What a row is for decides its exact-mode values. */
enum row_role { ROW_GATE, ROW_UP, ROW_DOWN, ROW_UNUSED };

/* Scales near 2^-log2(sqrt(K)) so that sums of K products stay near 1; neighbours differ. */
static void ordinary_row(struct random *random, int64_t K, uint8_t *codes, uint8_t *scales)
{
    int centre = 126 - (int)lround(log2(sqrt((double)K)));
    for (int64_t b = 0; b < K / 32; b++, codes += 16) {
        uint64_t words[2] = {random_bits(random), random_bits(random)}, choice = random_bits(random);
        scales[b] = (uint8_t)(centre - 2 + (int)(choice % 5));
        if ((choice >> 32) % 16 == 0) words[0] = words[1] = 0, scales[b] = 0;
        memcpy(codes, words, sizeof words);
    }
}

/* Nonzero weights a row, and the codes and scales they are made of. */
static void exact_row(struct random *random, enum row_role role, int64_t K, uint8_t *codes, uint8_t *scales)
{
    const int64_t n_nonzero = role == ROW_DOWN ? 64 : 16;
    memset(codes, 0, (size_t)K / 2);
    for (int64_t b = 0; b < K / 32; b++)
        scales[b] = (uint8_t)((role == ROW_GATE ? 126 : 127) + random_below(random, 2));
    for (int64_t i = 0; i < n_nonzero; i++) {
        unsigned code = role == ROW_GATE ? 1 + (unsigned)random_below(random, 2) : (unsigned)random_below(random, 8);
        set_code(codes, random_below(random, K), code | (unsigned)random_below(random, 2) << 3);
    }
}

static double bias_value(struct random *random, const struct weight_plan *plan, enum row_role role)
{
    if (plan->data == WEIGHTS_ORDINARY) return 0.5 * random_normal(random);
    return role == ROW_GATE ? 48 : (double)(random_below(random, 9) - 4);
}

static enum row_role gate_up_role(const moe4_layer_config *config, int64_t row)
{
    int64_t I = config->intermediate_size;
    int64_t half = config->stored_intermediate_size ? config->stored_intermediate_size : I;
    switch (config->gate_up) {
    case MOE4_GATE_UP_NONE: return ROW_UP;
    case MOE4_GATE_UP_INTERLEAVED: return row % 2 ? ROW_UP : ROW_GATE;
    case MOE4_GATE_UP_GATE_FIRST: return row % half >= I ? ROW_UNUSED : row < half ? ROW_GATE : ROW_UP;
    case MOE4_GATE_UP_UP_FIRST: return row % half >= I ? ROW_UNUSED : row < half ? ROW_UP : ROW_GATE;
    }
    return ROW_UNUSED;
}

/* Rows of a gate/up matrix, the second half without its own padding. */
static int64_t gate_up_rows(const moe4_layer_config *config)
{
    int64_t I = config->intermediate_size, stored = config->stored_intermediate_size;
    if (config->gate_up == MOE4_GATE_UP_NONE) return I;
    return stored && config->gate_up != MOE4_GATE_UP_INTERLEAVED ? stored + I : 2 * I;
}

static moe4_matrix create_matrix(struct buffers *buffers, const moe4_layer_config *config,
                                 const struct weight_plan *plan, struct random *random, int is_down, int has_bias)
{
    int64_t K = is_down ? config->intermediate_size : config->hidden_size;
    int64_t rows = is_down ? config->hidden_size : gate_up_rows(config);
    int64_t codes_row = K / 2 + plan->row_gap, scales_row = K / 32 + plan->row_gap;
    moe4_dtype dtype = plan->bias_dtype ? plan->bias_dtype : MOE4_DTYPE_F32;
    uint8_t *codes = buffers_allocate(buffers, (size_t)(rows * codes_row - plan->row_gap));
    uint8_t *scales = buffers_allocate(buffers, (size_t)(rows * scales_row - plan->row_gap));
    void *bias = has_bias ? buffers_allocate(buffers, (size_t)rows * dtype_bytes(dtype)) : NULL;
    for (int64_t row = 0; row < rows; row++) {
        enum row_role role = is_down ? ROW_DOWN : gate_up_role(config, row);
        if (role == ROW_UNUSED) continue;
        if (plan->data == WEIGHTS_EXACT)
            exact_row(random, role, K, codes + row * codes_row, scales + row * scales_row);
        else
            ordinary_row(random, K, codes + row * codes_row, scales + row * scales_row);
        if (has_bias) store_value(bias, dtype, row, bias_value(random, plan, role));
    }
    return (moe4_matrix){codes, scales, plan->row_gap ? codes_row : 0, plan->row_gap ? scales_row : 0, bias, dtype};
}

moe4_expert weights_expert(struct buffers *buffers, const moe4_layer_config *config, const struct weight_plan *plan,
                           int32_t l)
{
    struct random random = {plan->seed * 1000003u + (uint64_t)l};
    int up_bias = plan->biases == BIAS_GATE_UP || plan->biases == BIAS_BOTH;
    int down_bias = plan->biases == BIAS_DOWN || plan->biases == BIAS_BOTH;
    moe4_expert expert;
    expert.gate_up = create_matrix(buffers, config, plan, &random, 0, up_bias);
    expert.down = create_matrix(buffers, config, plan, &random, 1, down_bias);
    return expert;
}

moe4_expert *weights_create(struct buffers *buffers, const moe4_layer_config *config, const struct weight_plan *plan)
{
    int32_t L = local_experts(config);
    moe4_expert *experts = buffers_allocate(buffers, (size_t)L * sizeof *experts);
    for (int32_t l = 0; l < L; l++) experts[l] = weights_expert(buffers, config, plan, l);
    return experts;
}

void router_create(struct buffers *buffers, moe4_layer_config *config, uint64_t seed)
{
    struct random random = {seed};
    moe4_router *router = &config->router;
    int64_t width = router->hidden_size ? router->hidden_size : config->hidden_size, E = config->n_experts;
    uint16_t *weight = buffers_allocate(buffers, (size_t)(E * width) * sizeof *weight);
    float *bias = buffers_allocate(buffers, (size_t)E * sizeof *bias);
    for (int64_t i = 0; i < E * width; i++) weight[i] = ref_to_bf16(random_normal(&random) / sqrt((double)width));
    for (int64_t e = 0; e < E; e++) bias[e] = (float)(0.1 * random_normal(&random));
    router->weight = weight;
    router->weight_dtype = MOE4_DTYPE_BF16;
    router->bias = bias;
    router->bias_dtype = MOE4_DTYPE_F32;
}
