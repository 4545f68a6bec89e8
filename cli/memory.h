/* Memory of the command. */
#ifndef MOE4_CLI_MEMORY_H
#define MOE4_CLI_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"

/* Zeroed memory for count elements, 256-byte aligned as the library wants its workspace; a count of 0 gives memory
 * too.  `memory` is the address of a pointer of any type, NULL after a failure, which says what it was for.  Freed with
 * free(). */
int allocate(void *memory, int64_t count, size_t element_bytes, const char *what);

/* The largest block that a library context holds: a layer's weights. */
struct memory_record {
    void *block;
    size_t n_bytes;
};

/* An allocator that keeps the record. */
moe4_allocator memory_recorder(struct memory_record *record);

/* Bytes that can still be had, by the kernel's account and that of all control groups around the process, version 1 or
 * 2.  root: what stands before /proc and /sys, "" but for tests. */
int64_t memory_available(const char *root);

#endif
