/* Reads the header of a GGUF file: through a small buffer, once, each count checked against what the file still has. */
#include "io/gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "io/show.h"

enum {
    BUFFER_BYTES = 1 << 14,
    OLDEST_VERSION = 2,
    NEWEST_VERSION = 3,
    MAX_DIMENSIONS = 4,
    MAX_TENSOR_NAME = 63,
    DEFAULT_ALIGNMENT = 32,
    MAX_ALIGNMENT = 1 << 20,
    LARGEST_COUNT = 1 << 30, /* of the bytes of a string and the elements of an array */
    KEPT_STRING_BYTES = 1 << 16,
    KEPT_ELEMENTS = 1 << 16 /* one a layer is what arrays that matter have */
};
static const char magic[4] = {'G', 'G', 'U', 'F'};

struct reader {
    moe4_context *context;
    moe4_tensors *tensors;
    const struct file *file;
    int64_t offset; /* in the file, of the next byte to take */
    int64_t buffer_at;
    int64_t buffered;
    int64_t alignment;
    struct gguf_split split;
    uint8_t buffer[BUFFER_BYTES];
};

/* ---- Bytes ------------------------------------------------------------------------------------------------------- */

static int64_t bytes_left(const struct reader *reader)
{
    return reader->file->n_bytes - reader->offset;
}

__attribute__((format(printf, 2, 3))) static moe4_status fail(struct reader *reader, const char *format, ...)
{
    char reason[200];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    return context_fail(reader->context, MOE4_EFORMAT, "%s: header byte %" PRId64 ": %s",
                        show_file(reader->file->path).text, reader->offset, reason);
}

/* The next n_bytes of the file. */
static moe4_status take(struct reader *reader, void *to, int64_t n_bytes)
{
    uint8_t *out = to;
    if (n_bytes > bytes_left(reader))
        return fail(reader, "%" PRId64 " bytes are needed, but the file has %" PRId64 " left", n_bytes,
                    bytes_left(reader));
    while (n_bytes > 0) {
        int64_t ahead = reader->buffer_at + reader->buffered - reader->offset;
        if (ahead <= 0 || reader->offset < reader->buffer_at) {
            int64_t left = bytes_left(reader);
            reader->buffer_at = reader->offset;
            reader->buffered = left < BUFFER_BYTES ? left : BUFFER_BYTES;
            moe4_status status =
                file_read(reader->context, reader->file, reader->offset, reader->buffered, reader->buffer);
            if (status != MOE4_OK) return status;
            ahead = reader->buffered;
        }
        int64_t n = n_bytes < ahead ? n_bytes : ahead;
        memcpy(out, reader->buffer + (reader->offset - reader->buffer_at), (size_t)n);
        out += n;
        reader->offset += n;
        n_bytes -= n;
    }
    return MOE4_OK;
}

static moe4_status pass(struct reader *reader, int64_t n_bytes)
{
    if (n_bytes > bytes_left(reader))
        return fail(reader, "%" PRId64 " bytes are needed, but the file has %" PRId64 " left", n_bytes,
                    bytes_left(reader));
    reader->offset += n_bytes;
    return MOE4_OK;
}

/* A count, of which each takes at least least_bytes of the file. */
static moe4_status take_count(struct reader *reader, const char *what, int64_t least_bytes, int64_t *count)
{
    uint64_t value;
    moe4_status status = take(reader, &value, sizeof value);
    if (status != MOE4_OK) return status;
    if (value > (uint64_t)bytes_left(reader) / (uint64_t)least_bytes || value > LARGEST_COUNT)
        return fail(reader, "%" PRIu64 " %s, but the file has %" PRId64 " bytes left", value, what, bytes_left(reader));
    *count = (int64_t)value;
    return MOE4_OK;
}

