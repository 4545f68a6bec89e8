#include "io/config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "io/show.h"

/* Far above any real one. */
#define LARGEST_CONFIG ((int64_t)64 << 20)

moe4_status config_open(moe4_context *context, const char *path, struct config *config)
{
    const char *error;
    size_t error_at;
    *config = (struct config){.context = context, .path = path, .allocator = context->allocator};
    moe4_status status = file_read_all(context, path, LARGEST_CONFIG, &config->text);
    if (status != MOE4_OK) return status;
    status = json_tree(&config->nodes, &config->allocator, config->text.text, config->text.n_bytes, &config->root,
                       &error, &error_at);
    if (status == MOE4_ENOMEM) context_fail(context, status, "%s: out of memory", show_file(path).text);
    if (status == MOE4_EFORMAT)
        context_fail(context, status, "%s: byte %zu: %s", show_file(path).text, error_at, error);
    if (status != MOE4_OK) config_close(config);
    return status;
}

void config_close(struct config *config)
{
    arena_release(&config->nodes, &config->allocator);
    memory_release(&config->allocator, config->text.text, config->text.n_bytes);
}

const struct json_value *config_find(const struct config *config, const char *key)
{
    const struct json_value *object = config->root;
    for (const char *dot = strchr(key, '.'); dot; key = dot + 1, dot = strchr(key, '.'))
        object = json_member(object, key, (size_t)(dot - key));
    return json_member(object, key, strlen(key));
}

/* What a file says, in a few characters. */
static struct shown show_value(const struct json_value *value)
{
    static const char *const words[] = {[JSON_OBJECT] = "an object",
                                        [JSON_ARRAY] = "an array",
                                        [JSON_TRUE] = "true",
                                        [JSON_FALSE] = "false",
                                        [JSON_NULL] = "null"};
    char text[80];
    if (!value) return show_name("missing");
    if (value->type == JSON_STRING)
        snprintf(text, sizeof text, "\"%.60s\"", value->text);
    else if (value->type == JSON_NUMBER)
        snprintf(text, sizeof text, "%.*s", value->n_bytes < 60 ? (int)value->n_bytes : 60, value->text);
    else
        return show_name(words[value->type]);
    return show_name(text);
}

moe4_status config_fail(const struct config *config, moe4_status status, const char *key, const char *format, ...)
{
    char expected[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(expected, sizeof expected, format, arguments);
    va_end(arguments);
    return context_fail(config->context, status, "%s: %s is %s, expected %s", show_file(config->path).text, key,
                        show_value(config_find(config, key)).text, expected);
}

moe4_status config_integer(const struct config *config, const char *key, int64_t least, int64_t most, int64_t *value)
{
    const struct json_value *found = config_find(config, key);
    int64_t read;
    if (!found || found->type != JSON_NUMBER || !json_integer(found->text, found->n_bytes, &read) || read < least ||
        read > most)
        return config_fail(config, MOE4_EFORMAT, key, "a whole number from %" PRId64 " to %" PRId64, least, most);
    *value = read;
    return MOE4_OK;
}

moe4_status config_number(const struct config *config, const char *key, double *value)
{
    const struct json_value *found = config_find(config, key);
    if (!found) return MOE4_OK;
    if (found->type != JSON_NUMBER) return config_fail(config, MOE4_EFORMAT, key, "a number");
    *value = json_double(found->text, found->n_bytes);
    return MOE4_OK;
}

moe4_status config_string(const struct config *config, const char *key, const char **value)
{
    const struct json_value *found = config_find(config, key);
    if (!found || found->type != JSON_STRING) return config_fail(config, MOE4_EFORMAT, key, "a string");
    *value = found->text;
    return MOE4_OK;
}
