/* A small JSON document as a tree, for configuration files. */
#ifndef MOE4_IO_JSON_TREE_H
#define MOE4_IO_JSON_TREE_H

#include "io/json.h"
#include "io/storage.h"

struct json_value {
    json_token type;  /* OBJECT, ARRAY, STRING, NUMBER, TRUE, FALSE or NULL */
    const char *key;  /* in an object; else NULL */
    const char *text; /* STRING: NUL-terminated.  NUMBER: n_bytes characters */
    size_t n_bytes;
    struct json_value *child; /* OBJECT, ARRAY: the first member */
    struct json_value *next;  /* the next member of the same container */
};

/* Builds the tree of n_bytes of text, which it overwrites and points into; nodes come from the arena.  An object that
 * has a key twice is an error.  MOE4_OK; MOE4_ENOMEM; MOE4_EFORMAT with what is wrong and where. */
moe4_status json_tree(struct arena *arena, const moe4_allocator *allocator, char *text, size_t n_bytes,
                      struct json_value **root, const char **error, size_t *error_at);

/* The member of an object whose key is these n_bytes; NULL if there is none or the value is no object.  object may be
 * NULL. */
const struct json_value *json_member(const struct json_value *object, const char *key, size_t n_bytes);

#endif
