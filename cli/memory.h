/* Memory of the command. */
#ifndef MOE4_CLI_MEMORY_H
#define MOE4_CLI_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* Zeroed memory for count elements, 256-byte aligned as the library wants its workspace; a count of 0 gives memory
 * too.  `memory` is the address of a pointer of any type, NULL after a failure, which says what it was for.  Freed with
 * free(). */
int allocate(void *memory, int64_t count, size_t element_bytes, const char *what);

/* Bytes that can still be had, by the kernel's and the cgroup's account. */
int64_t memory_available(void);

#endif
