/* Reads a header, as strictly as the format's own parser, and more so where that is lax: a name twice is refused. */
#include "io/safetensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "io/dtype.h"
#include "io/json.h"
#include "io/show.h"

struct header {
    moe4_context *context;
    moe4_tensors *tensors;
    const struct file *file;
    struct json_scanner scanner;
    int64_t data_start; /* in the file */
};

/* ---- Messages ---------------------------------------------------------------------------------------------------- */

/* The JSON breaks here: by the scanner's own words, or because it holds something else than `expected`. */
static moe4_status fail_json(struct header *header, const char *expected)
{
    const struct json_scanner *scanner = &header->scanner;
    return context_fail(header->context, MOE4_EFORMAT, "%s: header byte %td: %s%s", show_file(header->file->path).text,
                        scanner->at - scanner->text, scanner->error ? "" : "expected ",
                        scanner->error ? scanner->error : expected);
}

static moe4_status fail_memory(struct header *header, size_t bytes)
{
    return context_fail_memory(header->context, file_name(header->file->path), bytes);
}

/* ---- One entry: "name": {"dtype": "U8", "shape": [4, 96], "data_offsets": [0, 384]} ------------------------------ */

static moe4_status read_integers(struct header *header, int32_t limit, int64_t *values, int32_t *count)
{
    struct json_scanner *scanner = &header->scanner;
    if (json_next(scanner) != JSON_ARRAY) return fail_json(header, "an array");
    for (*count = 0;; ++*count) {
        json_token token = json_next(scanner);
        if (token == JSON_ARRAY_END) return MOE4_OK;
        int64_t value;
        if (token != JSON_NUMBER || !json_integer(scanner->token, scanner->token_bytes, &value))
            return fail_json(header, "a whole number from 0 to 2^63 - 1");
        if (*count < limit) values[*count] = value;
    }
}

static moe4_status read_dtype(struct header *header, moe4_tensor *tensor)
{
    struct json_scanner *scanner = &header->scanner;
    if (json_next(scanner) != JSON_STRING) return fail_json(header, "a type name");
    tensor->dtype = dtype_find(scanner->token);
    if (tensor->dtype) return MOE4_OK;
    return context_fail(header->context, MOE4_EFORMAT, "%s: tensor \"%s\": unknown dtype \"%s\"",
                        show_file(header->file->path).text, show_name(tensor->name).text,
                        show_name(scanner->token).text);
}

static moe4_status read_shape(struct header *header, moe4_tensor *tensor)
{
    moe4_status status = read_integers(header, MOE4_TENSOR_MAX_RANK, tensor->shape, &tensor->rank);
    if (status != MOE4_OK || tensor->rank <= MOE4_TENSOR_MAX_RANK) return status;
    return context_fail(
        header->context, MOE4_EUNSUPPORTED, "%s: tensor \"%s\": %" PRId32 " dimensions, at most %d are read",
        show_file(header->file->path).text, show_name(tensor->name).text, tensor->rank, MOE4_TENSOR_MAX_RANK);
}

static moe4_status read_offsets(struct header *header, moe4_tensor *tensor)
{
    int64_t range[2] = {0, 0};
    int32_t count;
    moe4_status status = read_integers(header, 2, range, &count);
    if (status != MOE4_OK) return status;
    if (count != 2) return fail_json(header, "two offsets");
    tensor->offset = range[0];
    tensor->n_bytes = range[1] - range[0];
    if (tensor->n_bytes >= 0) return MOE4_OK;
    return context_fail(header->context, MOE4_EFORMAT,
                        "%s: tensor \"%s\": data begins at %" PRId64 " and ends at %" PRId64,
                        show_file(header->file->path).text, show_name(tensor->name).text, range[0], range[1]);
}

static const struct field {
    const char *key;
    moe4_status (*read)(struct header *header, moe4_tensor *tensor);
} fields[] = {{"dtype", read_dtype}, {"shape", read_shape}, {"data_offsets", read_offsets}};
enum { N_FIELDS = sizeof fields / sizeof *fields, ALL_FIELDS = (1 << N_FIELDS) - 1 };

