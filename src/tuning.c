#include "tuning.h"

#include <string.h>

enum { FIRST_CAPACITY = 32 };

/* ---- Buckets ---------------------------------------------------------------------------------------------------- */

static int64_t next_power_of_two(int64_t n)
{
    int64_t power = 1;
    while (power < n && power < INT64_MAX / 2) power *= 2;
    return power;
}

static int64_t next_multiple(int64_t n, int64_t step)
{
    return (n + step - 1) / step * step;
}

int64_t moe4_tuning_bucket(int64_t n_tokens, int64_t max_tokens)
{
    if (n_tokens <= 0) return 1;
    if (n_tokens >= max_tokens) return max_tokens;
    int64_t bucket = n_tokens <= 256    ? next_power_of_two(n_tokens)
                     : n_tokens <= 2048 ? next_multiple(n_tokens, 256)
                     : n_tokens <= 4096 ? next_multiple(n_tokens, 512)
                                        : next_power_of_two(n_tokens);
    return bucket < max_tokens ? bucket : max_tokens;
}

/* ---- The table -------------------------------------------------------------------------------------------------- */

static int same_key(const moe4_tuning_entry *a, const moe4_tuning_entry *b)
{
    return a->hidden_size == b->hidden_size && a->intermediate_size == b->intermediate_size &&
           a->n_local_experts == b->n_local_experts && a->top_k == b->top_k && a->compute == b->compute &&
           a->n_tokens == b->n_tokens;
}

static moe4_tuning_entry *find(const struct tuning *tuning, const moe4_tuning_entry *key)
{
    for (int32_t i = 0; i < tuning->n; i++)
        if (same_key(&tuning->entries[i], key)) return &tuning->entries[i];
    return NULL;
}

static moe4_status grow(struct moe4_context *context, struct tuning *tuning)
{
    int32_t capacity = tuning->capacity ? 2 * tuning->capacity : FIRST_CAPACITY;
    size_t n_bytes = (size_t)capacity * sizeof *tuning->entries;
    moe4_tuning_entry *entries = memory_allocate(&context->allocator, n_bytes);
    if (!entries) return context_fail_memory(context, "tuning", n_bytes);
    size_t used = (size_t)tuning->n * sizeof *entries;
    if (used) memcpy(entries, tuning->entries, used);
    memory_release(&context->allocator, tuning->entries, (size_t)tuning->capacity * sizeof *entries);
    tuning->entries = entries;
    tuning->capacity = capacity;
    return MOE4_OK;
}

moe4_status tuning_put(struct moe4_context *context, const moe4_tuning_entry *entry)
{
    struct tuning *tuning = &context->tuning;
    moe4_tuning_entry *place = find(tuning, entry);
    if (!place) {
        moe4_status status = tuning->n == tuning->capacity ? grow(context, tuning) : MOE4_OK;
        if (status) return status;
        place = &tuning->entries[tuning->n++];
    }
    *place = *entry;
    if (entry->n_tokens > tuning->max_tokens) tuning->max_tokens = entry->n_tokens;
    return MOE4_OK;
}

moe4_tactic tuning_find(const struct moe4_context *context, const struct moe4_layer *layer, moe4_compute compute,
                        int64_t n_tokens, int32_t top_k)
{
    const struct tuning *tuning = &context->tuning;
    if (!tuning->n) return (moe4_tactic){0, 0};
    const moe4_tuning_entry key = {.hidden_size = layer->H,
                                   .intermediate_size = layer->I,
                                   .n_local_experts = layer->L,
                                   .top_k = top_k,
                                   .compute = compute,
                                   .n_tokens = moe4_tuning_bucket(n_tokens, tuning->max_tokens)};
    const moe4_tuning_entry *entry = find(tuning, &key);
    return entry ? entry->tactic : (moe4_tactic){0, 0};
}

void tuning_release(struct moe4_context *context)
{
    struct tuning *tuning = &context->tuning;
    memory_release(&context->allocator, tuning->entries, (size_t)tuning->capacity * sizeof *tuning->entries);
    *tuning = (struct tuning){0};
}

int32_t moe4_tuning_count(const moe4_context *context)
{
    return context ? context->tuning.n : 0;
}

moe4_status moe4_tuning_get(const moe4_context *context, int32_t index, moe4_tuning_entry *entry)
{
    if (!context || !entry || index < 0 || index >= context->tuning.n) return MOE4_EINVAL;
    *entry = context->tuning.entries[index];
    return MOE4_OK;
}
