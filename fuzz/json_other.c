#include "json_other.h"

#include <jansson.h>
#include <string.h>

void *other_parse(const void *text, size_t n_bytes, char reason[160], int *is_limit)
{
    json_error_t error = {0};
    json_t *value = json_loadb(text, n_bytes, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &error);
    *is_limit = value ? memchr(text, '\0', n_bytes) != NULL : json_error_code(&error) == json_error_numeric_overflow;
    memcpy(reason, error.text, sizeof error.text);
    return value;
}

void other_release(void *value)
{
    json_decref(value);
}

enum other_type other_type(const void *value)
{
    static const enum other_type types[] = {
        [JSON_OBJECT] = OTHER_OBJECT,   [JSON_ARRAY] = OTHER_ARRAY, [JSON_STRING] = OTHER_STRING,
        [JSON_INTEGER] = OTHER_INTEGER, [JSON_REAL] = OTHER_REAL,   [JSON_TRUE] = OTHER_TRUE,
        [JSON_FALSE] = OTHER_FALSE,     [JSON_NULL] = OTHER_NULL};
    return types[json_typeof((const json_t *)value)];
}

size_t other_count(const void *container)
{
    return json_is_array((const json_t *)container) ? json_array_size(container) : json_object_size(container);
}

const void *other_element(const void *array, size_t index)
{
    return json_array_get(array, index);
}

const void *other_member(const void *object, const char *key)
{
    return json_object_get(object, key);
}

const char *other_string(const void *value)
{
    return json_string_value(value);
}

long long other_integer(const void *value)
{
    return json_integer_value(value);
}

double other_number(const void *value)
{
    return json_number_value(value);
}
