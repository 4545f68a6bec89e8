/* A strict JSON scanner that works in place: no memory of its own, one pass, any size.
 *
 * json_next returns the tokens of one document in order and enforces the grammar between them; whatever comes out
 * before JSON_END is from a well-formed beginning.  Strings are decoded where they stand (so the text is overwritten)
 * and must be valid UTF-8 without NUL characters. */
#ifndef MOE4_IO_JSON_H
#define MOE4_IO_JSON_H

#include <stddef.h>
#include <stdint.h>

typedef enum json_token {
    JSON_ERROR, /* now and from now on: see error */
    JSON_END,
    JSON_OBJECT,
    JSON_OBJECT_END,
    JSON_ARRAY,
    JSON_ARRAY_END,
    JSON_KEY,
    JSON_STRING,
    JSON_NUMBER,
    JSON_TRUE,
    JSON_FALSE,
    JSON_NULL
} json_token;

enum { JSON_MAX_DEPTH = 64 };

typedef enum json_expect {
    JSON_EXPECT_VALUE,
    JSON_EXPECT_ELEMENT_OR_END, /* just after [ */
    JSON_EXPECT_KEY_OR_END,     /* just after { */
    JSON_EXPECT_SEPARATOR       /* just after a value */
} json_expect;

struct json_scanner {
    const char *text;
    char *at, *end;
    char *token; /* KEY and STRING: decoded and NUL-terminated.  NUMBER: where it starts, not terminated */
    size_t token_bytes;
    const char *error; /* what is wrong at `at`; NULL = nothing so far */
    uint64_t objects;  /* bit d: the container at depth d is an object */
    int depth;         /* open containers */
    json_expect expect;
};

/* Starts on n_bytes of text, which the scanner overwrites. */
struct json_scanner json_scan(char *text, size_t n_bytes);

json_token json_next(struct json_scanner *scanner);

/* Passes over the rest of a value whose first token was `first`.  Returns 0 on an error. */
int json_skip(struct json_scanner *scanner, json_token first);

/* A NUMBER's text as a non-negative integer.  Returns 0 for a sign, a fraction, an exponent or more than 63 bits. */
int json_integer(const char *token, size_t n_bytes, int64_t *value);

/* A NUMBER's text as a double, independent of the locale.  Exactly rounded for up to 15 digits and powers of ten up to
 * 22, within a few units in the last place beyond; below 1e-290 it may become 0. */
double json_double(const char *token, size_t n_bytes);

/* Length in bytes of the UTF-8 sequence at `at`, 1..4; 0 if it is not valid. */
size_t utf8_sequence(const char *at, const char *end);

#endif
