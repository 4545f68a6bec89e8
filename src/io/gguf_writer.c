/* The header of a GGUF file, version 3: little-endian, tensors in the order of their data, each aligned to 32. */
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "base/dims.h"
#include "io/check.h"
#include "io/show.h"
#include "io/writer.h"

enum { VERSION = 3, ALIGNMENT = 32, MOST_DIMENSIONS = 4, MOST_NAME_BYTES = 63, GGUF_BLOCK_BYTES = 17 };

static const struct type {
    const char *word;
    uint32_t id;
    int64_t elements, bytes;
} types[] = {{"F32", 0, 1, 4},  {"F16", 1, 1, 2},  {"BF16", 30, 1, 2},
             {"I32", 26, 1, 4}, {"I64", 27, 1, 8}, {"MXFP4", 39, BLOCK_SIZE, GGUF_BLOCK_BYTES}};
enum { N_TYPES = sizeof types / sizeof *types };

static const struct type *type_find(const char *word)
{
    for (int i = 0; word && i < N_TYPES; i++)
        if (strcmp(types[i].word, word) == 0) return &types[i];
    return NULL;
}

/* ---- Sizes ------------------------------------------------------------------------------------------------------- */

static moe4_status measure(moe4_context *context, const char *path, moe4_tensor *tensor)
{
    const struct type *type = type_find(tensor->dtype);
    if (!type)
        return context_fail(context, MOE4_EINVAL, "%s: tensor \"%s\": dtype \"%s\" is none that a GGUF file is given",
                            show_file(path).text, show_name(tensor->name).text,
                            tensor->dtype ? show_name(tensor->dtype).text : "NULL");
    if (tensor->rank < 1 || tensor->rank > MOST_DIMENSIONS || strlen(tensor->name) > MOST_NAME_BYTES)
        return context_fail(context, MOE4_EINVAL,
                            "%s: tensor \"%s\": rank %" PRId32
                            " and %zu bytes of name, expected 1 to %d and at most %d",
                            show_file(path).text, show_name(tensor->name).text, tensor->rank, strlen(tensor->name),
                            MOST_DIMENSIONS, MOST_NAME_BYTES);
    int64_t bytes = type->bytes;
    for (int32_t d = 0; d < tensor->rank; d++) {
        int64_t size = tensor->shape[d], unit = d == tensor->rank - 1 ? type->elements : 1;
        if (size <= 0 || size % unit || __builtin_mul_overflow(bytes, size / unit, &bytes))
            return context_fail(context, MOE4_EINVAL,
                                "%s: tensor \"%s\": dimension of %" PRId64 ", expected a multiple of %" PRId64
                                " and fewer than 2^63 bytes",
                                show_file(path).text, show_name(tensor->name).text, size, unit);
    }
    tensor->dtype = type->word;
    tensor->n_bytes = bytes;
    return MOE4_OK;
}

/* ---- The header -------------------------------------------------------------------------------------------------- */

struct values {
    const moe4_gguf_value *items;
    int32_t count;
};

static void add_number(struct text *text, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++) text_add_byte(text, (char)(value >> 8 * i));
}

static void add_float(struct text *text, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    add_number(text, bits, 4);
}

static void add_text(struct text *text, const char *string)
{
    add_number(text, strlen(string), 8);
    text_add_string(text, string);
}

static void add_value(struct text *text, const moe4_gguf_value *value)
{
    enum { ID_U16 = 2, ID_U32 = 4, ID_I32 = 5, ID_F32 = 6, ID_BOOL = 7, ID_STRING = 8, ID_ARRAY = 9 };
    static const uint32_t ids[] = {ID_U32, ID_F32, ID_BOOL, ID_STRING, ID_ARRAY, ID_U16, ID_I32};
    add_text(text, value->key);
    add_number(text, ids[value->type], 4);
    switch (value->type) {
    case MOE4_GGUF_U32:
    case MOE4_GGUF_I32: add_number(text, value->u32, 4); break;
    case MOE4_GGUF_U16: add_number(text, value->u32, 2); break;
    case MOE4_GGUF_F32: add_float(text, value->f32); break;
    case MOE4_GGUF_BOOL: add_number(text, value->u32, 1); break;
    case MOE4_GGUF_STRING: add_text(text, value->text); break;
    case MOE4_GGUF_F32_ARRAY:
        add_number(text, ID_F32, 4);
        add_number(text, (uint64_t)value->n_elements, 8);
        for (int64_t i = 0; i < value->n_elements; i++) add_float(text, value->array[i]);
        break;
    }
}

static void add_tensor(struct text *text, const moe4_tensor *tensor)
{
    add_text(text, tensor->name);
    add_number(text, (uint32_t)tensor->rank, 4);
    for (int32_t d = tensor->rank - 1; d >= 0; d--) add_number(text, (uint64_t)tensor->shape[d], 8);
    add_number(text, type_find(tensor->dtype)->id, 4);
    add_number(text, (uint64_t)tensor->offset, 8);
}

static void add_header(struct text *text, const moe4_writer *writer, const void *metadata)
{
    const struct values *values = metadata;
    text_add_string(text, "GGUF");
    add_number(text, VERSION, 4);
    add_number(text, (uint32_t)writer->n_targets, 8);
    add_number(text, (uint32_t)values->count, 8);
    for (int32_t i = 0; i < values->count; i++) add_value(text, &values->items[i]);
    for (int32_t i = 0; i < writer->n_targets; i++) add_tensor(text, &writer->targets[i].tensor);
    while (!text->failed && text->n_bytes % ALIGNMENT) text_add_byte(text, 0);
}

/* ---- The public function ----------------------------------------------------------------------------------------- */

static moe4_status check_values(moe4_context *context, const char *path, const moe4_gguf_value *values, int32_t count)
{
    moe4_status status = MOE4_OK;
    for (int32_t i = 0; i < count && status == MOE4_OK; i++) {
        const moe4_gguf_value *value = &values[i];
        status = writer_check_text(context, path, "metadata key", value->key);
        if (status == MOE4_OK && value->type == MOE4_GGUF_STRING)
            status = writer_check_text(context, path, "metadata value", value->text);
        if (status == MOE4_OK && ((unsigned)value->type > MOE4_GGUF_I32 ||
                                  (value->type == MOE4_GGUF_F32_ARRAY && value->n_elements && !value->array)))
            status = context_fail(context, MOE4_EINVAL, "%s: metadata \"%s\": type %d without a value",
                                  show_file(path).text, show_name(value->key).text, (int)value->type);
        for (int32_t j = 0; j < i && status == MOE4_OK; j++)
            if (strcmp(values[j].key, value->key) == 0)
                status = context_fail(context, MOE4_EINVAL, "%s: metadata key \"%s\" is given twice",
                                      show_file(path).text, show_name(value->key).text);
    }
    return status;
}

moe4_status moe4_gguf_writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors,
                                    int32_t n_tensors, const moe4_gguf_value *values, int32_t n_values,
                                    moe4_writer **result)
{
    static const struct writer_format gguf = {measure, ALIGNMENT, add_header};
    struct values metadata = {values, n_values};
    moe4_status status = check_argument(context, "writer", result);
    if (status != MOE4_OK) return status;
    *result = NULL;
    status = check_argument(context, "path", path);
    if (status == MOE4_OK && n_values) status = check_argument(context, "values", values);
    if (status == MOE4_OK) status = check_values(context, path, values, n_values);
    if (status != MOE4_OK) return status;
    return writer_create(context, path, tensors, n_tensors, &gguf, &metadata, result);
}
