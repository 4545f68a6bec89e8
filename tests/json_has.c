/* json_has KEY[=VALUE]...: whether every line of standard input is a JSON object that has these keys, and these values.
 *
 * A key may be a path: "check.ok=true".  A value is compared as JSON text without quotes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

/* The value at a dotted path of `length` characters; NULL if there is none. */
static const json_t *value_find(const json_t *object, const char *path, size_t length)
{
    while (object && length) {
        size_t part = strcspn(path, ".=");
        char key[64];
        if (part >= sizeof key) return NULL;
        memcpy(key, path, part);
        key[part] = '\0';
        object = json_object_get(object, key);
        path += part;
        length -= part;
        if (length) {
            ++path;
            --length;
        }
    }
    return object;
}

static int value_is(const json_t *value, const char *expected)
{
    if (json_is_string(value)) return strcmp(json_string_value(value), expected) == 0;
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(7));
    int same = text && strcmp(text, expected) == 0;
    free(text);
    return same;
}

static int line_is_good(const char *line, char **wanted, int n_wanted)
{
    json_error_t error;
    json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, &error);
    int good = json_is_object(object);
    if (!good) fprintf(stderr, "not a JSON object (%s): %s\n", object ? "of another type" : error.text, line);
    for (int i = 0; good && i < n_wanted; ++i) {
        size_t length = strcspn(wanted[i], "=");
        const json_t *value = value_find(object, wanted[i], length);
        good = value && (!wanted[i][length] || value_is(value, wanted[i] + length + 1));
        if (!good) fprintf(stderr, "no \"%s\" in: %s\n", wanted[i], line);
    }
    json_decref(object);
    return good;
}

int main(int argc, char **argv)
{
    char *line = NULL;
    size_t capacity = 0;
    int n_lines = 0, good = 1;
    while (good && getline(&line, &capacity, stdin) > 0) {
        good = line_is_good(line, argv + 1, argc - 1);
        ++n_lines;
    }
    free(line);
    if (good && !n_lines) fprintf(stderr, "no line of JSON at all\n");
    return !(good && n_lines);
}
