/* JSON as jansson reads it.  Its header and ours use the same names, so that one file cannot have both. */
#ifndef MOE4_FUZZ_JSON_OTHER_H
#define MOE4_FUZZ_JSON_OTHER_H

#include <stddef.h>

enum other_type {
    OTHER_OBJECT,
    OTHER_ARRAY,
    OTHER_STRING,
    OTHER_INTEGER,
    OTHER_REAL,
    OTHER_TRUE,
    OTHER_FALSE,
    OTHER_NULL
};

/* NULL for what is not JSON, with the reason.  A key twice in an object is refused.
 * *is_limit: it was only a number that jansson cannot hold, or jansson took a NUL character for the end of the text. */
void *other_parse(const void *text, size_t n_bytes, char reason[160], int *is_limit);
void other_release(void *value);

enum other_type other_type(const void *value);
size_t other_count(const void *container);
const void *other_element(const void *array, size_t index);
const void *other_member(const void *object, const char *key);
const char *other_string(const void *value);
long long other_integer(const void *value);
double other_number(const void *value);

#endif
