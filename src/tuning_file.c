/* Tuning in a JSON file.  What was measured elsewhere is refused: library, device, instruction set and threads must be
 * those of the context. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend.h"
#include "io/file.h"
#include "io/json_tree.h"
#include "tuning.h"

#define FORMAT "moe4 tuning, version 1"

#define MAX_MICROSECONDS ((int64_t)1 << 48) /* nine years; exact in a double of milliseconds and back */

enum { MAX_FILE_BYTES = 1 << 24, MAX_PATH_BYTES = 4096 };

/* The fields of an entry that are integers, by name. */
struct field {
    const char *name;
    size_t offset;
    int is_64;
};
#define FIELD(member, is_64)                                                                                           \
    {                                                                                                                  \
#member, offsetof(moe4_tuning_entry, member), is_64                                                            \
    }
static const struct field fields[] = {
    FIELD(hidden_size, 1),
    FIELD(intermediate_size, 1),
    FIELD(n_local_experts, 0),
    FIELD(top_k, 0),
    FIELD(compute, 0),
    FIELD(n_tokens, 1),
    {"tile_tokens", offsetof(moe4_tuning_entry, tactic.tile_tokens), 0},
    {"claim_share", offsetof(moe4_tuning_entry, tactic.claim_share), 0},
};
enum { N_FIELDS = sizeof fields / sizeof *fields };

/* ---- Writing -------------------------------------------------------------------------------------------------------
 */

static int64_t field_value(const moe4_tuning_entry *entry, const struct field *field)
{
    const char *at = (const char *)entry + field->offset;
    int32_t narrow;
    int64_t wide;
    memcpy(&narrow, at, sizeof narrow);
    if (!field->is_64) return narrow;
    memcpy(&wide, at, sizeof wide);
    return wide;
}

static void write_string(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++)
        if (*text == '"' || *text == '\\')
            fprintf(file, "\\%c", *text);
        else
            fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
    fputc('"', file);
}

static long long microseconds(double ms)
{
    double rounded = ms * 1e3 + 0.5;
    return rounded < (double)MAX_MICROSECONDS ? (long long)rounded : (long long)MAX_MICROSECONDS;
}

static moe4_context_info describe(const moe4_context *context)
{
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    context->backend->describe_context(context, &info);
    return info;
}

static void write_tuning(const moe4_context *context, FILE *file)
{
    const moe4_context_info info = describe(context);
    fprintf(file, "{\n  \"format\": \"%s\",\n  \"library\": \"%s\",\n  \"device\": ", FORMAT, moe4_version());
    write_string(file, info.device_name);
    fprintf(file, ",\n  \"isa\": \"%s\",\n  \"threads\": %d,\n  \"entries\": [", info.isa_name, info.n_threads);
    for (int32_t i = 0; i < context->tuning.n; i++) {
        const moe4_tuning_entry *entry = &context->tuning.entries[i];
        fprintf(file, "%s\n    {", i ? "," : "");
        for (int f = 0; f < N_FIELDS; f++)
            fprintf(file, "\"%s\": %lld, ", fields[f].name, (long long)field_value(entry, &fields[f]));
        /* Microseconds: an integer, whatever the locale thinks of decimal points. */
        fprintf(file, "\"us\": %lld, \"default_us\": %lld}", microseconds(entry->ms), microseconds(entry->default_ms));
    }
    fprintf(file, "\n  ]\n}\n");
}

moe4_status moe4_tuning_save(moe4_context *context, const char *path)
{
    char temporary[MAX_PATH_BYTES];
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!path) return context_fail(context, MOE4_EINVAL, "path is NULL");
    int length = snprintf(temporary, sizeof temporary, "%s.%ld.tmp", path, (long)getpid());
    if (length < 0 || length >= (int)sizeof temporary)
        return context_fail(context, MOE4_EINVAL, "path has %zu bytes, expected fewer than %d", strlen(path),
                            MAX_PATH_BYTES - 16);
    FILE *file = fopen(temporary, "we");
    if (!file) return context_fail(context, MOE4_EIO, "%s: %s", temporary, strerror(errno));
    write_tuning(context, file);
    int failed = fflush(file) != 0 || ferror(file) || fsync(fileno(file)) != 0;
    failed |= fclose(file) != 0;
    if (!failed && rename(temporary, path) == 0) return MOE4_OK;
    moe4_status status = context_fail(context, MOE4_EIO, "%s: %s", path, strerror(errno));
    unlink(temporary);
    return status;
}

/* ---- Reading -------------------------------------------------------------------------------------------------------
 */

static const struct json_value *member(const struct json_value *object, const char *key)
{
    return json_member(object, key, strlen(key));
}