/* The fields of an entry, in any order; unknown ones are passed over, as the format's own parser does. */
static moe4_status read_fields(struct header *header, moe4_tensor *tensor)
{
    struct json_scanner *scanner = &header->scanner;
    int seen = 0;
    if (json_next(scanner) != JSON_OBJECT) return fail_json(header, "a tensor's description");
    for (json_token token = json_next(scanner); token != JSON_OBJECT_END; token = json_next(scanner)) {
        if (token != JSON_KEY) return fail_json(header, "a key");
        int i = 0;
        while (i < N_FIELDS && strcmp(fields[i].key, scanner->token) != 0) i++;
        if (i == N_FIELDS) {
            if (!json_skip(scanner, json_next(scanner))) return fail_json(header, "a value");
            continue;
        }
        if (seen >> i & 1) return fail_json(header, "each field once");
        seen |= 1 << i;
        moe4_status status = fields[i].read(header, tensor);
        if (status != MOE4_OK) return status;
    }
    return seen == ALL_FIELDS ? MOE4_OK : fail_json(header, "dtype, shape and data_offsets before the end of an entry");
}

/* The shape must account for exactly the bytes of the range. */
static moe4_status check_size(const struct header *header, const moe4_tensor *tensor)
{
    int64_t n_bytes;
    moe4_status status = tensor_size(header->context, MOE4_EFORMAT, header->file->path, tensor, &n_bytes);
    if (status != MOE4_OK || n_bytes == tensor->n_bytes) return status;
    return context_fail(header->context, MOE4_EFORMAT,
                        "%s: tensor \"%s\": %s is %" PRId64 " bytes, but its data has %" PRId64,
                        show_file(header->file->path).text, show_name(tensor->name).text,
                        show_type(tensor->dtype, tensor->rank, tensor->shape).text, n_bytes, tensor->n_bytes);
}

static moe4_status read_tensor(struct header *header)
{
    moe4_tensors *tensors = header->tensors;
    struct json_scanner *scanner = &header->scanner;
    moe4_tensor tensor = {.file = header->file->path};
    tensor.name = arena_copy(&tensors->strings, &tensors->allocator, scanner->token, scanner->token_bytes);
    if (!tensor.name) return fail_memory(header, scanner->token_bytes);
    moe4_status status = read_fields(header, &tensor);
    if (status == MOE4_OK) status = check_size(header, &tensor);
    if (status != MOE4_OK) return status;
    return tensors_add(header->context, tensors, &tensor);
}

/* ---- "__metadata__": {"format": "pt"} ---------------------------------------------------------------------------- */

static moe4_status read_metadata(struct header *header)
{
    moe4_tensors *tensors = header->tensors;
    struct json_scanner *scanner = &header->scanner;
    json_token token = json_next(scanner);
    if (token == JSON_NULL) return MOE4_OK;
    if (token != JSON_OBJECT) return fail_json(header, "an object of strings");
    for (token = json_next(scanner); token != JSON_OBJECT_END; token = json_next(scanner)) {
        if (token != JSON_KEY) return fail_json(header, "a key");
        const char *key = arena_copy(&tensors->strings, &tensors->allocator, scanner->token, scanner->token_bytes);
        if (!key) return fail_memory(header, scanner->token_bytes);
        if (json_next(scanner) != JSON_STRING) return fail_json(header, "a string");
        const char *value = arena_copy(&tensors->strings, &tensors->allocator, scanner->token, scanner->token_bytes);
        if (!value) return fail_memory(header, scanner->token_bytes);
        moe4_status status = tensors_add_metadata(header->context, tensors, key, value, JSON_STRING);
        if (status != MOE4_OK) return status;
    }
    return MOE4_OK;
}

/* ---- The header as a whole --------------------------------------------------------------------------------------- */

static moe4_status read_entries(struct header *header)
{
    struct json_scanner *scanner = &header->scanner;
    int has_metadata = 0;
    if (json_next(scanner) != JSON_OBJECT) return fail_json(header, "an object");
    for (json_token token = json_next(scanner); token != JSON_OBJECT_END; token = json_next(scanner)) {
        if (token != JSON_KEY) return fail_json(header, "a key");
        int is_metadata = strcmp(scanner->token, METADATA_KEY) == 0;
        if (is_metadata && has_metadata) return fail_json(header, METADATA_KEY " once");
        has_metadata |= is_metadata;
        moe4_status status = is_metadata ? read_metadata(header) : read_tensor(header);
        if (status != MOE4_OK) return status;
    }
    return json_next(scanner) == JSON_END ? MOE4_OK : fail_json(header, "the end");
}

