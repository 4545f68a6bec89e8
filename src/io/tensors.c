#include "io/tensors.h"

#include <inttypes.h>
#include <string.h>

#include "io/check.h"
#include "io/gguf.h"
#include "io/safetensors.h"
#include "io/show.h"

char *tensors_join(moe4_context *context, moe4_tensors *tensors, const char *folder, const char *name)
{
    size_t folder_bytes = strlen(folder), name_bytes = strlen(name) + 1;
    char *path = arena_allocate(&tensors->strings, &tensors->allocator, folder_bytes + 1 + name_bytes);
    if (!path) {
        context_fail_memory(context, "a path", folder_bytes + 1 + name_bytes);
        return NULL;
    }
    memcpy(path, folder, folder_bytes);
    path[folder_bytes] = '/';
    memcpy(path + folder_bytes + 1, name, name_bytes);
    return path;
}

moe4_status tensors_open_file(moe4_context *context, moe4_tensors *tensors, const char *path)
{
    struct file *files =
        array_grow(&tensors->allocator, tensors->files, &tensors->files_capacity, tensors->n_files, sizeof *files);
    if (!files) return context_fail_memory(context, "a list of files", (tensors->n_files + 1) * sizeof *files);
    tensors->files = files;
    moe4_status status = file_open(context, path, &files[tensors->n_files]);
    if (status == MOE4_OK) tensors->n_files++;
    return status;
}

moe4_status tensors_add_file(moe4_context *context, moe4_tensors *tensors, const char *path)
{
    moe4_status status = tensors_open_file(context, tensors, path);
    return status == MOE4_OK ? safetensors_read_header(context, tensors) : status;
}

moe4_status tensors_add(moe4_context *context, moe4_tensors *tensors, const moe4_tensor *tensor)
{
    moe4_tensor *items =
        array_grow(&tensors->allocator, tensors->items, &tensors->capacity, tensors->count, sizeof *items);
    if (!items) return context_fail_memory(context, file_name(tensor->file), (tensors->count + 1) * sizeof *items);
    tensors->items = items;
    items[tensors->count++] = *tensor;
    return MOE4_OK;
}

moe4_status tensors_enter_names(moe4_context *context, moe4_tensors *tensors, size_t first)
{
    for (size_t i = first; i < tensors->count; i++) {
        const moe4_tensor *tensor = &tensors->items[i];
        int64_t index = names_add(&tensors->by_name, &tensors->allocator, tensor->name, (int64_t)i);
        if (index == (int64_t)i) continue;
        if (index == NAMES_NO_MEMORY)
            return context_fail(context, MOE4_ENOMEM, "out of memory for a table of %zu tensor names", i + 1);
        if ((size_t)index >= first)
            return context_fail(context, MOE4_EFORMAT, "%s: tensor \"%s\" is there twice", show_file(tensor->file).text,
                                show_name(tensor->name).text);
        return context_fail(context, MOE4_EFORMAT, "tensor \"%s\" is in both %s and %s", show_name(tensor->name).text,
                            show_file(tensors->items[index].file).text, show_file(tensor->file).text);
    }
    return MOE4_OK;
}

moe4_status tensors_add_metadata(moe4_context *context, moe4_tensors *tensors, const char *key, const char *value,
                                 json_token token)
{
    size_t file = tensors->n_files - 1;
    const char *path = tensors->files[file].path;
    struct metadata_pair *pairs = array_grow(&tensors->allocator, tensors->metadata, &tensors->metadata_capacity,
                                             tensors->n_metadata, sizeof *pairs);
    if (!pairs) return context_fail_memory(context, file_name(path), (tensors->n_metadata + 1) * sizeof *pairs);
    tensors->metadata = pairs;
    pairs[tensors->n_metadata] = (struct metadata_pair){key, value, file, token};
    int64_t index = names_add(&tensors->by_key, &tensors->allocator, key, (int64_t)tensors->n_metadata);
    if (index == NAMES_NO_MEMORY)
        return context_fail(context, MOE4_ENOMEM, "out of memory for %zu strings of metadata", tensors->n_metadata + 1);
    if (index == (int64_t)tensors->n_metadata)
        tensors->n_metadata++;
    else if (pairs[index].file == file)
        return context_fail(context, MOE4_EFORMAT, "%s: its metadata has \"%s\" twice", show_file(path).text,
                            show_name(key).text);
    return MOE4_OK;
}

static moe4_status tensors_create(moe4_context *context, const char *path, moe4_tensors **created)
{
    moe4_tensors *tensors = memory_allocate_zeroed(&context->allocator, sizeof *tensors);
    if (!tensors) return context_fail_memory(context, "a list of tensors", sizeof *tensors);
    tensors->allocator = context->allocator;
    tensors->path = arena_copy(&tensors->strings, &tensors->allocator, path, strlen(path));
    *created = tensors;
    return tensors->path ? MOE4_OK : context_fail_memory(context, "a path", strlen(path) + 1);
}

