/* Measuring tactics: every one on every bucket, the fastest kept. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend.h"
#include "base/checked.h"
#include "base/convert.h"
#include "base/dims.h"
#include "context.h"
#include "layer.h"
#include "supports.h"
#include "tuning.h"

/* The alternatives; the default comes first. */
static const moe4_tactic tactics[] = {{0, 0}, {6, 0}, {8, 0}, {10, 0}, {0, 1}, {0, 2}, {0, 16}, {6, 2}};

enum { N_TACTICS = sizeof tactics / sizeof *tactics, DEFAULT_MAX_TOKENS = 8192, MAX_SAMPLES = 64, MAX_BUCKETS = 64 };

/* Memory for the largest bucket, and the calls' arguments. */
struct tuner {
    moe4_context *context;
    const moe4_layer *layer;
    moe4_tune_options options;
    int32_t A;
    uint16_t *x, *y, *expected; /* [T, H], [T, output_size] */
    int32_t *ids;               /* [T, A] */
    float *weights;             /* [T, A] */
    void *workspace;
    size_t x_bytes, y_bytes, slots_bytes, workspace_bytes;
    uint64_t random;
};

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static uint64_t next_random(struct tuner *tuner)
{
    uint64_t z = tuner->random += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Uniform random global ids, distinct within a token; about all of them are local where the layer has all experts. */
static void fill_ids(struct tuner *tuner, int64_t n_tokens)
{
    for (int64_t t = 0; t < n_tokens; t++) {
        int32_t *row = tuner->ids + t * tuner->A;
        for (int32_t a = 0; a < tuner->A; a++) {
            int32_t id, b;
            do {
                id = (int32_t)(next_random(tuner) % (uint64_t)tuner->layer->E);
                for (b = 0; b < a && row[b] != id; b++) {
                }
            } while (b < a);
            row[a] = id;
        }
    }
}

static void fill_inputs(struct tuner *tuner)
{
    int64_t T = tuner->options.max_tokens;
    for (int64_t i = 0; i < T * tuner->layer->H; i++) {
        int32_t value = (int32_t)(next_random(tuner) >> 40) - (1 << 23);
        tuner->x[i] = bf16_from_f32((float)value * 0x1p-22f);
    }
    for (int64_t i = 0; i < T * tuner->A; i++) tuner->weights[i] = 1.0f / (float)tuner->A;
}

static moe4_status run_once(struct tuner *tuner, int64_t n_tokens, uint16_t *y, double *ms)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    batch.n_tokens = n_tokens;
    batch.compute = tuner->options.compute;
    batch.x = tuner->x;
    batch.workspace = tuner->workspace;
    batch.workspace_bytes = tuner->workspace_bytes;
    topk.top_k = tuner->A;
    topk.ids = tuner->ids;
    topk.weights = tuner->weights;
    result.y = y;
    double start = now_ms();
    moe4_status status = moe4_forward_experts(tuner->context, tuner->layer, &batch, &topk, &result);
    *ms = now_ms() - start;
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of the tactic in `entry`, with new experts for every call so that weights come from memory. */
static moe4_status measure(struct tuner *tuner, moe4_tuning_entry *entry)
{
    double samples[MAX_SAMPLES], spent = 0, ms;
    int n = 0;
    moe4_status status = tuning_put(tuner->context, entry);
    if (!status) status = run_once(tuner, entry->n_tokens, tuner->y, &ms);
    while (!status && n < MAX_SAMPLES && (n < 3 || spent < tuner->options.ms_a_choice)) {
        fill_ids(tuner, entry->n_tokens);
        status = run_once(tuner, entry->n_tokens, tuner->y, &samples[n]);
        spent += samples[n++];
    }
    if (status) return status;
    qsort(samples, (size_t)n, sizeof *samples, compare_doubles);
    entry->ms = samples[n / 2];
    return MOE4_OK;
}

/* A tactic must not change a bit. */
static moe4_status verify(struct tuner *tuner, const moe4_tuning_entry *entry)
{
    double ms;
    size_t n_bytes = (size_t)(entry->n_tokens * tuner->layer->output_size) * sizeof *tuner->y;
    moe4_tuning_entry plain = *entry;
    plain.tactic = tactics[0];
    moe4_status status = tuning_put(tuner->context, &plain);
    if (!status) status = run_once(tuner, entry->n_tokens, tuner->expected, &ms);
    if (!status) status = tuning_put(tuner->context, entry);
    if (!status) status = run_once(tuner, entry->n_tokens, tuner->y, &ms);
    if (!status && memcmp(tuner->y, tuner->expected, n_bytes) != 0)
        status = context_fail(tuner->context, MOE4_EDEVICE, "tactic (%d, %d) changes the result of %lld tokens",
                              entry->tactic.tile_tokens, entry->tactic.claim_share, (long long)entry->n_tokens);
    return status;
}

static moe4_status tune_bucket(struct tuner *tuner, int64_t n_tokens, moe4_tuning_entry *best)
{
    moe4_status status = MOE4_OK;
    *best = (moe4_tuning_entry){.size = sizeof *best,
                                .hidden_size = tuner->layer->H,
                                .intermediate_size = tuner->layer->I,
                                .n_local_experts = tuner->layer->L,
                                .top_k = tuner->A,
                                .compute = tuner->options.compute,
                                .n_tokens = n_tokens};
    fill_ids(tuner, n_tokens);
    for (int i = 0; !status && i < N_TACTICS; i++) {
        moe4_tuning_entry entry = *best;
        entry.tactic = tactics[i];
        status = measure(tuner, &entry);
        if (status) break;
        if (i == 0)
            *best = entry, best->default_ms = entry.ms;
        else if (entry.ms < best->ms)
            best->tactic = entry.tactic, best->ms = entry.ms;
    }
    if (!status) status = verify(tuner, best);
    return status;
}

static int32_t list_buckets(int64_t max_tokens, int64_t buckets[MAX_BUCKETS])
{
    int32_t n = 0;
    for (int64_t tokens = 1; n < MAX_BUCKETS; tokens = buckets[n - 1] + 1) {
        buckets[n++] = moe4_tuning_bucket(tokens, max_tokens);
        if (buckets[n - 1] == max_tokens) break;
    }
    return n;
}

static moe4_status tune_buckets(struct tuner *tuner)
{
    int64_t buckets[MAX_BUCKETS];
    int32_t n = list_buckets(tuner->options.max_tokens, buckets);
    for (int32_t i = 0; i < n; i++) {
        moe4_tuning_entry best;
        moe4_status status = tune_bucket(tuner, buckets[i], &best);
        if (status) return status;
        if (tuner->options.progress && tuner->options.progress(tuner->options.user, &best, i + 1, n)) break;
    }
    return MOE4_OK;
}

static moe4_status allocate(struct tuner *tuner)
{
    const moe4_layer *layer = tuner->layer;
    const moe4_allocator *allocator = &tuner->context->allocator;
    int64_t T = tuner->options.max_tokens;
    moe4_status status =
        moe4_workspace_bytes(tuner->context, layer, tuner->options.compute, T, tuner->A, &tuner->workspace_bytes);
    if (status) return status;
    tuner->x_bytes = (size_t)(T * layer->H) * 2;
    tuner->y_bytes = (size_t)(T * layer->output_size) * 2;
    tuner->slots_bytes = (size_t)(T * tuner->A) * 4;
    tuner->x = memory_allocate(allocator, tuner->x_bytes);
    tuner->y = memory_allocate(allocator, tuner->y_bytes);
    tuner->expected = memory_allocate(allocator, tuner->y_bytes);
    tuner->ids = memory_allocate(allocator, tuner->slots_bytes);
    tuner->weights = memory_allocate(allocator, tuner->slots_bytes);
    tuner->workspace = allocator->allocate(allocator->user, tuner->workspace_bytes, 256);
    if (!tuner->x || !tuner->y || !tuner->expected || !tuner->ids || !tuner->weights || !tuner->workspace)
        return context_fail_memory(tuner->context, "tuning inputs", tuner->workspace_bytes);
    return MOE4_OK;
}

static void release(struct tuner *tuner)
{
    const moe4_allocator *allocator = &tuner->context->allocator;
    memory_release(allocator, tuner->workspace, tuner->workspace_bytes);
    memory_release(allocator, tuner->weights, tuner->slots_bytes);
    memory_release(allocator, tuner->ids, tuner->slots_bytes);
    memory_release(allocator, tuner->expected, tuner->y_bytes);
    memory_release(allocator, tuner->y, tuner->y_bytes);
    memory_release(allocator, tuner->x, tuner->x_bytes);
}

moe4_status moe4_tune(moe4_context *context, const moe4_layer *layer, const moe4_tune_options *given)
{
    static const moe4_tune_options defaults = MOE4_TUNE_OPTIONS_INIT;
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!layer) return context_fail(context, MOE4_EINVAL, "layer is NULL");
    struct tuner tuner = {.context = context, .layer = layer};
    moe4_tune_options *options = &tuner.options;
    moe4_status status = require_cpu(context, "moe4_tune");
    if (!status) status = adopt_struct(context, "options", given ? given : &defaults, options, sizeof *options);
    if (status) return status;
    if (!options->max_tokens) options->max_tokens = DEFAULT_MAX_TOKENS;
    if (options->ms_a_choice <= 0) options->ms_a_choice = 200;
    if (options->max_tokens < 1 || options->max_tokens > 1 << 20)
        return context_fail(context, MOE4_EINVAL, "max_tokens is %lld, expected 1 to %d",
                            (long long)options->max_tokens, 1 << 20);
    tuner.A = options->top_k ? options->top_k : layer->router.top_k;
    status = allocate(&tuner);
    if (!status) {
        fill_inputs(&tuner);
        status = tune_buckets(&tuner);
    }
    release(&tuner);
    return status;
}
