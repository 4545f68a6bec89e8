/* Writes a safetensors file: the whole header first, then tensors in any order, under a temporary name until it is
 * complete. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "io/check.h"
#include "io/dtype.h"
#include "io/json.h"
#include "io/names.h"
#include "io/safetensors.h"
#include "io/show.h"
#include "io/storage.h"
#include "io/writer.h"
#include "moe4/io.h"

enum { DATA_ALIGNMENT = 64, LARGEST_WRITE = 1 << 30, MAX_ATTEMPTS = 1000 };
#define LARGEST_DATA (INT64_MAX - LENGTH_BYTES - LARGEST_HEADER) /* so that offsets in the file cannot wrap */

/* ---- The header's text ------------------------------------------------------------------------------------------- */

void text_add_byte(struct text *text, char byte)
{
    char *bytes = text->failed ? NULL : array_grow(text->allocator, text->bytes, &text->capacity, text->n_bytes, 1);
    text->failed = !bytes;
    if (!bytes) return;
    text->bytes = bytes;
    bytes[text->n_bytes++] = byte;
}

void text_add_string(struct text *text, const char *string)
{
    while (*string) text_add_byte(text, *string++);
}

static void add_integer(struct text *text, int64_t value)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRId64, value);
    text_add_string(text, digits);
}

/* A JSON string; `string` is valid UTF-8. */
static void add_quoted(struct text *text, const char *string)
{
    text_add_byte(text, '"');
    for (; *string; string++) {
        unsigned char c = (unsigned char)*string;
        char escape[8];
        if (c == '"' || c == '\\') text_add_byte(text, '\\');
        if (c >= 0x20) {
            text_add_byte(text, *string);
            continue;
        }
        snprintf(escape, sizeof escape, "\\u%04x", c);
        text_add_string(text, escape);
    }
    text_add_byte(text, '"');
}

static void add_metadata(struct text *text, const char *const *metadata)
{
    text_add_string(text, "\"" METADATA_KEY "\":{");
    for (const char *const *pair = metadata; *pair; pair += 2) {
        if (pair != metadata) text_add_byte(text, ',');
        add_quoted(text, pair[0]);
        text_add_byte(text, ':');
        add_quoted(text, pair[1]);
    }
    text_add_byte(text, '}');
}

static void add_tensor(struct text *text, const moe4_tensor *tensor)
{
    add_quoted(text, tensor->name);
    text_add_string(text, ":{\"dtype\":");
    add_quoted(text, tensor->dtype);
    text_add_string(text, ",\"shape\":[");
    for (int32_t i = 0; i < tensor->rank; i++) {
        if (i) text_add_byte(text, ',');
        add_integer(text, tensor->shape[i]);
    }
    text_add_string(text, "],\"data_offsets\":[");
    add_integer(text, tensor->offset);
    text_add_byte(text, ',');
    add_integer(text, tensor->offset + tensor->n_bytes);
    text_add_string(text, "]}");
}

/* The length and the JSON, padded with spaces so that the data begins at a multiple of 64: a cache line, so that it can
 * be mapped. */
static void add_header(struct text *text, const moe4_writer *writer, const void *pairs)
{
    const char *const *metadata = pairs;
    for (int i = 0; i < LENGTH_BYTES; i++) text_add_byte(text, 0);
    text_add_byte(text, '{');
    int has_metadata = metadata && metadata[0];
    if (has_metadata) add_metadata(text, metadata);
    for (int32_t i = 0; i < writer->n_targets; i++) {
        if (i || has_metadata) text_add_byte(text, ',');
        add_tensor(text, &writer->targets[i].tensor);
    }
    text_add_byte(text, '}');
    while (!text->failed && text->n_bytes % DATA_ALIGNMENT) text_add_byte(text, ' ');
    if (text->failed) return;
    uint64_t length = text->n_bytes - LENGTH_BYTES;
    for (int i = 0; i < LENGTH_BYTES; i++) text->bytes[i] = (char)(length >> 8 * i);
}

/* ---- Checks at the door ------------------------------------------------------------------------------------------ */

moe4_status writer_check_text(moe4_context *context, const char *path, const char *what, const char *string)
{
    if (!string) return context_fail(context, MOE4_EINVAL, "%s: %s is NULL", show_file(path).text, what);
    for (const char *at = string, *end = string + strlen(string); at < end;) {
        size_t length = utf8_sequence(at, end);
        if (!length)
            return context_fail(context, MOE4_EINVAL, "%s: %s \"%s\" is not UTF-8", show_file(path).text, what,
                                show_name(string).text);
        at += length;
    }
    return MOE4_OK;
}

