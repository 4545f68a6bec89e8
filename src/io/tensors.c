#include "io/tensors.h"

#include <inttypes.h>
#include <string.h>

#include "io/check.h"
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

moe4_status tensors_add_file(moe4_context *context, moe4_tensors *tensors, const char *path)
{
    struct file *files =
        array_grow(&tensors->allocator, tensors->files, &tensors->files_capacity, tensors->n_files, sizeof *files);
    if (!files) return context_fail_memory(context, "a list of files", (tensors->n_files + 1) * sizeof *files);
    tensors->files = files;
    moe4_status status = file_open(context, path, &files[tensors->n_files]);
    if (status != MOE4_OK) return status;
    tensors->n_files++;
    return safetensors_read_header(context, tensors);
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

moe4_status moe4_tensors_open(moe4_context *context, const char *path, moe4_tensors **tensors)
{
    moe4_tensors *opened = NULL;
    moe4_status status = check_argument(context, "tensors", tensors);
    if (status != MOE4_OK) return status;
    *tensors = NULL;
    status = check_argument(context, "path", path);
    if (status == MOE4_OK) status = tensors_create(context, path, &opened);
    if (status != MOE4_OK) goto fail;
    if (file_look(path) == FILE_FOLDER)
        status = folder_add_files(context, opened);
    else
        status = tensors_add_file(context, opened, opened->path);
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
    return index == NAMES_NONE ? NULL : tensors->metadata[index].value;
}

/* The file whose path a descriptor carries: the pointer itself, so that another object's descriptor is refused. */
static const struct file *file_of(const moe4_tensors *tensors, const moe4_tensor *tensor)
{
    for (size_t i = 0; i < tensors->n_files; i++)
        if (tensors->files[i].path == tensor->file) return &tensors->files[i];
    return NULL;
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
