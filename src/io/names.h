/* A table from names to numbers: open addressing with a keyed hash, so that a hostile file cannot choose collisions. */
#ifndef MOE4_IO_NAMES_H
#define MOE4_IO_NAMES_H

#include <stdint.h>

#include "base/memory.h"

struct names {
    struct names_slot *slots; /* NULL until the first name */
    size_t capacity;          /* a power of two, at most half full */
    size_t count;
    uint64_t key;
};

enum { NAMES_NONE = -1, NAMES_NO_MEMORY = -2 };

/* Enters name with a value >= 0 and returns it; if the name is there already, changes nothing and returns its value.
 * NAMES_NO_MEMORY on failure.  The string is not copied. */
int64_t names_add(struct names *names, const moe4_allocator *allocator, const char *name, int64_t value);

/* The value of name, or NAMES_NONE. */
int64_t names_find(const struct names *names, const char *name);

void names_release(struct names *names, const moe4_allocator *allocator);

#endif
