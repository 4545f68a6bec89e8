/* A key of what a reader reads, from facts that change when the checkpoint does; its bytes are not read. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "io/layer_reader.h"

static void hash_number(XXH3_state_t *hash, int64_t value)
{
    XXH3_128bits_update(hash, &value, sizeof value);
}

static void hash_text(XXH3_state_t *hash, const char *text)
{
    XXH3_128bits_update(hash, text, strlen(text) + 1);
}

static void hash_param(XXH3_state_t *hash, const moe4_param *param)
{
    hash_number(hash, param->presence);
    XXH3_128bits_update(hash, &param->value, sizeof param->value);
}

/* What config.json says. */
static void hash_config(XXH3_state_t *hash, const moe4_layer_config *config)
{
    const moe4_routing *routing = &config->routing;
    const int64_t numbers[] = {config->hidden_size, config->intermediate_size, config->output_size, config->n_experts,
                               config->gate_up,     config->activation,        routing->method,     routing->top_k,
                               routing->n_group,    routing->topk_group,       routing->renormalize};
    XXH3_128bits_update(hash, numbers, sizeof numbers);
    XXH3_128bits_update(hash, &routing->scaling_factor, sizeof routing->scaling_factor);
    hash_param(hash, &config->alpha);
    hash_param(hash, &config->beta);
    hash_param(hash, &config->limit);
}

/* A file's size and time; one that cannot be looked at any more hashes as if it had neither. */
static void hash_file(XXH3_state_t *hash, const char *path)
{
    struct stat facts = {0};
    hash_text(hash, path);
    if (stat(path, &facts) != 0) facts = (struct stat){0};
    hash_number(hash, facts.st_size);
    hash_number(hash, facts.st_mtim.tv_sec);
    hash_number(hash, facts.st_mtim.tv_nsec);
}

static void hash_slice(XXH3_state_t *hash, const struct slice *slice)
{
    hash_text(hash, slice->tensor->name);
    hash_text(hash, slice->tensor->dtype);
    hash_number(hash, slice->tensor->offset);
    hash_number(hash, slice->first);
    hash_number(hash, slice->n_bytes);
}

/* A tensor that is read whole, with its file. */
static void hash_source(XXH3_state_t *hash, const moe4_tensor *tensor)
{
    hash_file(hash, tensor->file);
    hash_text(hash, tensor->name);
    hash_text(hash, tensor->dtype);
    hash_number(hash, tensor->offset);
}

moe4_status moe4_layer_reader_key(const moe4_layer_reader *reader, char key[33])
{
    if (!reader || !key) return MOE4_EINVAL;
    const struct plan *plan = &reader->plan;
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    hash_text(&hash, plan->family->layout);
    hash_number(&hash, plan->layer_number);
    hash_number(&hash, plan->first_expert);
    hash_number(&hash, plan->n_local);
    hash_config(&hash, &reader->config);
    const char *file = NULL;
    for (int32_t l = 0; l < plan->n_local; l++)
        for (int32_t i = 0; i < plan->n_slices; i++) {
            const struct slice *slice = &plan->slices[(int64_t)l * MAX_SLICES + i];
            if (!file || strcmp(slice->tensor->file, file) != 0) hash_file(&hash, file = slice->tensor->file);
            hash_slice(&hash, slice);
        }
    for (int i = 0; i < N_SOURCES; i++)
        if (plan->sources[i]) hash_source(&hash, plan->sources[i]);
    XXH128_hash_t value = XXH3_128bits_digest(&hash);
    snprintf(key, 33, "%016llx%016llx", (unsigned long long)value.high64, (unsigned long long)value.low64);
    return MOE4_OK;
}
