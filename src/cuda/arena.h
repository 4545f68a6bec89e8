/* Several arrays in one allocation: each gets an offset, a multiple of 256 bytes. */
#ifndef MOE4_CUDA_ARENA_H
#define MOE4_CUDA_ARENA_H

#include "base/checked.h"

struct arena {
    size_t total; /* SIZE_MAX once a size has wrapped */
};

static inline size_t arena_reserve(struct arena *arena, int64_t count, size_t item_bytes)
{
    size_t offset = arena->total, bytes;
    if (!size_multiply((size_t)count, item_bytes, &bytes) || !size_add(bytes, 255, &bytes) ||
        !size_add(offset, bytes / 256 * 256, &arena->total))
        arena->total = SIZE_MAX;
    return offset;
}

#endif
