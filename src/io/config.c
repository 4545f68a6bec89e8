#include "io/config.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "io/show.h"

/* Far above any real one. */
#define LARGEST_CONFIG ((int64_t)64 << 20)

static moe4_status parse(struct config *config, const char *path, struct file_text *text, struct json_value **root)
{
    const char *error;
    size_t error_at;
    moe4_status status = file_read_all(config->context, path, LARGEST_CONFIG, text);
    if (status != MOE4_OK) return status;
    status = json_tree(&config->nodes, &config->allocator, text->text, text->n_bytes, root, &error, &error_at);
    if (status == MOE4_ENOMEM) context_fail(config->context, status, "%s: out of memory", show_file(path).text);
    if (status == MOE4_EFORMAT)
        context_fail(config->context, status, "%s: byte %zu: %s", show_file(path).text, error_at, error);
    return status;
}

/* hf_quant_config.json in the folder of config.json, if there is one. */
static moe4_status parse_beside(struct config *config)
{
    static const char name[] = "hf_quant_config.json";
    size_t folder_bytes = (size_t)(file_name(config->path) - config->path);
    char *path = arena_allocate(&config->nodes, &config->allocator, folder_bytes + sizeof name);
    if (!path) return context_fail_memory(config->context, "a path", folder_bytes + sizeof name);
    memcpy(path, config->path, folder_bytes);
    memcpy(path + folder_bytes, name, sizeof name);
    return file_look(path) == FILE_MISSING ? MOE4_OK : parse(config, path, &config->beside_text, &config->beside);
}

moe4_status config_open(moe4_context *context, const char *path, struct config *config)
{
    *config = (struct config){.context = context, .kind = CONFIG_JSON, .path = path, .allocator = context->allocator};
    moe4_status status = parse(config, path, &config->text, &config->root);
    if (status == MOE4_OK) {
        const struct json_value *section = config_find(config, "text_config");
        config->section = section && section->type == JSON_OBJECT ? section : NULL;
        int is_silent = !config_find(config, "quantization_config") && !config_find(config, "quantization");
        if (is_silent || config_says(config, "quantization_config.quant_method", "modelopt"))
            status = parse_beside(config);
    }
    if (status != MOE4_OK) config_close(config);
    return status;
}

void config_close(struct config *config)
{
    arena_release(&config->nodes, &config->allocator);
    memory_release(&config->allocator, config->text.text, config->text.n_bytes);
    memory_release(&config->allocator, config->beside_text.text, config->beside_text.n_bytes);
}

/* A member by its whole key, or by a path of keys. */
static const struct json_value *find_in(const struct json_value *object, const char *key)
{
    const struct json_value *whole = json_member(object, key, strlen(key));
    if (whole) return whole;
    for (const char *dot = strchr(key, '.'); dot; key = dot + 1, dot = strchr(key, '.'))
        object = json_member(object, key, (size_t)(dot - key));
    return json_member(object, key, strlen(key));
}

const struct json_value *config_find(const struct config *config, const char *key)
{
    const struct json_value *const places[] = {config->section, config->root, config->beside};
    const struct json_value *found = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places && !found; i++) found = find_in(places[i], key);
    return found;
}

const struct json_value *config_present(const struct config *config, const char *key)
{
    const struct json_value *found = config_find(config, key);
    return found && found->type != JSON_NULL ? found : NULL;
}

const char *config_key(const struct config *config, const char *const *keys)
{
    for (int i = 0; keys[i]; i++)
        if (config_present(config, keys[i])) return keys[i];
    return keys[0];
}

int config_says(const struct config *config, const char *key, const char *word)
{
    const struct json_value *found = config_find(config, key);
    return found && found->type == JSON_STRING && strcmp(found->text, word) == 0;
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

moe4_status config_integer_of(const struct config *config, const char *const *keys, int64_t least, int64_t most,
                              int64_t *value)
{
    const char *first = config_key(config, keys);
    moe4_status status = config_integer(config, first, least, most, value);
    for (int i = 0; keys[i] && status == MOE4_OK; i++) {
        int64_t other = 0;
        if (keys[i] == first || !config_present(config, keys[i])) continue;
        status = config_integer(config, keys[i], least, most, &other);
        if (status == MOE4_OK && other != *value)
            status = config_fail(config, MOE4_EFORMAT, keys[i], "%" PRId64 " as %s says", *value, first);
    }
    return status;
}

moe4_status config_optional_integer(const struct config *config, const char *const *keys, int64_t least, int64_t most,
                                    int64_t *value)
{
    return config_present(config, config_key(config, keys)) ? config_integer_of(config, keys, least, most, value)
                                                            : MOE4_OK;
}

moe4_status config_truth(const struct config *config, const char *key, int *value)
{
    const struct json_value *found = config_present(config, key);
    if (!found) return MOE4_OK;
    if (found->type != JSON_TRUE && found->type != JSON_FALSE)
        return config_fail(config, MOE4_EFORMAT, key, "true or false");
    *value = found->type == JSON_TRUE;
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