static moe4_status check_metadata(moe4_context *context, const char *path, const char *const *metadata)
{
    struct names keys = {0};
    moe4_status status = MOE4_OK;
    for (int64_t i = 0; metadata && metadata[i] && status == MOE4_OK; i += 2) {
        status = writer_check_text(context, path, "metadata key", metadata[i]);
        if (status == MOE4_OK) status = writer_check_text(context, path, "metadata value", metadata[i + 1]);
        if (status != MOE4_OK) break;
        int64_t entered = names_add(&keys, &context->allocator, metadata[i], i);
        if (entered == NAMES_NO_MEMORY)
            status = context_fail(context, MOE4_ENOMEM, "out of memory for a table of metadata keys");
        else if (entered != i)
            status = context_fail(context, MOE4_EINVAL, "%s: metadata key \"%s\" is given twice", show_file(path).text,
                                  show_name(metadata[i]).text);
    }
    names_release(&keys, &context->allocator);
    return status;
}

static moe4_status check_tensor(moe4_context *context, const char *path, const moe4_tensor *tensor)
{
    moe4_status status = writer_check_text(context, path, "tensor name", tensor->name);
    if (status != MOE4_OK) return status;
    if (strcmp(tensor->name, METADATA_KEY) == 0)
        return context_fail(context, MOE4_EINVAL, "%s: a tensor cannot be named " METADATA_KEY, show_file(path).text);
    if (tensor->rank < 0 || tensor->rank > MOE4_TENSOR_MAX_RANK)
        return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\": rank %" PRId32 ", expected 0 to %d",
                            show_file(path).text, show_name(tensor->name).text, tensor->rank, MOE4_TENSOR_MAX_RANK);
    return MOE4_OK;
}

/* The types of safetensors. */
static moe4_status measure(moe4_context *context, const char *path, moe4_tensor *tensor)
{
    const char *dtype = tensor->dtype ? dtype_find(tensor->dtype) : NULL;
    if (!dtype)
        return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\": unknown dtype \"%s\"", show_file(path).text,
                            show_name(tensor->name).text, tensor->dtype ? show_name(tensor->dtype).text : "NULL");
    tensor->dtype = dtype;
    return tensor_size(context, MOE4_EINVAL, path, tensor, &tensor->n_bytes);
}

static moe4_status allocate_writer(moe4_context *context, const char *path, int32_t n_targets, moe4_writer **result)
{
    size_t bytes;
    moe4_writer *writer = memory_allocate_zeroed(&context->allocator, sizeof *writer);
    *result = writer;
    if (!writer) return context_fail_memory(context, "a writer", sizeof *writer);
    writer->allocator = context->allocator;
    writer->fd = -1;
    writer->path = arena_copy(&writer->strings, &writer->allocator, path, strlen(path));
    if (!writer->path) return context_fail_memory(context, "a path", strlen(path) + 1);
    if (!size_multiply((size_t)n_targets, sizeof *writer->targets, &bytes)) bytes = SIZE_MAX;
    writer->targets = memory_allocate_zeroed(&writer->allocator, bytes);
    if (!writer->targets) return context_fail_memory(context, "a list of tensors", bytes);
    writer->n_targets = n_targets;
    return MOE4_OK;
}

/* Checks one tensor and enters it behind the others; *end is where the data so far ends. */
static moe4_status plan_target(moe4_context *context, moe4_writer *writer, const struct writer_format *format,
                               const moe4_tensor *given, int32_t index, struct names *names, int64_t *end)
{
    moe4_tensor *tensor = &writer->targets[index].tensor;
    moe4_status status = check_tensor(context, writer->path, given);
    if (status != MOE4_OK) return status;
    *tensor = *given;
    tensor->offset = *end = round_up(*end, format->alignment);
    status = format->measure(context, writer->path, tensor);
    if (status != MOE4_OK) return status;
    tensor->name = arena_copy(&writer->strings, &writer->allocator, given->name, strlen(given->name));
    int64_t entered = tensor->name ? names_add(names, &writer->allocator, tensor->name, index) : NAMES_NO_MEMORY;
    if (entered == NAMES_NO_MEMORY) return context_fail(context, MOE4_ENOMEM, "out of memory for tensor names");
    if (entered != index)
        return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\" is given twice", show_file(writer->path).text,
                            show_name(tensor->name).text);
    if (__builtin_add_overflow(*end, tensor->n_bytes, end) || *end > LARGEST_DATA)
        return context_fail(context, MOE4_EINVAL, "%s: tensors of more bytes than 63 bits count",
                            show_file(writer->path).text);
    return MOE4_OK;
}