static int compare_places(const void *left, const void *right)
{
    const moe4_tensor *a = left, *b = right;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    if (a->n_bytes != b->n_bytes) return a->n_bytes < b->n_bytes ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* Nearly every file lists its tensors in order of their data. */
static void sort_by_place(moe4_tensor *items, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        if (compare_places(&items[i - 1], &items[i]) <= 0) continue;
        qsort(items, count, sizeof *items, compare_places);
        return;
    }
}

/* The data must be covered exactly: no hole, no overlap, nothing after the last tensor.  Offsets become those in the
 * file. */
static moe4_status place_tensors(const struct header *header, size_t first)
{
    moe4_tensors *tensors = header->tensors;
    int64_t end = 0, data_bytes = header->file->n_bytes - header->data_start;
    if (tensors->count > first) sort_by_place(tensors->items + first, tensors->count - first);
    for (size_t i = first; i < tensors->count; i++) {
        moe4_tensor *tensor = &tensors->items[i];
        if (tensor->offset != end)
            return context_fail(header->context, MOE4_EFORMAT,
                                "%s: tensor \"%s\": data begins at %" PRId64
                                ", but the data before it ends at %" PRId64,
                                show_file(header->file->path).text, show_name(tensor->name).text, tensor->offset, end);
        if (tensor->n_bytes > data_bytes - end)
            return context_fail(
                header->context, MOE4_EFORMAT,
                "%s: tensor \"%s\": data ends at %" PRId64 ", but the file has %" PRId64 " bytes of data",
                show_file(header->file->path).text, show_name(tensor->name).text, end + tensor->n_bytes, data_bytes);
        end += tensor->n_bytes;
        tensor->offset += header->data_start;
    }
    if (end == data_bytes) return MOE4_OK;
    return context_fail(header->context, MOE4_EFORMAT,
                        "%s: the tensors take %" PRId64 " bytes, but the file has %" PRId64,
                        show_file(header->file->path).text, end, data_bytes);
}

/* Reads N and checks it against the format's limit and the file, before anything of that size is allocated. */
static moe4_status read_length(moe4_context *context, const struct file *file, int64_t *length)
{
    unsigned char bytes[LENGTH_BYTES];
    uint64_t n = 0;
    if (file->n_bytes < LENGTH_BYTES)
        return context_fail(context, MOE4_EFORMAT, "%s: %" PRId64 " bytes, a safetensors file has at least %d",
                            show_file(file->path).text, file->n_bytes, LENGTH_BYTES);
    moe4_status status = file_read(context, file, 0, LENGTH_BYTES, bytes);
    if (status != MOE4_OK) return status;
    for (int i = LENGTH_BYTES; i-- > 0;) n = n << 8 | bytes[i];
    if (n > LARGEST_HEADER)
        return context_fail(context, MOE4_EFORMAT, "%s: header of %" PRIu64 " bytes, at most %d are allowed",
                            show_file(file->path).text, n, LARGEST_HEADER);
    if ((int64_t)n > file->n_bytes - LENGTH_BYTES)
        return context_fail(context, MOE4_EFORMAT, "%s: header of %" PRIu64 " bytes, but the file has %" PRId64 " left",
                            show_file(file->path).text, n, file->n_bytes - LENGTH_BYTES);
    *length = (int64_t)n;
    return MOE4_OK;
}

moe4_status safetensors_read_header(moe4_context *context, moe4_tensors *tensors)
{
    int64_t length = 0;
    size_t first = tensors->count;
    struct header header = {.context = context, .tensors = tensors, .file = &tensors->files[tensors->n_files - 1]};
    moe4_status status = read_length(context, header.file, &length);
    if (status != MOE4_OK) return status;
    char *text = memory_allocate(&tensors->allocator, (size_t)length);
    if (!text) return fail_memory(&header, (size_t)length);
    header.scanner = json_scan(text, (size_t)length);
    header.data_start = LENGTH_BYTES + length;
    status = file_read(context, header.file, LENGTH_BYTES, length, text);
    if (status == MOE4_OK && (!length || *text != '{')) status = fail_json(&header, "'{'");
    if (status == MOE4_OK) status = read_entries(&header);
    memory_release(&tensors->allocator, text, (size_t)length);
    if (status == MOE4_OK) status = place_tensors(&header, first);
    if (status == MOE4_OK) status = tensors_enter_names(context, tensors, first);
    return status;
}
