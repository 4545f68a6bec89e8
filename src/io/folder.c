/* The shards of a folder: those that model.safetensors.index.json lists; without it model.safetensors alone, since
 * other files may lie beside it; without that every *.safetensors. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "io/show.h"
#include "io/tensors.h"

static const char index_name[] = "model.safetensors.index.json";
static const char single_name[] = "model.safetensors";
static const char extension[] = ".safetensors";
#define LARGEST_INDEX ((int64_t)1 << 30)

struct shard {
    const char *name;
    const char *tensor; /* one that the index puts there; NULL without an index */
};

struct shards {
    struct shard *items;
    size_t count, capacity;
};

static moe4_status shards_add(moe4_context *context, struct shards *shards, struct shard added)
{
    struct shard *items =
        array_grow(&context->allocator, shards->items, &shards->capacity, shards->count, sizeof *items);
    if (!items) return context_fail_memory(context, "a list of files", (shards->count + 1) * sizeof *items);
    shards->items = items;
    items[shards->count++] = added;
    return MOE4_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const struct shard *)a)->name, ((const struct shard *)b)->name);
}

/* Opens the shards in alphabetical order. */
static moe4_status shards_open(moe4_context *context, moe4_tensors *tensors, struct shards *shards)
{
    if (shards->count) qsort(shards->items, shards->count, sizeof *shards->items, compare_names);
    for (size_t i = 0; i < shards->count; i++) {
        const struct shard *shard = &shards->items[i];
        const char *path = tensors_join(context, tensors, tensors->path, shard->name);
        if (!path) return MOE4_ENOMEM;
        if (shard->tensor && file_look(path) == FILE_MISSING)
            return context_fail(context, MOE4_EFORMAT, "%s: tensor \"%s\" is in shard \"%s\", which is missing",
                                index_name, show_name(shard->tensor).text, show_name(shard->name).text);
        moe4_status status = tensors_add_file(context, tensors, path);
        if (status != MOE4_OK) return status;
    }
    return MOE4_OK;
}

/* ---- Without an index -------------------------------------------------------------------------------------------- */

static int is_shard(const char *name)
{
    size_t length = strlen(name), suffix = sizeof extension - 1;
    return name[0] != '.' && length > suffix && strcmp(name + length - suffix, extension) == 0;
}

static moe4_status list_folder(moe4_context *context, moe4_tensors *tensors, DIR *folder, struct shards *shards)
{
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(folder);
        if (!entry && errno)
            return context_fail(context, MOE4_EIO, "%.200s: cannot list: %s", tensors->path, strerror(errno));
        if (!entry) return MOE4_OK;
        if (!is_shard(entry->d_name)) continue;
        const char *name = arena_copy(&tensors->strings, &tensors->allocator, entry->d_name, strlen(entry->d_name));
        if (!name) return context_fail_memory(context, "a file name", strlen(entry->d_name) + 1);
        moe4_status status = shards_add(context, shards, (struct shard){name, NULL});
        if (status != MOE4_OK) return status;
    }
}

static moe4_status add_all(moe4_context *context, moe4_tensors *tensors)
{
    struct shards shards = {0};
    DIR *folder = opendir(tensors->path);
    if (!folder) return context_fail(context, MOE4_EIO, "%.200s: cannot list: %s", tensors->path, strerror(errno));
    moe4_status status = list_folder(context, tensors, folder, &shards);
    closedir(folder);
    if (status == MOE4_OK && !shards.count)
        status = context_fail(context, MOE4_EFORMAT, "%.200s: holds no *%s file", tensors->path, extension);
    if (status == MOE4_OK) status = shards_open(context, tensors, &shards);
    array_release(&context->allocator, shards.items, shards.capacity, sizeof *shards.items);
    return status;
}

/* ---- With an index ----------------------------------------------------------------------------------------------- */

/* One pair of weight_map; both point into the index's text. */
struct listed {
    const char *tensor, *shard;
};

struct index {
    moe4_context *context;
    struct json_scanner scanner;
    struct listed *items;
    size_t count, capacity;
};

static moe4_status fail_index(struct index *index, const char *expected)
{
    const struct json_scanner *scanner = &index->scanner;
    return context_fail(index->context, MOE4_EFORMAT, "%s: byte %td: %s%s", index_name, scanner->at - scanner->text,
                        scanner->error ? "" : "expected ", scanner->error ? scanner->error : expected);
}