static moe4_status plan_targets(moe4_context *context, moe4_writer *writer, const struct writer_format *format,
                                const moe4_tensor *tensors)
{
    int64_t end = 0;
    struct names names = {0};
    moe4_status status = MOE4_OK;
    for (int32_t i = 0; i < writer->n_targets && status == MOE4_OK; i++)
        status = plan_target(context, writer, format, &tensors[i], i, &names, &end);
    writer->data_bytes = round_up(end, format->alignment);
    names_release(&names, &writer->allocator);
    return status;
}

/* ---- The file ---------------------------------------------------------------------------------------------------- */

static moe4_status fail_system(moe4_context *context, const moe4_writer *writer, const char *action)
{
    return context_fail(context, MOE4_EIO, "%.200s: cannot %s: %s", writer->path, action, strerror(errno));
}

/* The new file takes the place of an old one, but not of a folder or a device. */
static moe4_status check_place(moe4_context *context, const moe4_writer *writer)
{
    struct stat info;
    if (stat(writer->path, &info) != 0 || S_ISREG(info.st_mode)) return MOE4_OK;
    return context_fail(context, MOE4_EIO, "%.200s: is there, and not a regular file", writer->path);
}

/* A new file beside path, with the permissions that any new file gets. */
static moe4_status create_temporary(moe4_context *context, moe4_writer *writer)
{
    size_t bytes = strlen(writer->path) + 40;
    writer->temporary = arena_allocate(&writer->strings, &writer->allocator, bytes);
    if (!writer->temporary) return context_fail_memory(context, "a path", bytes);
    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        snprintf(writer->temporary, bytes, "%s.%ld-%d.tmp", writer->path, (long)getpid(), attempt);
        writer->fd = open(writer->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (writer->fd >= 0) return MOE4_OK;
        if (errno != EEXIST) break;
    }
    return fail_system(context, writer, "create a temporary file beside it");
}

static moe4_status write_bytes(moe4_context *context, const moe4_writer *writer, int64_t offset, int64_t n_bytes,
                               const char *bytes)
{
    while (n_bytes > 0) {
        ssize_t n = pwrite(writer->fd, bytes, (size_t)(n_bytes < LARGEST_WRITE ? n_bytes : LARGEST_WRITE), offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC; /* no progress and no reason: nothing that trying again would change */
        if (n <= 0) return fail_system(context, writer, "write");
        bytes += n;
        offset += n;
        n_bytes -= n;
    }
    return MOE4_OK;
}

static moe4_status write_header(moe4_context *context, moe4_writer *writer, const struct writer_format *format,
                                const void *metadata)
{
    struct text text = {.allocator = &writer->allocator};
    moe4_status status;
    format->add_header(&text, writer, metadata);
    if (text.failed)
        status = context_fail_memory(context, "a header", text.n_bytes + 1);
    else if (text.n_bytes > LENGTH_BYTES + LARGEST_HEADER)
        status = context_fail(context, MOE4_EINVAL, "%s: header of %zu bytes, at most %d are allowed",
                              show_file(writer->path).text, text.n_bytes - LENGTH_BYTES, LARGEST_HEADER);
    else
        status = write_bytes(context, writer, 0, (int64_t)text.n_bytes, text.bytes);
    for (int32_t i = 0; i < writer->n_targets && status == MOE4_OK; i++)
        writer->targets[i].tensor.offset += (int64_t)text.n_bytes;
    /* What lies between tensors and behind the last is zero. */
    if (status == MOE4_OK && format->alignment > 1 &&
        ftruncate(writer->fd, (off_t)((int64_t)text.n_bytes + writer->data_bytes)) != 0)
        status = fail_system(context, writer, "extend");
    array_release(&writer->allocator, text.bytes, text.capacity, 1);
    return status;
}

/* Makes the new name last through a power failure.  By now the file is there and whole, so failing would only mislead:
 * not every file system can do this. */
static void sync_folder(const moe4_writer *writer)
{
    char *folder = writer->temporary; /* no longer needed */
    char *slash = strrchr(folder, '/');
    if (slash) slash[1] = '\0';
    int fd = open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;
    (void)fsync(fd);
    close(fd);
}

/* ---- The public functions ---------------------------------------------------------------------------------------- */

moe4_status writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors, int32_t n_tensors,
                          const struct writer_format *format, const void *metadata, moe4_writer **result)
{
    moe4_writer *writer = NULL;
    moe4_status status = MOE4_OK;
    if (n_tensors) status = check_argument(context, "tensors", tensors);
    if (status == MOE4_OK && n_tensors < 0)
        status = context_fail(context, MOE4_EINVAL, "n_tensors is %" PRId32 ", expected 0 or more", n_tensors);
    if (status == MOE4_OK) status = allocate_writer(context, path, n_tensors, &writer);
    if (status == MOE4_OK) status = plan_targets(context, writer, format, tensors);
    if (status == MOE4_OK) status = check_place(context, writer);
    if (status == MOE4_OK) status = create_temporary(context, writer);
    if (status == MOE4_OK) status = write_header(context, writer, format, metadata);
    if (status == MOE4_OK)
        *result = writer;
    else
        moe4_writer_discard(writer);
    return status;
}

