/* prepare_bench: how fast a layer of oss120b's shape is copied and packed, by where its weights come from, beside what
 * the link gives a plain copy of pinned memory.  Not part of the library. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "moe4/moe4.h"

enum { E = 128, H = 2880, I = 2880, N_RUNS = 5 };
static const size_t GATE_UP_CODES = (size_t)2 * I * H / 2, DOWN_CODES = (size_t)H * I / 2;
#define MATRIX_BYTES(codes) ((codes) + (codes) / 16) /* codes and scales */

static void check(int error, const char *what)
{
    if (error == 0) return;
    printf("FAIL %s: %s\n", what, cudaGetErrorString((cudaError_t)error));
    exit(1);
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static size_t expert_bytes(void)
{
    return MATRIX_BYTES(GATE_UP_CODES) + MATRIX_BYTES(DOWN_CODES);
}

/* GB/s of pinned memory to the device, the best of some. */
static double link_rate(void)
{
    enum { BYTES = 1 << 28 };
    void *host, *device;
    double best = 0;
    check(cudaHostAlloc(&host, BYTES, cudaHostAllocDefault), "cudaHostAlloc");
    check(cudaMalloc(&device, BYTES), "cudaMalloc");
    memset(host, 1, BYTES);
    for (int i = 0; i < N_RUNS; i++) {
        double start = seconds();
        check(cudaMemcpy(device, host, BYTES, cudaMemcpyDefault), "copy");
        double rate = 1e-9 * BYTES / (seconds() - start);
        if (rate > best) best = rate;
    }
    check(cudaFree(device), "cudaFree");
    check(cudaFreeHost(host), "cudaFreeHost");
    return best;
}

/* Experts one after the other, n of them, taken in turn. */
struct source {
    uint8_t *experts;
    int32_t n;
    int file; /* that has them too; 0 = there is none */
};

static moe4_matrix matrix_at(const uint8_t *codes, size_t code_bytes)
{
    return (moe4_matrix){.codes = codes, .scales = codes + code_bytes};
}

static moe4_status read_expert(void *user, int32_t l, moe4_expert *expert)
{
    const struct source *source = user;
    const uint8_t *at = source->experts + (size_t)(l % source->n) * expert_bytes();
    *expert = (moe4_expert){matrix_at(at, GATE_UP_CODES), matrix_at(at + MATRIX_BYTES(GATE_UP_CODES), DOWN_CODES)};
    return MOE4_OK;
}

/* Parts as they lie in an expert; there are no biases. */
static moe4_status copy_part(void *user, int32_t l, moe4_part part, int64_t first, int64_t n_bytes, void *to)
{
    const struct source *source = user;
    const size_t parts[] = {[MOE4_PART_GATE_UP_CODES] = 0,
                            [MOE4_PART_GATE_UP_SCALES] = GATE_UP_CODES,
                            [MOE4_PART_DOWN_CODES] = MATRIX_BYTES(GATE_UP_CODES),
                            [MOE4_PART_DOWN_SCALES] = MATRIX_BYTES(GATE_UP_CODES) + DOWN_CODES};
    const off_t at = (off_t)((size_t)(l % source->n) * expert_bytes() + parts[part]) + first;
    return pread(source->file, to, (size_t)n_bytes, at) == n_bytes ? MOE4_OK : MOE4_EIO;
}

static void fill_random(uint8_t *to, size_t bytes)
{
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        uint64_t word = (state & 0x0303030303030303u) + 0x7676767676767676u; /* as scales: 118 to 121 */
        memcpy(to + i, &word, 8);
    }
}

/* The best of some creations. */
static double create_seconds(moe4_context *context, const struct source *given)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = H;
    config.intermediate_size = I;
    config.n_experts = E;
    config.gate_up = MOE4_GATE_UP_INTERLEAVED;
    config.activation = MOE4_ACTIVATION_SWIGLU_OAI;
    moe4_expert_source source = {.read = read_expert, .user = (void *)given};
    if (given->file) source.describe = read_expert, source.copy = copy_part;
    double best = 1e30;
    for (int i = 0; i < N_RUNS; i++) {
        moe4_layer *layer;
        double start = seconds();
        if (moe4_layer_create_from(context, &config, &source, &layer)) {
            printf("FAIL %s\n", moe4_context_message(context));
            exit(1);
        }
        double taken = seconds() - start;
        if (taken < best) best = taken;
        moe4_layer_destroy(layer);
    }
    return best;
}

/* All experts in a file, whose pages are mapped and cached. */
static struct source map_file(void)
{
    char path[] = "/tmp/moe4-prepare-XXXXXX";
    const size_t bytes = E * expert_bytes();
    uint8_t *one = malloc(expert_bytes());
    int fd = mkstemp(path);
    if (!one || fd < 0) check(1, "a file for the weights");
    unlink(path);
    fill_random(one, expert_bytes());
    for (int l = 0; l < E; l++)
        if (write(fd, one, expert_bytes()) != (ssize_t)expert_bytes()) check(1, "writing the weights");
    uint8_t *pages = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (pages == MAP_FAILED) check(1, "mapping the weights");
    free(one);
    return (struct source){pages, E, fd};
}

int main(void)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.device = MOE4_DEVICE_CUDA;
    if (moe4_context_create(&config, &context)) {
        printf("FAIL %s\n", moe4_context_message(context));
        return 1;
    }
    const double gigabytes = 1e-9 * (double)expert_bytes() * E, link = link_rate();
    printf("link %.1f GB/s; a layer of %.2f GB\n", link, gigabytes);

    struct source file = map_file(), mapped = {file.experts, E, 0}, pinned = {NULL, 4, 0}, device = {NULL, 1, 0};
    check(cudaHostAlloc((void **)&pinned.experts, 4 * expert_bytes(), cudaHostAllocDefault), "cudaHostAlloc");
    memcpy(pinned.experts, mapped.experts, 4 * expert_bytes());
    check(cudaMalloc((void **)&device.experts, expert_bytes()), "cudaMalloc");
    check(cudaMemcpy(device.experts, mapped.experts, expert_bytes(), cudaMemcpyDefault), "copy");
    const struct {
        const char *name;
        const struct source *source;
    } sources[] = {{"a file", &file}, {"a mapped file", &mapped}, {"pinned memory", &pinned}, {"the device", &device}};
    for (int i = 0; i < 4; i++) {
        double taken = create_seconds(context, sources[i].source);
        printf("from %-14s %7.1f ms %7.1f GB/s %5.2f of the link\n", sources[i].name, 1e3 * taken, gigabytes / taken,
               gigabytes / taken / link);
    }
    moe4_context_destroy(context);
    return 0;
}
