/* Memory from a moe4_allocator.  Every size is given back on release. */
#ifndef MOE4_BASE_MEMORY_H
#define MOE4_BASE_MEMORY_H

#include "moe4/moe4.h"

/* The allocator used when the caller brings none: aligned_alloc and free. */
moe4_allocator memory_default_allocator(void);

/* 64-byte aligned; NULL on failure.  0 bytes are rounded up to 1. */
void *memory_allocate(const moe4_allocator *allocator, size_t bytes);
void *memory_allocate_zeroed(const moe4_allocator *allocator, size_t bytes);

/* NULL is fine. */
void memory_release(const moe4_allocator *allocator, void *memory, size_t bytes);

#endif
