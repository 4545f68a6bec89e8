/* Measuring tactics: every one on every bucket, the fastest kept. */
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "base/convert.h"
#include "base/dims.h"
#include "context.h"
#include "layer.h"
#include "supports.h"
#include "tuning.h"

enum { DEFAULT_MAX_TOKENS = 8192, MAX_SAMPLES = 64, MAX_BUCKETS = 64 };

/* An argument of the calls: where kernels find it, and where this file writes or reads it, the same on the host. */
struct array {
    void *device, *host;
    size_t bytes;
};

/* Memory for the largest bucket, and the calls' arguments. */
struct tuner {
    moe4_context *context;
    const moe4_layer *layer;
    moe4_tune_options options;
    int32_t A;
    struct array x, y;         /* bf16 [T, H], [T, output_size] */
    struct array ids, weights; /* [calls, T, A] of the calls that are timed together; [T, A] */
    struct array workspace;    /* on the device alone */
    uint16_t *expected;        /* as y */
    int64_t n_tokens;          /* of the calls being timed */
    uint64_t random;
};

static uint64_t next_random(struct tuner *tuner)
{
    uint64_t z = tuner->random += 0x9E3779B97F4A7C15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int32_t calls_a_sample(const struct tuner *tuner, int64_t n_tokens)
{
    return tuner->layer->backend->calls_a_sample(n_tokens);
}

/* To where kernels find it. */
static moe4_status send(struct tuner *tuner, const struct array *array, size_t bytes)
{
    if (array->device == array->host) return MOE4_OK;
    return tuner->layer->backend->upload_part(tuner->context, tuner->layer, array->device, array->host, bytes);
}

static moe4_status receive(struct tuner *tuner, const struct array *array, size_t bytes)
{
    if (array->device == array->host) return MOE4_OK;
    return tuner->layer->backend->download_part(tuner->context, tuner->layer, array->host, array->device, bytes);
}

/* Uniform random global ids, distinct within a token; about all of them are local where the layer has all experts. */
static moe4_status fill_ids(struct tuner *tuner, int64_t n_tokens)
{
    int32_t *ids = tuner->ids.host;
    const int64_t all_tokens = calls_a_sample(tuner, n_tokens) * n_tokens;
    for (int64_t t = 0; t < all_tokens; t++) {
        int32_t *row = ids + t * tuner->A;
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
    return send(tuner, &tuner->ids, (size_t)(all_tokens * tuner->A) * sizeof *ids);
}

static moe4_status fill_inputs(struct tuner *tuner)
{
    const int64_t T = tuner->options.max_tokens;
    uint16_t *x = tuner->x.host;
    float *weights = tuner->weights.host;
    for (int64_t i = 0; i < T * tuner->layer->H; i++) {
        int32_t value = (int32_t)(next_random(tuner) >> 40) - (1 << 23);
        x[i] = bf16_from_f32((float)value * 0x1p-22f);
    }
    for (int64_t i = 0; i < T * tuner->A; i++) weights[i] = 1.0f / (float)tuner->A;
    moe4_status status = send(tuner, &tuner->x, tuner->x.bytes);
    return status ? status : send(tuner, &tuner->weights, tuner->weights.bytes);
}

/* Call `index` of those timed together; each has experts of its own, so that weights come from memory. */
static moe4_status run_call(void *user, int32_t index, void *stream)
{
    struct tuner *tuner = user;
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    batch.n_tokens = tuner->n_tokens;
    batch.compute = tuner->options.compute;
    batch.x = tuner->x.device;
    batch.workspace = tuner->workspace.device;
    batch.workspace_bytes = tuner->workspace.bytes;
    batch.stream = stream;
    topk.top_k = tuner->A;
    topk.ids = (const int32_t *)tuner->ids.device + index * tuner->n_tokens * tuner->A;
    topk.weights = tuner->weights.device;
    result.y = tuner->y.device;
    return moe4_forward_experts(tuner->context, tuner->layer, &batch, &topk, &result);
}

/* A sample: calls with new experts. */
static moe4_status time_sample(struct tuner *tuner, int64_t n_tokens, double *ms)
{
    tuner->n_tokens = n_tokens;
    moe4_status status = fill_ids(tuner, n_tokens);
    if (status) return status;
    return tuner->layer->backend->time_calls(tuner->context, calls_a_sample(tuner, n_tokens), run_call, tuner, ms);
}

/* The output of the first call, to the host's y. */
static moe4_status run_once(struct tuner *tuner, const moe4_tuning_entry *entry)
{
    tuner->n_tokens = entry->n_tokens;
    moe4_status status = tuning_put(tuner->context, entry);
    if (!status) status = run_call(tuner, 0, NULL);
    return status ? status : receive(tuner, &tuner->y, (size_t)(entry->n_tokens * tuner->layer->output_size) * 2);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of the tactic in `entry`. */
static moe4_status measure(struct tuner *tuner, moe4_tuning_entry *entry)
{
    double samples[MAX_SAMPLES], spent = 0, ms;
    int n = 0;
    moe4_status status = tuning_put(tuner->context, entry);
    if (!status) status = time_sample(tuner, entry->n_tokens, &ms);
    while (!status && n < MAX_SAMPLES && (n < 3 || spent < tuner->options.ms_a_choice)) {
        status = time_sample(tuner, entry->n_tokens, &samples[n]);
        spent += samples[n++] * calls_a_sample(tuner, entry->n_tokens);
    }
    if (status) return status;
    qsort(samples, (size_t)n, sizeof *samples, compare_doubles);
    entry->ms = samples[n / 2];
    return MOE4_OK;
}

/* A tactic must not change a bit. */
static moe4_status verify(struct tuner *tuner, const moe4_tuning_entry *entry)
{
    const size_t bytes = (size_t)(entry->n_tokens * tuner->layer->output_size) * sizeof *tuner->expected;
    moe4_tuning_entry plain = *entry;
    plain.tactic = (moe4_tactic){0, 0};
    moe4_status status = run_once(tuner, &plain);
    if (!status) memcpy(tuner->expected, tuner->y.host, bytes);
    if (!status) status = run_once(tuner, entry);
    if (!status && memcmp(tuner->y.host, tuner->expected, bytes) != 0)
        status = context_fail(tuner->context, MOE4_EDEVICE, "tactic (%d, %d) changes the result of %lld tokens",
                              entry->tactic.tile_tokens, entry->tactic.claim_share, (long long)entry->n_tokens);
    return status;
}

static moe4_status tune_bucket(struct tuner *tuner, int64_t n_tokens, moe4_tuning_entry *best)
{
    const struct backend *backend = tuner->layer->backend;
    moe4_status status = MOE4_OK;
    *best = (moe4_tuning_entry){.size = sizeof *best,
                                .hidden_size = tuner->layer->H,
                                .intermediate_size = tuner->layer->I,
                                .n_local_experts = tuner->layer->L,
                                .top_k = tuner->A,
                                .compute = tuner->options.compute,
                                .n_tokens = n_tokens};
    for (int32_t i = 0; !status && i < backend->n_tactics; i++) {
        moe4_tuning_entry entry = *best;
        entry.tactic = backend->tactics[i];
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

/* Memory for the device, and for this file where that is not the same. */
static int open_array(struct tuner *tuner, struct array *array, size_t bytes, int has_host)
{
    const struct backend *backend = tuner->layer->backend;
    const moe4_allocator *allocator = &tuner->context->allocator;
    const int is_host = !backend->upload_part;
    array->bytes = bytes;
    array->device =
        is_host ? allocator->allocate(allocator->user, bytes, 256) : backend->allocate_part(tuner->layer, bytes);
    array->host = is_host ? array->device : has_host ? memory_allocate(allocator, bytes) : NULL;
    return array->device && (array->host || !has_host);
}

static void close_array(const struct tuner *tuner, const struct array *array)
{
    const moe4_allocator *allocator = &tuner->context->allocator;
    memory_release(allocator, array->host, array->bytes);
    if (array->device && array->device != array->host)
        tuner->layer->backend->release_part(tuner->layer, array->device, array->bytes);
}

static moe4_status allocate(struct tuner *tuner)
{
    const moe4_layer *layer = tuner->layer;
    const int64_t T = tuner->options.max_tokens;
    size_t workspace_bytes;
    int64_t buckets[MAX_BUCKETS], most = T; /* tokens of calls timed together */
    for (int32_t i = list_buckets(T, buckets); i-- > 0;)
        if (calls_a_sample(tuner, buckets[i]) * buckets[i] > most)
            most = calls_a_sample(tuner, buckets[i]) * buckets[i];
    moe4_status status =
        moe4_workspace_bytes(tuner->context, layer, tuner->options.compute, T, tuner->A, &workspace_bytes);
    if (status) return status;
    const size_t y_bytes = (size_t)(T * layer->output_size) * 2;
    int is_complete = open_array(tuner, &tuner->x, (size_t)(T * layer->H) * 2, 1);
    is_complete &= open_array(tuner, &tuner->y, y_bytes, 1);
    is_complete &= open_array(tuner, &tuner->ids, (size_t)(most * tuner->A) * sizeof(int32_t), 1);
    is_complete &= open_array(tuner, &tuner->weights, (size_t)(T * tuner->A) * sizeof(float), 1);
    is_complete &= open_array(tuner, &tuner->workspace, workspace_bytes, 0);
    tuner->expected = memory_allocate(&tuner->context->allocator, y_bytes);
    return is_complete && tuner->expected ? MOE4_OK
                                          : context_fail_memory(tuner->context, "tuning inputs", workspace_bytes);
}

static void release(struct tuner *tuner)
{
    memory_release(&tuner->context->allocator, tuner->expected, tuner->y.bytes);
    close_array(tuner, &tuner->workspace);
    close_array(tuner, &tuner->weights);
    close_array(tuner, &tuner->ids);
    close_array(tuner, &tuner->y);
    close_array(tuner, &tuner->x);
}

moe4_status moe4_tune(moe4_context *context, const moe4_layer *layer, const moe4_tune_options *given)
{
    static const moe4_tune_options defaults = MOE4_TUNE_OPTIONS_INIT;
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!layer) return context_fail(context, MOE4_EINVAL, "layer is NULL");
    struct tuner tuner = {.context = context, .layer = layer};
    moe4_tune_options *options = &tuner.options;
    moe4_status status = adopt_struct(context, "options", given ? given : &defaults, options, sizeof *options);
    if (status) return status;
    if (layer->backend != context->backend)
        return context_fail(context, MOE4_EINVAL, "the layer is on another device than the context's");
    if (!options->max_tokens) options->max_tokens = DEFAULT_MAX_TOKENS;
    if (options->ms_a_choice <= 0) options->ms_a_choice = 200;
    if (options->max_tokens < 1 || options->max_tokens > 1 << 20)
        return context_fail(context, MOE4_EINVAL, "max_tokens is %lld, expected 1 to %d",
                            (long long)options->max_tokens, 1 << 20);
    tuner.A = options->top_k ? options->top_k : layer->router.top_k;
    status = allocate(&tuner);
    if (!status) status = fill_inputs(&tuner);
    if (!status) status = tune_buckets(&tuner);
    release(&tuner);
    return status;
}