moe4_status moe4_writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors, int32_t n_tensors,
                               const char *const *metadata, moe4_writer **result)
{
    static const struct writer_format safetensors = {measure, 1, add_header};
    moe4_status status = check_argument(context, "writer", result);
    if (status != MOE4_OK) return status;
    *result = NULL;
    status = check_argument(context, "path", path);
    if (status == MOE4_OK) status = check_metadata(context, path, metadata);
    if (status != MOE4_OK) return status;
    return writer_create(context, path, tensors, n_tensors, &safetensors, metadata, result);
}

moe4_status moe4_writer_write(moe4_context *context, moe4_writer *writer, int32_t index, int64_t first, int64_t n_bytes,
                              const void *data)
{
    moe4_status status = check_argument(context, "writer", writer);
    if (status == MOE4_OK && n_bytes) status = check_argument(context, "data", data);
    if (status != MOE4_OK) return status;
    if (index < 0 || index >= writer->n_targets)
        return context_fail(context, MOE4_EINVAL, "%s: tensor %" PRId32 ", but there are %" PRId32,
                            show_file(writer->path).text, index, writer->n_targets);
    struct target *target = &writer->targets[index];
    const moe4_tensor *tensor = &target->tensor;
    if (first < 0 || n_bytes < 0 || n_bytes > tensor->n_bytes - first)
        return context_fail(
            context, MOE4_EINVAL, "%s: tensor \"%s\": %" PRId64 " bytes from %" PRId64 ", but it has %" PRId64,
            show_file(writer->path).text, show_name(tensor->name).text, n_bytes, first, tensor->n_bytes);
    if (n_bytes > tensor->n_bytes - target->n_written)
        return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\": bytes written twice",
                            show_file(writer->path).text, show_name(tensor->name).text);
    status = write_bytes(context, writer, tensor->offset + first, n_bytes, data);
    if (status == MOE4_OK) target->n_written += n_bytes;
    return status;
}

static moe4_status check_complete(moe4_context *context, const moe4_writer *writer)
{
    for (int32_t i = 0; i < writer->n_targets; i++) {
        const struct target *target = &writer->targets[i];
        if (target->n_written != target->tensor.n_bytes)
            return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\": %" PRId64 " bytes written of %" PRId64,
                                show_file(writer->path).text, show_name(target->tensor.name).text, target->n_written,
                                target->tensor.n_bytes);
    }
    return MOE4_OK;
}

/* Flushes, closes and renames; from the rename on there is no temporary file. */
static moe4_status publish(moe4_context *context, moe4_writer *writer)
{
    if (fsync(writer->fd) != 0) return fail_system(context, writer, "flush");
    if (rename(writer->temporary, writer->path) != 0) return fail_system(context, writer, "rename");
    close(writer->fd);
    writer->fd = -1;
    sync_folder(writer);
    return MOE4_OK;
}

moe4_status moe4_writer_commit(moe4_context *context, moe4_writer *writer)
{
    moe4_status status = check_argument(context, "writer", writer);
    if (status == MOE4_OK) status = check_complete(context, writer);
    if (status == MOE4_OK) status = publish(context, writer);
    moe4_writer_discard(writer);
    return status;
}

void moe4_writer_discard(moe4_writer *writer)
{
    if (!writer) return;
    moe4_allocator allocator = writer->allocator;
    if (writer->fd >= 0) {
        unlink(writer->temporary);
        close(writer->fd);
    }
    array_release(&allocator, writer->targets, (size_t)writer->n_targets, sizeof *writer->targets);
    arena_release(&writer->strings, &allocator);
    memory_release(&allocator, writer, sizeof *writer);
}