/* A shard lies in the folder itself, whatever an index from elsewhere says. */
static int is_plain_name(const char *name)
{
    return name[0] && !strpbrk(name, "/\\") && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static moe4_status read_weight_map(struct index *index)
{
    struct json_scanner *scanner = &index->scanner;
    if (json_next(scanner) != JSON_OBJECT) return fail_index(index, "an object");
    for (json_token token = json_next(scanner); token != JSON_OBJECT_END; token = json_next(scanner)) {
        if (token != JSON_KEY) return fail_index(index, "a key");
        struct listed entry = {scanner->token, NULL};
        if (json_next(scanner) != JSON_STRING) return fail_index(index, "a file name");
        entry.shard = scanner->token;
        if (!is_plain_name(entry.shard))
            return context_fail(index->context, MOE4_EFORMAT,
                                "%s: tensor \"%s\": shard \"%s\" is not the plain name of a file in this folder",
                                index_name, show_name(entry.tensor).text, show_name(entry.shard).text);
        struct listed *items =
            array_grow(&index->context->allocator, index->items, &index->capacity, index->count, sizeof *items);
        if (!items) return context_fail_memory(index->context, index_name, (index->count + 1) * sizeof *items);
        index->items = items;
        items[index->count++] = entry;
    }
    return MOE4_OK;
}

/* {"metadata": {...}, "weight_map": {"tensor": "shard", ...}}; everything but weight_map is passed over: total_size is
 * often wrong. */
static moe4_status read_index(struct index *index)
{
    struct json_scanner *scanner = &index->scanner;
    int n_maps = 0;
    if (json_next(scanner) != JSON_OBJECT) return fail_index(index, "an object");
    for (json_token token = json_next(scanner); token != JSON_OBJECT_END; token = json_next(scanner)) {
        if (token != JSON_KEY) return fail_index(index, "a key");
        if (strcmp(scanner->token, "weight_map") == 0) {
            if (n_maps++) return fail_index(index, "weight_map once");
            moe4_status status = read_weight_map(index);
            if (status != MOE4_OK) return status;
        } else if (!json_skip(scanner, json_next(scanner))) {
            return fail_index(index, "a value");
        }
    }
    if (!n_maps) return fail_index(index, "weight_map before the end");
    return json_next(scanner) == JSON_END ? MOE4_OK : fail_index(index, "the end");
}

/* Every shard once. */
static moe4_status collect_shards(struct index *index, struct shards *shards)
{
    struct names seen = {0};
    moe4_status status = MOE4_OK;
    for (size_t i = 0; i < index->count && status == MOE4_OK; i++) {
        const struct listed *entry = &index->items[i];
        int64_t entered = names_add(&seen, &index->context->allocator, entry->shard, (int64_t)i);
        if (entered == NAMES_NO_MEMORY)
            status =
                context_fail(index->context, MOE4_ENOMEM, "out of memory for a table of %zu shards", shards->count + 1);
        else if (entered == (int64_t)i)
            status = shards_add(index->context, shards, (struct shard){entry->shard, entry->tensor});
    }
    names_release(&seen, &index->context->allocator);
    return status;
}

/* Each listed tensor must be where the index says.  Tensors of a listed shard that are not listed are kept. */
static moe4_status check_listed(const struct index *index, const moe4_tensors *tensors, char *seen)
{
    for (size_t i = 0; i < index->count; i++) {
        const struct listed *entry = &index->items[i];
        const moe4_tensor *tensor = moe4_tensors_find(tensors, entry->tensor);
        const char *place = tensor ? file_name(tensor->file) : "no shard";
        if (!tensor || strcmp(place, entry->shard) != 0)
            return context_fail(index->context, MOE4_EFORMAT, "%s: tensor \"%s\" is listed in %s, but is in %s",
                                index_name, show_name(entry->tensor).text, show_name(entry->shard).text,
                                show_name(place).text);
        if (seen[tensor - tensors->items]++)
            return context_fail(index->context, MOE4_EFORMAT, "%s: tensor \"%s\" is listed twice", index_name,
                                show_name(entry->tensor).text);
    }
    return MOE4_OK;
}

static moe4_status add_listed(struct index *index, moe4_tensors *tensors)
{
    struct shards shards = {0};
    moe4_status status = read_index(index);
    if (status == MOE4_OK) status = collect_shards(index, &shards);
    if (status == MOE4_OK) status = shards_open(index->context, tensors, &shards);
    array_release(&index->context->allocator, shards.items, shards.capacity, sizeof *shards.items);
    if (status != MOE4_OK) return status;
    char *seen = memory_allocate_zeroed(&index->context->allocator, tensors->count);
    if (!seen) return context_fail_memory(index->context, index_name, tensors->count);
    status = check_listed(index, tensors, seen);
    memory_release(&index->context->allocator, seen, tensors->count);
    return status;
}

static moe4_status add_indexed(moe4_context *context, moe4_tensors *tensors, const char *path)
{
    struct file_text text;
    moe4_status status = file_read_all(context, path, LARGEST_INDEX, &text);
    if (status != MOE4_OK) return status;
    struct index index = {.context = context, .scanner = json_scan(text.text, text.n_bytes)};
    status = add_listed(&index, tensors);
    array_release(&context->allocator, index.items, index.capacity, sizeof *index.items);
    memory_release(&context->allocator, text.text, text.n_bytes);
    return status;
}

moe4_status folder_add_files(moe4_context *context, moe4_tensors *tensors)
{
    const char *path = tensors_join(context, tensors, tensors->path, index_name);
    if (!path) return MOE4_ENOMEM;
    if (file_look(path) != FILE_MISSING) return add_indexed(context, tensors, path);
    path = tensors_join(context, tensors, tensors->path, single_name);
    if (!path) return MOE4_ENOMEM;
    if (file_look(path) != FILE_MISSING) return tensors_add_file(context, tensors, path);
    return add_all(context, tensors);
}
