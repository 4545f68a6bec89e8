#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"

enum { ALIGNMENT = 64 };

static void *default_allocate(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    size_t padded;
    if (!size_add(bytes, alignment - 1, &padded)) return NULL;
    return aligned_alloc(alignment, padded / alignment * alignment);
}

static void default_release(void *user, void *memory, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(memory);
}

moe4_allocator memory_default_allocator(void)
{
    return (moe4_allocator){default_allocate, default_release, NULL};
}

void *memory_allocate(const moe4_allocator *allocator, size_t bytes)
{
    return allocator->allocate(allocator->user, bytes ? bytes : 1, ALIGNMENT);
}

void *memory_allocate_zeroed(const moe4_allocator *allocator, size_t bytes)
{
    void *memory = memory_allocate(allocator, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

void memory_release(const moe4_allocator *allocator, void *memory, size_t bytes)
{
    if (memory) allocator->release(allocator->user, memory, bytes ? bytes : 1);
}