static moe4_status check_string(moe4_context *context, const char *path, const struct json_value *root, const char *key,
                                const char *expected)
{
    const struct json_value *value = member(root, key);
    const char *text = value && value->type == JSON_STRING ? value->text : "(absent)";
    if (strcmp(text, expected) == 0) return MOE4_OK;
    return context_fail(context, MOE4_EFORMAT, "%s: %s is \"%s\", expected \"%s\"", path, key, text, expected);
}

static int read_integer(const struct json_value *object, const char *key, int64_t most, int64_t *result)
{
    const struct json_value *value = member(object, key);
    return value && value->type == JSON_NUMBER && json_integer(value->text, value->n_bytes, result) && *result <= most;
}

static int read_ms(const struct json_value *object, const char *key, double *ms)
{
    int64_t us;
    if (!read_integer(object, key, MAX_MICROSECONDS, &us)) return 0;
    *ms = (double)us * 1e-3;
    return 1;
}

static moe4_status read_entry(moe4_context *context, const char *path, int64_t index, const struct json_value *object,
                              moe4_tuning_entry *entry)
{
    int64_t value;
    *entry = (moe4_tuning_entry)MOE4_TUNING_ENTRY_INIT;
    for (int f = 0; f < N_FIELDS; f++) {
        if (!read_integer(object, fields[f].name, fields[f].is_64 ? INT64_MAX : INT32_MAX, &value))
            return context_fail(context, MOE4_EFORMAT, "%s: entry %lld: \"%s\" is no integer of its range", path,
                                (long long)index, fields[f].name);
        int32_t narrow = (int32_t)value;
        char *at = (char *)entry + fields[f].offset;
        if (fields[f].is_64)
            memcpy(at, &value, sizeof value);
        else
            memcpy(at, &narrow, sizeof narrow);
    }
    if (!read_ms(object, "us", &entry->ms) || !read_ms(object, "default_us", &entry->default_ms))
        return context_fail(context, MOE4_EFORMAT, "%s: entry %lld: \"us\" or \"default_us\" is no integer up to %lld",
                            path, (long long)index, (long long)MAX_MICROSECONDS);
    if (context->backend->tactic_is_valid(&entry->tactic) && entry->n_tokens >= 1) return MOE4_OK;
    return context_fail(context, MOE4_EFORMAT, "%s: entry %lld: tactic (%d, %d) for %lld tokens does not exist", path,
                        (long long)index, entry->tactic.tile_tokens, entry->tactic.claim_share,
                        (long long)entry->n_tokens);
}

static moe4_status check_origin(moe4_context *context, const char *path, const struct json_value *root)
{
    const moe4_context_info info = describe(context);
    int64_t threads;
    moe4_status status = check_string(context, path, root, "format", FORMAT);
    if (!status) status = check_string(context, path, root, "library", moe4_version());
    if (!status) status = check_string(context, path, root, "device", info.device_name);
    if (!status) status = check_string(context, path, root, "isa", info.isa_name);
    if (status) return status;
    if (!read_integer(root, "threads", INT32_MAX, &threads)) threads = -1;
    if (threads == info.n_threads) return MOE4_OK;
    return context_fail(context, MOE4_EFORMAT, "%s: threads is %lld, expected %d", path, (long long)threads,
                        info.n_threads);
}

/* Twice over the entries, so that a bad one leaves the context as it was: first to check them, then to add them. */
static moe4_status add_entries(moe4_context *context, const char *path, const struct json_value *root)
{
    const struct json_value *list = member(root, "entries");
    if (!list || list->type != JSON_ARRAY)
        return context_fail(context, MOE4_EFORMAT, "%s: \"entries\" is no array", path);
    for (int adding = 0; adding < 2; adding++) {
        int64_t index = 0;
        for (const struct json_value *item = list->child; item; item = item->next, index++) {
            moe4_tuning_entry entry;
            moe4_status status = read_entry(context, path, index, item, &entry);
            if (!status && adding) status = tuning_put(context, &entry);
            if (status) return status;
        }
    }
    return MOE4_OK;
}

moe4_status moe4_tuning_load(moe4_context *context, const char *path)
{
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!path) return context_fail(context, MOE4_EINVAL, "path is NULL");
    struct file_text text;
    moe4_status status = file_read_all(context, path, MAX_FILE_BYTES, &text);
    if (status) return status;
    struct arena arena = {0};
    struct json_value *root;
    const char *error = "";
    size_t at = 0;
    status = json_tree(&arena, &context->allocator, text.text, text.n_bytes, &root, &error, &at);
    if (status == MOE4_ENOMEM) context_fail_memory(context, "tuning", text.n_bytes);
    if (status == MOE4_EFORMAT) context_fail(context, status, "%s: byte %zu: %s", path, at, error);
    if (!status) status = check_origin(context, path, root);
    if (!status) status = add_entries(context, path, root);
    arena_release(&arena, &context->allocator);
    memory_release(&context->allocator, text.text, text.n_bytes);
    return status;
}
