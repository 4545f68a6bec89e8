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

/* ---- What can still be had ----------------------------------------------------------------------------------------
 */

enum { MAX_PATH = 1024 };

/* Where control groups of a version are mounted, and what they call things. */
struct groups {
    const char *mount, *limit, *used, *cache;
};

/* What a group may still take, pages of files that it could do without included; INT64_MAX where there is no limit. */
static int64_t group_left(const struct groups *groups, const char *directory)
{
    char path[MAX_PATH + 64];
    snprintf(path, sizeof path, "%s/%s", directory, groups->limit);
    const int64_t limit = number_in_file(path, "");
    snprintf(path, sizeof path, "%s/%s", directory, groups->used);
    const int64_t used = number_in_file(path, "");
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    const int64_t cache = number_in_file(path, groups->cache);
    return limit < 0 || used < 0 ? INT64_MAX : limit - used + (cache > 0 ? cache : 0);
}

/* The least of a group and those around it.  One that cannot be seen from here, as in a container, counts as the
 * outermost that can. */
static int64_t hierarchy_left(const struct groups *groups, const char *root, const char *group)
{
    char directory[MAX_PATH];
    int64_t least = INT64_MAX;
    const int mount_length = snprintf(directory, sizeof directory, "%s%s", root, groups->mount);
    if (snprintf(directory, sizeof directory, "%s%s%s", root, groups->mount, group) >= MAX_PATH)
        directory[mount_length] = '\0';
    for (;;) {
        int64_t left = group_left(groups, directory);
        if (left < least) least = left;
        char *slash = strrchr(directory, '/');
        if (!slash || slash - directory < mount_length) return least;
        *slash = '\0';
    }
}

/* A line of /proc/self/cgroup: "4:memory:/group" of version 1, "0::/group" of version 2. */
static int64_t line_left(const char *root, char *line)
{
    static const struct groups first = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                        "total_inactive_file"};
    static const struct groups second = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) return INT64_MAX;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    if (!controllers[1]) return hierarchy_left(&second, root, group);
    return strcmp(controllers + 1, "memory") ? INT64_MAX : hierarchy_left(&first, root, group);
}

int64_t memory_available(const char *root)
{
    char line[MAX_PATH + 64];
    snprintf(line, sizeof line, "%s/proc/meminfo", root);
    const int64_t kilobytes = number_in_file(line, "MemAvailable:");
    int64_t available = kilobytes < 0 ? INT64_MAX : kilobytes * 1024;
    snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "r");
    while (file && fgets(line, sizeof line, file)) {
        int64_t left = line_left(root, line);
        if (left < available) available = left;
    }
    if (file) fclose(file);
    return available > 0 ? available : 0;
}
