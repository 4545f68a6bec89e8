#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "message.h"

int allocate(void *memory, int64_t count, size_t element_bytes, const char *what)
{
    size_t bytes = 0;
    void *block = NULL;
    if (!__builtin_mul_overflow(count ? count : 1, element_bytes, &bytes) && bytes <= SIZE_MAX - 256)
        block = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memcpy(memory, &block, sizeof block);
    if (!block) return fail("out of memory: %lld x %zu bytes for %s", (long long)count, element_bytes, what);
    memset(block, 0, bytes);
    return EXIT_OK;
}

/* The number after `label` in a file (the first one for an empty label); -1 if there is none. */
static int64_t number_in_file(const char *path, const char *label)
{
    char text[256];
    long long number = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (number < 0 && fgets(text, sizeof text, file))
        if (!strncmp(text, label, strlen(label)) && sscanf(text + strlen(label), "%lld", &number) != 1) number = -1;
    fclose(file);
    return number;
}

static void *record_allocate(void *user, size_t bytes, size_t alignment)
{
    struct memory_record *record = user;
    if (bytes > SIZE_MAX - alignment) return NULL;
    void *block = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (block && bytes > record->n_bytes) *record = (struct memory_record){block, bytes};
    return block;
}

static void record_release(void *user, void *memory, size_t bytes)
{
    struct memory_record *record = user;
    (void)bytes;
    if (memory == record->block) *record = (struct memory_record){NULL, 0};
    free(memory);
}

moe4_allocator memory_recorder(struct memory_record *record)
{
    *record = (struct memory_record){NULL, 0};
    return (moe4_allocator){record_allocate, record_release, record};
}

int64_t memory_available(void)
{
    int64_t kilobytes = number_in_file("/proc/meminfo", "MemAvailable:");
    int64_t available = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    int64_t limit = number_in_file("/sys/fs/cgroup/memory.max", "");
    int64_t used = number_in_file("/sys/fs/cgroup/memory.current", "");
    int64_t cache = number_in_file("/sys/fs/cgroup/memory.stat", "inactive_file");
    if (limit >= 0 && used >= 0) {
        int64_t left = limit - used + (cache > 0 ? cache : 0);
        if (left < available) available = left;
    }
    return available > 0 ? available : 0;
}
