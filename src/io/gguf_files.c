/* Where GGUF files lie: one, or NAME-00001-of-00003.gguf and its companions. */
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/gguf.h"
#include "io/show.h"

static const char extension[] = ".gguf";

int gguf_is_name(const char *name)
{
    size_t length = strlen(name), suffix = sizeof extension - 1;
    return name[0] != '.' && length > suffix && strcmp(name + length - suffix, extension) == 0;
}

/* ---- Files that belong together ---------------------------------------------------------------------------------- */

enum { SPLIT_DIGITS = 5, SPLIT_CHARACTERS = 2 * SPLIT_DIGITS + 5 }; /* -00001-of-00003 */

static int five_digits(const char *text, int32_t *value)
{
    if (strspn(text, "0123456789") < SPLIT_DIGITS) return 0;
    *value = 0;
    for (int i = 0; i < SPLIT_DIGITS; i++) *value = 10 * *value + (text[i] - '0');
    return 1;
}

/* The number of files that a name says it is one of, and how much of it they share; 0 if it does not say so. */
static int32_t split_count(const char *path, size_t *base_bytes)
{
    size_t length = strlen(path);
    int32_t number, count;
    if (!gguf_is_name(file_name(path)) || length < SPLIT_CHARACTERS + sizeof extension - 1) return 0;
    *base_bytes = length - (sizeof extension - 1) - SPLIT_CHARACTERS;
    const char *end = path + *base_bytes;
    if (end[0] != '-' || !five_digits(end + 1, &number) || strncmp(end + 1 + SPLIT_DIGITS, "-of-", 4) != 0 ||
        !five_digits(end + 5 + SPLIT_DIGITS, &count))
        return 0;
    return count;
}

static moe4_status add_file(moe4_context *context, moe4_tensors *tensors, const char *path, struct gguf_split *split)
{
    moe4_status status = tensors_open_file(context, tensors, path);
    return status == MOE4_OK ? gguf_read_header(context, tensors, split) : status;
}

static moe4_status add_one_of(moe4_context *context, moe4_tensors *tensors, const char *path, size_t base_bytes,
                              int32_t number, int32_t count, struct gguf_split *split)
{
    enum { END_BYTES = 48 }; /* of any two numbers */
    size_t bytes = base_bytes + END_BYTES;
    char *name = arena_allocate(&tensors->strings, &tensors->allocator, bytes);
    if (!name) return context_fail_memory(context, "a path", bytes);
    memcpy(name, path, base_bytes);
    snprintf(name + base_bytes, END_BYTES, "-%05" PRId32 "-of-%05" PRId32 "%s", number, count, extension);
    if (file_look(name) == FILE_MISSING)
        return context_fail(context, MOE4_EFORMAT, "%s is missing, of the %" PRId32 " files that %s is one of",
                            show_file(name).text, count, show_file(path).text);
    moe4_status status = add_file(context, tensors, name, split);
    if (status != MOE4_OK) return status;
    if (split->count != count || split->number != number - 1)
        return context_fail(context, MOE4_EFORMAT,
                            "%s: split.no is %" PRId64 " and split.count %" PRId64 ", expected %" PRId32 " and %" PRId32
                            " by its name",
                            show_file(name).text, split->number, split->count, number - 1, count);
    return MOE4_OK;
}

moe4_status gguf_add_files(moe4_context *context, moe4_tensors *tensors, const char *path)
{
    size_t base_bytes = 0;
    struct gguf_split split = {-1, -1, -1};
    int32_t count = split_count(path, &base_bytes);
    moe4_status status = MOE4_OK;
    if (count < 2) {
        status = add_file(context, tensors, path, &split);
        if (status == MOE4_OK && split.count > 1)
            status = context_fail(context, MOE4_EFORMAT, "%s: split.count is %" PRId64 ", expected a name like %s",
                                  show_file(path).text, split.count, "NAME-00001-of-00002.gguf");
        return status;
    }
    for (int32_t number = 1; number <= count && status == MOE4_OK; number++)
        status = add_one_of(context, tensors, path, base_bytes, number, count, &split);
    if (status == MOE4_OK && split.n_tensors >= 0 && (size_t)split.n_tensors != tensors->count)
        status = context_fail(context, MOE4_EFORMAT, "%s: split.tensors.count is %" PRId64 ", but the files have %zu",
                              show_file(path).text, split.n_tensors, tensors->count);
    return status;
}

/* ---- Folders ----------------------------------------------------------------------------------------------------- */

/* The number of GGUF files in a folder, 0 if it has *.safetensors too; `first` becomes the
 * first by name. */
static int list_folder(const char *path, char *first, size_t bytes)
{
    static const char other[] = ".safetensors";
    int count = 0;
    DIR *folder = opendir(path);
    if (!folder) return 0;
    *first = '\0';
    for (const struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        const char *name = entry->d_name;
        size_t length = strlen(name);
        if (length >= sizeof other && strcmp(name + length - (sizeof other - 1), other) == 0) {
            count = 0;
            break;
        }
        if (!gguf_is_name(name) || length >= bytes) continue;
        if (!count++ || strcmp(name, first) < 0) memcpy(first, name, length + 1);
    }
    closedir(folder);
    return count;
}

int gguf_is_at(const char *path)
{
    char name[256];
    if (file_look(path) == FILE_FOLDER) return list_folder(path, name, sizeof name) > 0;
    return gguf_is_name(file_name(path));
}

moe4_status gguf_add_folder(moe4_context *context, moe4_tensors *tensors)
{
    char name[256];
    size_t base_bytes;
    int n_files = list_folder(tensors->path, name, sizeof name);
    int32_t count = split_count(name, &base_bytes);
    if (n_files != (count > 1 ? count : 1))
        return context_fail(context, MOE4_EUNSUPPORTED,
                            "%s: holds %d *%s files that are not one model: open one of them by its path",
                            show_file(tensors->path).text, n_files, extension);
    const char *path = tensors_join(context, tensors, tensors->path, name);
    return path ? gguf_add_files(context, tensors, path) : MOE4_ENOMEM;
}
