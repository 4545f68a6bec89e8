#include "probe.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "probe_kernel.h"
#include "progress.h"

enum { MAX_THREADS = 1024, LINE_BYTES = 64, AHEAD_LINES = 64, READ_ROUNDS = 3, RATE_TRIES = 3, ADDS = 64 };
static const int64_t buffer_bytes_most = (int64_t)1 << 30, buffer_bytes_least = (int64_t)1 << 26;
static const int64_t weights_bytes_least = (int64_t)1 << 28; /* that are worth reading themselves */
static const double read_seconds = 0.5, rate_seconds = 0.03; /* about as long as a measurement may take */

struct probe {
    int32_t n_threads;
    cpu_set_t cpus; /* those that the process may use; none = not known */
    uint8_t *buffer;
    int64_t bytes, bytes_per_thread;
    int is_own; /* not a layer's weights */
};

/* ---- Pinned threads ---------------------------------------------------------------------------------------------- */

struct worker {
    struct probe *probe;
    int32_t index;
    pthread_barrier_t *start;
    void (*task)(struct worker *worker); /* between started and ended */
    const void *argument;
    double started, ended; /* seconds */
    double busy;           /* of them on a CPU */
    uint64_t sink;
    pthread_t thread;
    int is_running;
};

/* CPU time of this thread. */
static double thread_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void *worker_run(void *argument)
{
    struct worker *self = argument;
    pthread_barrier_wait(self->start);
    double busy = thread_seconds();
    self->started = seconds_now();
    self->task(self);
    self->ended = seconds_now();
    self->busy = thread_seconds() - busy;
    return NULL;
}

/* Pins the attributes' thread to the index-th of the process's CPUs, where there is one for each and no more: the first
 * few of many may share a core, while the system spreads the library's threads, which nobody pins, and these. */
static void pin(const struct probe *probe, int32_t index, pthread_attr_t *attributes)
{
    int32_t wanted = index;
    if (CPU_COUNT(&probe->cpus) != probe->n_threads) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &probe->cpus) || wanted--) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_attr_setaffinity_np(attributes, sizeof one, &one);
        return;
    }
}

static volatile uint64_t sink; /* results go here, so that no work can be left out */

struct span {
    double wall; /* seconds from the first start to the last end */
    double busy; /* of the busiest thread on its CPU: the same if nothing else runs */
};

/* Runs a task on every thread at once. */
static struct span measure(struct probe *probe, void (*task)(struct worker *), const void *argument)
{
    struct worker workers[MAX_THREADS];
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)probe->n_threads);
    for (int32_t i = 0; i < probe->n_threads; ++i) {
        workers[i] = (struct worker){.probe = probe, .index = i, .start = &start, .task = task, .argument = argument};
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pin(probe, i, &attributes);
        if (pthread_create(&workers[i].thread, &attributes, worker_run, &workers[i]) != 0) {
            fail("no thread %d of %d for measuring", i, probe->n_threads);
            exit(EXIT_FAILED); /* those before it wait for this one for ever */
        }
        pthread_attr_destroy(&attributes);
    }
    double started = INFINITY, ended = 0, busy = 0;
    for (int32_t i = 0; i < probe->n_threads; ++i) {
        pthread_join(workers[i].thread, NULL);
        if (workers[i].started < started) started = workers[i].started;
        if (workers[i].ended > ended) ended = workers[i].ended;
        if (workers[i].busy > busy) busy = workers[i].busy;
        sink += workers[i].sink;
    }
    pthread_barrier_destroy(&start);
    return (struct span){ended - started, busy};
}

/* ---- Bandwidth --------------------------------------------------------------------------------------------------- */

typedef uint64_t line __attribute__((vector_size(LINE_BYTES)));

/* Reads n_lines in n_streams equal runs at once, asking for each line `ahead` lines before its turn (0 = not asking).
 */
