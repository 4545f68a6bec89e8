/* Memory of the io objects: an array that grows and an arena for strings and nodes that die together. */
#ifndef MOE4_IO_STORAGE_H
#define MOE4_IO_STORAGE_H

#include <stddef.h>

#include "base/memory.h"

/* Makes room for one item more than `count`: returns items, moved to twice the memory when *capacity is reached.
 * NULL on failure, with the old array as it was. */
void *array_grow(const moe4_allocator *allocator, void *items, size_t *capacity, size_t count, size_t item_bytes);
void array_release(const moe4_allocator *allocator, void *items, size_t capacity, size_t item_bytes);

struct arena {
    struct arena_chunk *chunks; /* the newest first; NULL = empty */
};

/* Aligned for any type of at most 8 bytes; NULL on failure. */
void *arena_allocate(struct arena *arena, const moe4_allocator *allocator, size_t bytes);
/* A NUL-terminated copy of n_bytes characters; NULL on failure. */
char *arena_copy(struct arena *arena, const moe4_allocator *allocator, const char *text, size_t n_bytes);
void arena_release(struct arena *arena, const moe4_allocator *allocator);

#endif
