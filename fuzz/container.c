#include "container.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"

enum { MAX_TEXT = 1 << 16, MAX_LINE = 1024 };

/* Element sizes in bits, of any type that a line may name; another type counts as one of 8. */
static const struct type {
    const char *name;
    int bits;
} types[] = {{"F4", 4},   {"U8", 8},   {"I8", 8},   {"BF16", 16}, {"F16", 16}, {"I16", 16},
             {"F32", 32}, {"U32", 32}, {"I32", 32}, {"I64", 64},  {"U64", 64}, {"F64", 64}};
enum { N_TYPES = sizeof types / sizeof *types };

struct builder {
    char header[CONTAINER_HEADER_BYTES];
    size_t header_bytes;
    unsigned char data[CONTAINER_DATA_BYTES];
    size_t data_bytes;
    char metadata[CONTAINER_HEADER_BYTES];
    size_t metadata_bytes;
};

/* ---- Words ---------------------------------------------------------------------------------------------------------
 */

const char *expand_words(const char *text, size_t n_bytes, const char *const *words)
{
    static char expanded[MAX_TEXT];
    size_t used = 0;
    for (size_t i = 0; i < n_bytes && used < sizeof expanded - 256;) {
        const char *const *word = words;
        while (*word && (strlen(*word) > n_bytes - i || memcmp(text + i, *word, strlen(*word)) != 0)) word += 2;
        if (*word) {
            used += (size_t)snprintf(expanded + used, 256, "%.255s", word[1]);
            i += strlen(*word);
        } else {
            expanded[used++] = text[i++];
        }
    }
    expanded[used] = '\0';
    return expanded;
}

/* ---- The header ----------------------------------------------------------------------------------------------------
 */

/* Appends to a text that never overflows: what does not fit is left out, and the file is then broken JSON. */
__attribute__((format(printf, 3, 4))) static void append(char *text, size_t *used, const char *format, ...)
{
    va_list arguments;
    size_t room = CONTAINER_HEADER_BYTES - *used;
    va_start(arguments, format);
    int length = vsnprintf(text + *used, room, format, arguments);
    va_end(arguments);
    if (length > 0 && (size_t)length < room) *used += (size_t)length;
}

/* A name as a JSON string.  Bytes that are no UTF-8 stay as they are. */
static const char *quote(const char *text)
{
    static char quoted[6 * MAX_LINE + 3];
    char *to = quoted;
    *to++ = '"';
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == '"' || *text == '\\')
            to += sprintf(to, "\\u%04x", (unsigned char)*text);
        else
            *to++ = *text;
    strcpy(to, "\"");
    return quoted;
}

static void add_metadata(struct builder *builder, char *line)
{
    char *value = strchr(line, ' ');
    if (!value) return;
    *value++ = '\0';
    append(builder->metadata, &builder->metadata_bytes, "%s%s:", builder->metadata_bytes ? "," : "", quote(line));
    append(builder->metadata, &builder->metadata_bytes, "%s", quote(value));
}

/* ---- Tensors -------------------------------------------------------------------------------------------------------
 */

static int bits_of(const char *dtype)
{
    for (int i = 0; i < N_TYPES; i++)
        if (strcmp(types[i].name, dtype) == 0) return types[i].bits;
    return 8;
}

/* Reads "2,3,64" into a JSON array and a number of bytes; 0 if they are too many. */
static int read_shape(const char *text, int bits, char *shape, size_t *n_bytes)
{
    uint64_t n_bits = (uint64_t)bits;
    size_t used = 0;
    shape[0] = '\0';
    while (*text) {
        char *end;
        uint64_t size = strtoull(text, &end, 10);
        if (end == text || used > 200) return 0;
        if (size > CONTAINER_DATA_BYTES || n_bits * size > 8 * CONTAINER_DATA_BYTES) return 0;
        n_bits *= size;
        used += (size_t)sprintf(shape + used, "%s%" PRIu64, used ? "," : "", size);
        text = *end == ',' ? end + 1 : end;
        if (*end && *end != ',') return 0;
    }
    *n_bytes = (size_t)(n_bits / 8);
    return 1;
}

/* Values as far as they and the tensor go. */
static void write_values(const char *dtype, const char *values, unsigned char *to, size_t n_bytes)
{
    size_t item_bytes = (size_t)bits_of(dtype) / 8;
    int is_float = strcmp(dtype, "F32") == 0;
    if (!item_bytes) return;
    for (size_t at = 0; at + item_bytes <= n_bytes; at += item_bytes) {
        char *end;
        float real = strtof(values, &end);
        int64_t integer = is_float ? 0 : strtoll(values, &end, 0);
        if (end == values) return;
        memcpy(to + at, is_float ? (const void *)&real : (const void *)&integer, item_bytes);
        values = end;
    }
}

static void add_tensor(struct builder *builder, char *line)
{
    char *values = strstr(line, " = "), *at, *name, *dtype, *shape, dimensions[256];
    size_t n_bytes;
    if (values) {
        *values = '\0';
        values += 3;
    }
    name = strtok_r(line, " ", &at);
    dtype = strtok_r(NULL, " ", &at);
    shape = strtok_r(NULL, " ", &at);
    if (!name || !dtype || !read_shape(shape ? shape : "", bits_of(dtype), dimensions, &n_bytes)) return;
    if (n_bytes > sizeof builder->data - builder->data_bytes) return;
    unsigned char *data = builder->data + builder->data_bytes;
    for (size_t i = 0; i < n_bytes; i++) data[i] = (unsigned char)(96 + i * 37 % 31); /* also fair scales */
    if (values) write_values(dtype, values, data, n_bytes);
    append(builder->header, &builder->header_bytes, "%s%s:{\"dtype\":", builder->header_bytes ? "," : "", quote(name));
    append(builder->header, &builder->header_bytes, "%s,\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", quote(dtype),
           dimensions, builder->data_bytes, builder->data_bytes + n_bytes);
    builder->data_bytes += n_bytes;
}

/* ---- The file ------------------------------------------------------------------------------------------------------
 */

static void read_lines(struct builder *builder, const char *text)
{
    while (*text) {
        char line[MAX_LINE];
        size_t length = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)(length < MAX_LINE ? length : MAX_LINE - 1), text);
        text += length + (text[length] == '\n');
        if (line[0] == '@')
            add_metadata(builder, line + 1);
        else
            add_tensor(builder, line);
    }
}

static void assemble(const struct builder *builder, struct container *container)
{
    char *header = (char *)container->bytes + 8;
    size_t used = 0;
    append(header, &used, "{");
    if (builder->metadata_bytes)
        append(header, &used, "\"__metadata__\":{%s}%s", builder->metadata, builder->header_bytes ? "," : "");
    append(header, &used, "%s", builder->header);
    append(header, &used, "}");
    for (int i = 0; i < 8; i++) container->bytes[i] = (unsigned char)((uint64_t)used >> 8 * i);
    memcpy(header + used, builder->data, builder->data_bytes);
    container->n_bytes = 8 + used + builder->data_bytes;
}

void container_build(const moe4_context *context, const char *text, size_t n_bytes, struct container *container)
{
    static struct builder builder;
    const char *words[] = {"%version", moe4_version(), "%layout", context->backend->layout, NULL};
    builder.header_bytes = builder.data_bytes = builder.metadata_bytes = 0;
    builder.header[0] = builder.metadata[0] = '\0';
    read_lines(&builder, expand_words(text, n_bytes, words));
    assemble(&builder, container);
}