static inline __attribute__((always_inline)) uint64_t read_lines(const line *data, int64_t n_lines,
                                                                 const int64_t n_streams, const int64_t ahead)
{
    int64_t stride = n_lines / n_streams;
    line sum = {0};
    for (int64_t i = 0; i < stride; ++i)
        for (int64_t stream = 0; stream < n_streams; ++stream) {
            const line *next = data + stream * stride + i;
            if (ahead) __builtin_prefetch(next + ahead);
            sum += *next;
        }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

typedef enum read_variant { READ_1, READ_1_AHEAD, READ_8, READ_8_AHEAD, READ_VARIANTS } read_variant;

static void read_run(struct worker *worker)
{
    int64_t bytes = worker->probe->bytes_per_thread, n = bytes / LINE_BYTES;
    const line *lines = (const line *)(worker->probe->buffer + worker->index * bytes);
    switch (*(const read_variant *)worker->argument) {
    case READ_1: worker->sink = read_lines(lines, n, 1, 0); break;
    case READ_1_AHEAD: worker->sink = read_lines(lines, n, 1, AHEAD_LINES); break;
    case READ_8: worker->sink = read_lines(lines, n, 8, 0); break;
    default: worker->sink = read_lines(lines, n, 8, AHEAD_LINES); break;
    }
}

/* Puts the pages where their reader runs. */
static void touch(struct worker *worker)
{
    const struct probe *probe = worker->probe;
    memset(probe->buffer + worker->index * probe->bytes_per_thread, 1, (size_t)probe->bytes_per_thread);
}

void probe_bandwidth(struct probe *probe, struct probe_result *best)
{
    double bytes = (double)probe->bytes_per_thread * probe->n_threads, began = seconds_now();
    for (int round = 0; round < READ_ROUNDS; ++round)
        for (read_variant variant = READ_1; variant < READ_VARIANTS; ++variant) {
            double gbs = 1e-9 * bytes / measure(probe, read_run, &variant).wall;
            if (gbs > best->bandwidth_gbs) best->bandwidth_gbs = gbs;
            if (seconds_now() - began > read_seconds) return;
        }
}

/* ---- Rate and clock ---------------------------------------------------------------------------------------------- */

/* A chain of additions, each waiting for the one before: one a clock on every CPU of these kinds. */
static uint64_t add_chain(int64_t rounds)
{
    uint64_t sum = 0, one = 1;
    while (rounds--) {
#if defined(__x86_64__)
        __asm__ volatile(".rept 64\n\tadd %1, %0\n\t.endr" : "+r"(sum) : "r"(one));
#elif defined(__aarch64__)
        __asm__ volatile(".rept 64\n\tadd %0, %0, %1\n\t.endr" : "+r"(sum) : "r"(one));
#endif
    }
    return sum;
}

struct rate_task {
    const struct probe_kernel *kernel; /* NULL = the chain of additions */
    int64_t rounds;
};

static void rate_run(struct worker *worker)
{
    const struct rate_task *task = worker->argument;
    if (task->kernel)
        task->kernel->run(task->rounds);
    else
        worker->sink = add_chain(task->rounds);
}

/* CPU time of the busiest thread, the shortest of a few tries; *rounds is raised until they take long enough. */
static double rate_measure(struct probe *probe, const struct probe_kernel *kernel, int64_t *rounds)
{
    struct rate_task task = {kernel, 1000};
    double shortest = INFINITY;
    for (int tries = 0; tries < RATE_TRIES; ++tries) {
        double busy = measure(probe, rate_run, &task).busy;
        if (busy < shortest) shortest = busy;
        if (busy < rate_seconds / 2) { /* begin again with more */
            task.rounds = (int64_t)((double)task.rounds * fmin(rate_seconds / fmax(busy, 1e-9), 1000));
            shortest = INFINITY;
            tries = -1;
        }
    }
    *rounds = task.rounds;
    return shortest;
}

/* The best instruction that the level has; f32's in int8 compute where it has none of its own. */
static const struct probe_kernel *kernel_find(moe4_isa isa, moe4_compute compute)
{
    static const struct probe_kernel *const kernels[] = {
#if defined(__x86_64__)
        &probe_kernel_int8_avx512_vnni,
        &probe_kernel_int8_avx2,
        &probe_kernel_amx,
        &probe_kernel_avx512_bf16,
        &probe_kernel_avx512_vnni,
        &probe_kernel_avx512,
        &probe_kernel_avx2,
#elif defined(__aarch64__)
        &probe_kernel_neon_bf16,
        &probe_kernel_neon,
#endif
        &probe_kernel_c,
    };
    size_t i = 0;
    while (kernels[i]->isa > isa || (kernels[i]->compute == MOE4_COMPUTE_INT8 && compute != MOE4_COMPUTE_INT8)) ++i;
    return kernels[i];
}

void probe_rate(struct probe *probe, moe4_isa isa, moe4_compute compute, struct probe_result *best)
{
    const struct probe_kernel *kernel = kernel_find(isa, compute);
    int64_t rounds;
    double seconds = rate_measure(probe, kernel, &rounds); /* of CPU time: the rate is the machine's, whoever uses it */
    double gflops = 1e-9 * (double)rounds * kernel->chains * kernel->flops * probe->n_threads / seconds;
    double clock_ghz = 0;
#if defined(__x86_64__) || defined(__aarch64__)
    seconds = rate_measure(probe, NULL, &rounds);
    clock_ghz = 1e-9 * (double)rounds * ADDS / seconds;
#endif
    if (clock_ghz > best->clock_ghz) best->clock_ghz = clock_ghz;
    if (gflops > best->rate_gflops) {
        best->rate_gflops = gflops;
        best->instruction = kernel->instruction;
    }
    best->rate_per_clock = kernel->counts_instructions && best->clock_ghz > 0
                               ? best->rate_gflops / kernel->flops / probe->n_threads / best->clock_ghz
                               : 0;
}

/* Whether there are several memories: the library then spreads its weights so that their readers are near (which these
 * threads, each with a run of its own, are not). */
static int has_several_nodes(void)
{
    char online[64] = "";
    FILE *file = fopen("/sys/devices/system/node/online", "r");
    if (!file) return 0;
    if (!fgets(online, sizeof online, file)) online[0] = '\0';
    fclose(file);
    return strpbrk(online, "-,") != NULL;
}

/* A buffer of our own, every page of it where its reader runs. */
static int probe_allocate(struct probe *probe, int64_t weight_bytes)
{
    int64_t enough = weight_bytes < buffer_bytes_most / 4 ? 4 * weight_bytes : buffer_bytes_most;
    int64_t affordable = memory_available("") / 4;
    probe->bytes = buffer_bytes_most;
    while (probe->bytes > buffer_bytes_least && (probe->bytes / 2 >= enough || probe->bytes > affordable))
        probe->bytes /= 2;
    probe->buffer = mmap(NULL, (size_t)probe->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (probe->buffer == MAP_FAILED) {
        probe->buffer = NULL;
        return fail("out of memory: %lld bytes for measuring the bandwidth", (long long)probe->bytes);
    }
    probe->is_own = 1;
    madvise(probe->buffer, (size_t)probe->bytes, MADV_HUGEPAGE);
    return EXIT_OK;
}

int probe_open(int32_t n_threads, int64_t weight_bytes, const struct memory_record *weights, struct probe **result)
{
    struct probe *probe;
    int code = allocate(&probe, 1, sizeof *probe, "the probe");
    if (code) return code;
    probe->n_threads = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    if (sched_getaffinity(0, sizeof probe->cpus, &probe->cpus)) CPU_ZERO(&probe->cpus);
    if (weights && (int64_t)weights->n_bytes >= weights_bytes_least && !has_several_nodes()) {
        probe->buffer = weights->block;
        probe->bytes = (int64_t)weights->n_bytes;
    } else {
        code = probe_allocate(probe, weight_bytes);
    }
    if (code) {
        free(probe);
        return code;
    }
    probe->bytes_per_thread = probe->bytes / probe->n_threads / (8 * LINE_BYTES) * (8 * LINE_BYTES);
    if (probe->is_own) measure(probe, touch, NULL);
    *result = probe;
    return EXIT_OK;
}

void probe_close(struct probe *probe)
{
    if (!probe) return;
    if (probe->is_own) munmap(probe->buffer, (size_t)probe->bytes);
    free(probe);
}