static moe4_status add_files(moe4_context *context, moe4_tensors *tensors)
{
    int is_gguf = gguf_is_at(tensors->path);
    if (file_look(tensors->path) == FILE_FOLDER)
        return is_gguf ? gguf_add_folder(context, tensors) : folder_add_files(context, tensors);
    return is_gguf ? gguf_add_files(context, tensors, tensors->path)
                   : tensors_add_file(context, tensors, tensors->path);
}

moe4_status moe4_tensors_open(moe4_context *context, const char *path, moe4_tensors **tensors)
{
    moe4_tensors *opened = NULL;
    moe4_status status = check_argument(context, "tensors", tensors);
    if (status != MOE4_OK) return status;
    *tensors = NULL;
    status = check_argument(context, "path", path);
    if (status == MOE4_OK) status = tensors_create(context, path, &opened);
    if (status != MOE4_OK) goto fail;
    status = add_files(context, opened);
    if (status != MOE4_OK) goto fail;
    *tensors = opened;
    return MOE4_OK;
fail:
    moe4_tensors_close(opened);
    return status;
}

void moe4_tensors_close(moe4_tensors *tensors)
{
    if (!tensors) return;
    moe4_allocator allocator = tensors->allocator;
    for (size_t i = 0; i < tensors->n_files; i++) file_close(&tensors->files[i]);
    names_release(&tensors->by_name, &allocator);
    names_release(&tensors->by_key, &allocator);
    array_release(&allocator, tensors->files, tensors->files_capacity, sizeof *tensors->files);
    array_release(&allocator, tensors->items, tensors->capacity, sizeof *tensors->items);
    array_release(&allocator, tensors->metadata, tensors->metadata_capacity, sizeof *tensors->metadata);
    arena_release(&tensors->strings, &allocator);
    memory_release(&allocator, tensors, sizeof *tensors);
}

int64_t moe4_tensors_count(const moe4_tensors *tensors)
{
    return tensors ? (int64_t)tensors->count : 0;
}

const moe4_tensor *moe4_tensors_get(const moe4_tensors *tensors, int64_t index)
{
    return index >= 0 && index < moe4_tensors_count(tensors) ? &tensors->items[index] : NULL;
}

const moe4_tensor *moe4_tensors_find(const moe4_tensors *tensors, const char *name)
{
    return tensors && name ? moe4_tensors_get(tensors, names_find(&tensors->by_name, name)) : NULL;
}

const char *moe4_tensors_metadata(const moe4_tensors *tensors, const char *key)
{
    if (!tensors || !key) return NULL;
    int64_t index = names_find(&tensors->by_key, key);
    if (index == NAMES_NONE || tensors->metadata[index].token == JSON_ARRAY) return NULL;
    return tensors->metadata[index].value;
}

/* The file whose path a descriptor carries: the pointer itself, so that another object's descriptor is refused. */
static const struct file *file_of(const moe4_tensors *tensors, const moe4_tensor *tensor)
{
    for (size_t i = 0; i < tensors->n_files; i++)
        if (tensors->files[i].path == tensor->file) return &tensors->files[i];
    return NULL;
}

int tensors_copy(const moe4_tensors *tensors, const moe4_tensor *tensor, int64_t first, int64_t n_bytes, void *to)
{
    return file_copy(file_of(tensors, tensor), tensor->offset + first, n_bytes, to) == n_bytes;
}

moe4_status moe4_tensors_read(moe4_context *context, const moe4_tensors *tensors, const moe4_tensor *tensor,
                              int64_t first, int64_t n_bytes, void *buffer)
{
    moe4_status status = check_argument(context, "tensors", tensors);
    if (status == MOE4_OK) status = check_argument(context, "tensor", tensor);
    if (status == MOE4_OK && n_bytes) status = check_argument(context, "buffer", buffer);
    if (status != MOE4_OK) return status;
    const struct file *file = file_of(tensors, tensor);
    if (!file) return context_fail(context, MOE4_EINVAL, "the tensor is not one of this object");
    if (first < 0 || n_bytes < 0 || n_bytes > tensor->n_bytes - first)
        return context_fail(context, MOE4_EINVAL,
                            "%s: tensor \"%s\": %" PRId64 " bytes from %" PRId64 ", but it has %" PRId64,
                            show_file(file->path).text, show_name(tensor->name).text, n_bytes, first, tensor->n_bytes);
    return file_read(context, file, tensor->offset + first, n_bytes, buffer);
}