/* A string into the arena.  NUL characters are refused: they would hide what follows. */
static moe4_status take_string(struct reader *reader, int64_t n_bytes, const char **string)
{
    char *copy = arena_allocate(&reader->tensors->strings, &reader->tensors->allocator, (size_t)n_bytes + 1);
    if (!copy) return context_fail_memory(reader->context, file_name(reader->file->path), (size_t)n_bytes + 1);
    moe4_status status = take(reader, copy, n_bytes);
    copy[n_bytes] = '\0';
    if (status == MOE4_OK && memchr(copy, '\0', (size_t)n_bytes)) status = fail(reader, "a NUL character in a string");
    *string = copy;
    return status;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

enum value_kind { VALUE_UNSIGNED, VALUE_SIGNED, VALUE_FLOAT, VALUE_BOOL, VALUE_STRING, VALUE_ARRAY };

enum { TYPE_U32 = 4, TYPE_STRING = 8, TYPE_ARRAY = 9 };

static const struct value_type {
    enum value_kind kind;
    int32_t n_bytes; /* at least, for strings and arrays */
} value_types[] = {
    {VALUE_UNSIGNED, 1}, {VALUE_SIGNED, 1}, {VALUE_UNSIGNED, 2}, {VALUE_SIGNED, 2}, {VALUE_UNSIGNED, 4},
    {VALUE_SIGNED, 4},   {VALUE_FLOAT, 4},  {VALUE_BOOL, 1},     {VALUE_STRING, 8}, {VALUE_ARRAY, 12},
    {VALUE_UNSIGNED, 8}, {VALUE_SIGNED, 8}, {VALUE_FLOAT, 8},
};
enum { N_VALUE_TYPES = sizeof value_types / sizeof *value_types };

/* One number, as JSON has it. */
struct number {
    char text[32];
    uint64_t bits; /* of an unsigned one */
    json_token token;
};

static struct number show_float(double value)
{
    struct number number = {.token = JSON_NUMBER};
    if (isnan(value)) {
        number.token = JSON_NULL;
        snprintf(number.text, sizeof number.text, "null");
    } else if (isinf(value)) {
        snprintf(number.text, sizeof number.text, "%s", value > 0 ? "1e999" : "-1e999");
    } else {
        snprintf(number.text, sizeof number.text, "%.9g", value);
        for (char *c = number.text; *c; c++)
            if (*c == ',') *c = '.'; /* whatever the host's locale */
    }
    return number;
}

static moe4_status take_number(struct reader *reader, const struct value_type *type, struct number *number)
{
    uint64_t bits = 0;
    float single;
    double wide;
    moe4_status status = take(reader, &bits, type->n_bytes);
    int shift = 64 - 8 * type->n_bytes;
    *number = (struct number){.bits = bits, .token = JSON_NUMBER};
    if (status != MOE4_OK) return status;
    switch (type->kind) {
    case VALUE_UNSIGNED: snprintf(number->text, sizeof number->text, "%" PRIu64, bits); break;
    case VALUE_SIGNED:
        snprintf(number->text, sizeof number->text, "%" PRId64, (int64_t)(bits << shift) >> shift);
        break;
    case VALUE_FLOAT:
        memcpy(&single, &bits, sizeof single);
        memcpy(&wide, &bits, sizeof wide);
        *number = show_float(type->n_bytes == sizeof single ? (double)single : wide);
        break;
    default:
        if (bits > 1) return fail(reader, "a truth value of %" PRIu64 ", expected 0 or 1", bits);
        number->token = bits ? JSON_TRUE : JSON_FALSE;
        snprintf(number->text, sizeof number->text, "%s", bits ? "true" : "false");
    }
    return MOE4_OK;
}

static moe4_status keep(struct reader *reader, const char *key, const char *text, size_t n_bytes, json_token token)
{
    moe4_tensors *tensors = reader->tensors;
    const char *value = arena_copy(&tensors->strings, &tensors->allocator, text, n_bytes);
    if (!value) return context_fail_memory(reader->context, file_name(reader->file->path), n_bytes + 1);
    return tensors_add_metadata(reader->context, tensors, key, value, token);
}

/* An array of numbers, kept as JSON text if it is short enough to be one a layer. */
static moe4_status take_numbers(struct reader *reader, const char *key, const struct value_type *type, int64_t count)
{
    const moe4_allocator *allocator = &reader->tensors->allocator;
    enum { MOST_CHARACTERS = 26 }; /* of a number and its comma */
    struct number number;
    size_t length = 0, bytes = (size_t)count * MOST_CHARACTERS + 3;
    char *text = memory_allocate(allocator, bytes);
    if (!text) return context_fail_memory(reader->context, file_name(reader->file->path), bytes);
    moe4_status status = MOE4_OK;
    text[length++] = '[';
    for (int64_t i = 0; i < count && status == MOE4_OK; i++) {
        status = take_number(reader, type, &number);
        length += (size_t)snprintf(text + length, bytes - length, "%s%s", i ? "," : "", number.text);
    }
    text[length++] = ']';
    if (status == MOE4_OK) status = keep(reader, key, text, length, JSON_ARRAY);
    memory_release(allocator, text, bytes);
    return status;
}

static moe4_status pass_strings(struct reader *reader, int64_t count)
{
    moe4_status status = MOE4_OK;
    for (int64_t i = 0; i < count && status == MOE4_OK; i++) {
        int64_t n_bytes = 0;
        status = take_count(reader, "bytes in a string", 1, &n_bytes);
        if (status == MOE4_OK) status = pass(reader, n_bytes);
    }
    return status;
}

static moe4_status take_type(struct reader *reader, uint32_t *type)
{
    moe4_status status = take(reader, type, sizeof *type);
    if (status == MOE4_OK && *type >= N_VALUE_TYPES)
        status = fail(reader, "value type %" PRIu32 ", expected 0 to %d", *type, N_VALUE_TYPES - 1);
    return status;
}

static moe4_status take_array(struct reader *reader, const char *key)
{
    uint32_t type = 0;
    int64_t count = 0;
    moe4_status status = take_type(reader, &type);
    if (status != MOE4_OK) return status;
    if (type == TYPE_ARRAY)
        return context_fail(reader->context, MOE4_EUNSUPPORTED, "%s: \"%s\" is an array of arrays",
                            show_file(reader->file->path).text, show_name(key).text);
    status = take_count(reader, "elements of an array", value_types[type].n_bytes, &count);
    if (status != MOE4_OK) return status;
    if (type == TYPE_STRING) return pass_strings(reader, count);
    if (count > KEPT_ELEMENTS) return pass(reader, count * value_types[type].n_bytes);
    return take_numbers(reader, key, &value_types[type], count);
}

static moe4_status take_text(struct reader *reader, const char *key)
{
    const char *value;
    int64_t n_bytes = 0;
    moe4_status status = take_count(reader, "bytes in a string", 1, &n_bytes);
    if (status != MOE4_OK) return status;
    if (n_bytes > KEPT_STRING_BYTES) return pass(reader, n_bytes);
    status = take_string(reader, n_bytes, &value);
    return status == MOE4_OK ? tensors_add_metadata(reader->context, reader->tensors, key, value, JSON_STRING) : status;
}

static const char alignment_key[] = "general.alignment";

/* What the format itself uses of the metadata. */
static moe4_status note_number(struct reader *reader, const char *key, const struct number *number)
{
    struct gguf_split *split = &reader->split;
    const struct {
        const char *key;
        int64_t *value;
    } noted[] = {
        {"split.no", &split->number}, {"split.count", &split->count}, {"split.tensors.count", &split->n_tensors}};
    uint64_t bits = number->bits;
    for (size_t i = 0; i < sizeof noted / sizeof *noted; i++)
        if (strcmp(noted[i].key, key) == 0) *noted[i].value = bits <= INT32_MAX ? (int64_t)bits : INT32_MAX;
    if (strcmp(key, alignment_key) != 0) return MOE4_OK;
    if (!bits || bits & (bits - 1) || bits > MAX_ALIGNMENT)
        return fail(reader, "%s is %s, expected a 32-bit power of two up to %d", alignment_key, number->text,
                    MAX_ALIGNMENT);
    reader->alignment = (int64_t)bits;
    return MOE4_OK;
}

static moe4_status take_pair(struct reader *reader)
{
    const char *key;
    int64_t n_bytes = 0;
    uint32_t type = 0;
    struct number number;
    moe4_status status = take_count(reader, "bytes in a key", 1, &n_bytes);
    if (status == MOE4_OK && (!n_bytes || n_bytes > KEPT_STRING_BYTES))
        status = fail(reader, "a key of %" PRId64 " bytes, expected 1 to %d", n_bytes, KEPT_STRING_BYTES);
    if (status == MOE4_OK) status = take_string(reader, n_bytes, &key);
    if (status == MOE4_OK) status = take_type(reader, &type);
    if (status == MOE4_OK && type != TYPE_U32 && strcmp(key, alignment_key) == 0)
        status = fail(reader, "%s is of value type %" PRIu32 ", expected a 32-bit power of two", key, type);
    if (status != MOE4_OK) return status;
    if (type == TYPE_STRING) return take_text(reader, key);
    if (type == TYPE_ARRAY) return take_array(reader, key);
    status = take_number(reader, &value_types[type], &number);
    if (status == MOE4_OK) status = note_number(reader, key, &number);
    if (status == MOE4_OK) status = keep(reader, key, number.text, strlen(number.text), number.token);
    return status;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

static const struct block_type {
    uint32_t id;
    const char *name;
    int32_t elements, n_bytes; /* of a block */
} block_types[] = {
    {39, "MXFP4", 32, 17},    {0, "F32", 1, 4},        {1, "F16", 1, 2},         {30, "BF16", 1, 2},
    {8, "Q8_0", 32, 34},      {2, "Q4_0", 32, 18},     {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},
    {7, "Q5_1", 32, 24},      {9, "Q8_1", 32, 36},     {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},
    {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},  {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},
    {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74}, {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110}, {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136},
    {24, "I8", 1, 1},         {25, "I16", 1, 2},       {26, "I32", 1, 4},        {27, "I64", 1, 8},
    {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},  {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},
    {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},
};
enum { N_BLOCK_TYPES = sizeof block_types / sizeof *block_types };

static moe4_status fail_tensor(struct reader *reader, const moe4_tensor *tensor, const char *what, int64_t value,
                               const char *expected)
{
    return fail(reader, "tensor \"%.80s\": %s %" PRId64 ", expected %s", show_name(tensor->name).text, what, value,
                expected);
}

/* The dimensions, which the file has innermost first. */
static moe4_status take_shape(struct reader *reader, moe4_tensor *tensor)
{
    uint32_t rank;
    int64_t dimensions[MAX_DIMENSIONS];
    moe4_status status = take(reader, &rank, sizeof rank);
    if (status != MOE4_OK) return status;
    if (!rank || rank > MAX_DIMENSIONS) return fail_tensor(reader, tensor, "dimensions:", rank, "1 to 4");
    status = take(reader, dimensions, (int64_t)rank * (int64_t)sizeof *dimensions);
    if (status != MOE4_OK) return status;
    tensor->rank = (int32_t)rank;
    for (uint32_t i = 0; i < rank; i++) {
        tensor->shape[rank - 1 - i] = dimensions[i];
        if (dimensions[i] < 1) return fail_tensor(reader, tensor, "a dimension of", dimensions[i], "1 or more");
    }
    return MOE4_OK;
}

/* Type and size in bytes. */
static moe4_status take_block_type(struct reader *reader, moe4_tensor *tensor)
{
    uint32_t id;
    int64_t size = 1, row = tensor->shape[tensor->rank - 1];
    moe4_status status = take(reader, &id, sizeof id);
    if (status != MOE4_OK) return status;
    const struct block_type *type = block_types;
    while (type < block_types + N_BLOCK_TYPES && type->id != id) type++;
    if (type == block_types + N_BLOCK_TYPES) return fail_tensor(reader, tensor, "type", id, "one that is known");
    tensor->dtype = type->name;
    if (row % type->elements) return fail_tensor(reader, tensor, "rows of", row, "whole blocks of the type");
    for (int32_t i = 0; i < tensor->rank; i++)
        if (!i64_multiply(size, i == tensor->rank - 1 ? row / type->elements : tensor->shape[i], &size))
            return fail_tensor(reader, tensor, "a dimension of", tensor->shape[i], "a size that 63 bits count");
    if (!i64_multiply(size, type->n_bytes, &tensor->n_bytes))
        return fail_tensor(reader, tensor, "blocks:", size, "a size that 63 bits count");
    return MOE4_OK;
}

/* Offsets must be the running sum of sizes, each padded: no hole, no overlap, no other order. */
static moe4_status take_tensor(struct reader *reader, int64_t *end)
{
    moe4_tensor tensor = {.file = reader->file->path};
    uint64_t offset = 0;
    int64_t n_bytes = 0;
    moe4_status status = take_count(reader, "bytes in a tensor's name", 1, &n_bytes);
    if (status == MOE4_OK && (!n_bytes || n_bytes > MAX_TENSOR_NAME))
        status = fail(reader, "a tensor's name of %" PRId64 " bytes, expected 1 to %d", n_bytes, MAX_TENSOR_NAME);
    if (status == MOE4_OK) status = take_string(reader, n_bytes, &tensor.name);
    if (status == MOE4_OK) status = take_shape(reader, &tensor);
    if (status == MOE4_OK) status = take_block_type(reader, &tensor);
    if (status == MOE4_OK) status = take(reader, &offset, sizeof offset);
    if (status != MOE4_OK) return status;
    if (offset != (uint64_t)*end)
        return fail(reader, "tensor \"%.80s\": data begins at %" PRIu64 ", but the data before it ends at %" PRId64,
                    show_name(tensor.name).text, offset, *end);
    if (tensor.n_bytes > reader->file->n_bytes - *end)
        return fail(reader, "tensor \"%.80s\": %" PRId64 " bytes of data from %" PRIu64 ", but the file has %" PRId64,
                    show_name(tensor.name).text, tensor.n_bytes, offset, reader->file->n_bytes);
    tensor.offset = *end;
    *end = round_up(*end + tensor.n_bytes, reader->alignment);
    return tensors_add(reader->context, reader->tensors, &tensor);
}

/* Offsets become those in the file; the last tensor may or may not be padded. */
static moe4_status place_tensors(struct reader *reader, size_t first, int64_t end)
{
    moe4_tensors *tensors = reader->tensors;
    int64_t start = round_up(reader->offset, reader->alignment), left = reader->file->n_bytes - start;
    if (tensors->count == first) return MOE4_OK;
    const moe4_tensor *last = &tensors->items[tensors->count - 1];
    int64_t least = last->offset + last->n_bytes;
    if (left < least || left > end)
        return context_fail(reader->context, MOE4_EFORMAT,
                            "%s: tensor \"%s\": data ends at %" PRId64 ", but the file has %" PRId64 " bytes of data",
                            show_file(reader->file->path).text, show_name(last->name).text, least, left < 0 ? 0 : left);
    for (size_t i = first; i < tensors->count; i++) tensors->items[i].offset += start;
    return MOE4_OK;
}

/* ---- The header as a whole --------------------------------------------------------------------------------------- */

static moe4_status take_version(struct reader *reader)
{
    char begin[sizeof magic];
    uint32_t version = 0;
    moe4_status status = take(reader, begin, sizeof begin);
    if (status == MOE4_OK && memcmp(begin, magic, sizeof magic) != 0) status = fail(reader, "no \"GGUF\" before it");
    if (status == MOE4_OK) status = take(reader, &version, sizeof version);
    if (status != MOE4_OK) return status;
    if (version && !(version & 0xFFFF))
        return context_fail(reader->context, MOE4_EUNSUPPORTED, "%s: big-endian, expected little-endian",
                            show_file(reader->file->path).text);
    if (version < OLDEST_VERSION || version > NEWEST_VERSION)
        return context_fail(reader->context, MOE4_EUNSUPPORTED, "%s: version %" PRIu32 ", expected %d or %d",
                            show_file(reader->file->path).text, version, OLDEST_VERSION, NEWEST_VERSION);
    return MOE4_OK;
}

static moe4_status read_all(struct reader *reader)
{
    enum { LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, LEAST_PAIR_BYTES = 8 + 1 + 4 + 1 };
    int64_t n_tensors = 0, n_pairs = 0, end = 0;
    size_t first = reader->tensors->count;
    moe4_status status = take_version(reader);
    if (status == MOE4_OK && reader->file->n_bytes > INT64_MAX - 2 * MAX_ALIGNMENT)
        status = fail(reader, "a file of %" PRId64 " bytes", reader->file->n_bytes);
    if (status == MOE4_OK) status = take_count(reader, "tensors", LEAST_TENSOR_BYTES, &n_tensors);
    if (status == MOE4_OK) status = take_count(reader, "pairs of metadata", LEAST_PAIR_BYTES, &n_pairs);
    for (int64_t i = 0; status == MOE4_OK && i < n_pairs; i++) status = take_pair(reader);
    for (int64_t i = 0; status == MOE4_OK && i < n_tensors; i++) status = take_tensor(reader, &end);
    if (status == MOE4_OK) status = place_tensors(reader, first, end);
    if (status == MOE4_OK) status = tensors_enter_names(reader->context, reader->tensors, first);
    return status;
}

moe4_status gguf_read_header(moe4_context *context, moe4_tensors *tensors, struct gguf_split *split)
{
    struct reader *reader = memory_allocate_zeroed(&tensors->allocator, sizeof *reader);
    if (!reader) return context_fail_memory(context, "a buffer", sizeof *reader);
    reader->context = context;
    reader->tensors = tensors;
    reader->file = &tensors->files[tensors->n_files - 1];
    reader->alignment = DEFAULT_ALIGNMENT;
    reader->split = (struct gguf_split){-1, -1, -1};
    moe4_status status = read_all(reader);
    *split = reader->split;
    memory_release(&tensors->allocator, reader, sizeof *reader);
    return status;
}
