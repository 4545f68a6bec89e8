#include "io/storage.h"

#include <stdint.h>
#include <string.h>

#include "base/checked.h"

enum { FIRST_ITEMS = 16, FIRST_CHUNK_BYTES = 4096, LARGEST_CHUNK_BYTES = 1 << 20, ARENA_ALIGNMENT = 8 };

void *array_grow(const moe4_allocator *allocator, void *items, size_t *capacity, size_t count, size_t item_bytes)
{
    if (count < *capacity) return items;
    size_t grown = *capacity ? *capacity : FIRST_ITEMS / 2, bytes;
    if (!size_multiply(grown, 2, &grown) || !size_multiply(grown, item_bytes, &bytes)) return NULL;
    void *moved = memory_allocate(allocator, bytes);
    if (!moved) return NULL;
    if (count) memcpy(moved, items, count * item_bytes);
    array_release(allocator, items, *capacity, item_bytes);
    *capacity = grown;
    return moved;
}

void array_release(const moe4_allocator *allocator, void *items, size_t capacity, size_t item_bytes)
{
    memory_release(allocator, items, capacity * item_bytes);
}

struct arena_chunk {
    struct arena_chunk *next;
    size_t bytes; /* of data[] */
    size_t used;
    unsigned char data[];
};

/* A new chunk in front, twice as large as the last one and at least n_bytes large. */
static struct arena_chunk *chunk_add(struct arena *arena, const moe4_allocator *allocator, size_t n_bytes)
{
    size_t bytes = FIRST_CHUNK_BYTES, total;
    if (arena->chunks) bytes = 2 * arena->chunks->bytes;
    if (bytes > LARGEST_CHUNK_BYTES) bytes = LARGEST_CHUNK_BYTES;
    if (bytes < n_bytes) bytes = n_bytes;
    if (!size_add(bytes, sizeof(struct arena_chunk), &total)) return NULL;
    struct arena_chunk *chunk = memory_allocate(allocator, total);
    if (!chunk) return NULL;
    *chunk = (struct arena_chunk){arena->chunks, bytes, 0};
    arena->chunks = chunk;
    return chunk;
}

void *arena_allocate(struct arena *arena, const moe4_allocator *allocator, size_t bytes)
{
    size_t padded;
    if (!size_add(bytes, ARENA_ALIGNMENT - 1, &padded)) return NULL;
    padded = padded / ARENA_ALIGNMENT * ARENA_ALIGNMENT;
    struct arena_chunk *chunk = arena->chunks;
    if (!chunk || chunk->bytes - chunk->used < padded) chunk = chunk_add(arena, allocator, padded);
    if (!chunk) return NULL;
    void *memory = chunk->data + chunk->used;
    chunk->used += padded;
    return memory;
}

char *arena_copy(struct arena *arena, const moe4_allocator *allocator, const char *text, size_t n_bytes)
{
    char *copy = arena_allocate(arena, allocator, n_bytes + 1);
    if (!copy) return NULL;
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    return copy;
}

void arena_release(struct arena *arena, const moe4_allocator *allocator)
{
    while (arena->chunks) {
        struct arena_chunk *chunk = arena->chunks;
        arena->chunks = chunk->next;
        memory_release(allocator, chunk, chunk->bytes + sizeof *chunk);
    }
}
