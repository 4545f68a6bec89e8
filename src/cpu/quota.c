#include "cpu/quota.h"

#include <stdio.h>
#include <string.h>

enum { MAX_PATH = 1024 };

/* One number that a file begins with; 0 if there is none. */
static int read_number(const char *directory, const char *name, long long *number)
{
    char path[MAX_PATH + 64];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    int n = fscanf(file, "%lld", number);
    fclose(file);
    return n == 1;
}

/* Both numbers of version 2's file; 0 if there are none: "max 100000". */
static int read_pair(const char *directory, long long *quota, long long *period)
{
    char path[MAX_PATH + 64];
    snprintf(path, sizeof path, "%s/cpu.max", directory);
    FILE *file = fopen(path, "re");
    if (!file) return 0;
    int n = fscanf(file, "%lld %lld", quota, period);
    fclose(file);
    return n == 2;
}

static int32_t group_cpus(const char *directory)
{
    long long quota, period;
    if (!read_pair(directory, &quota, &period) &&
        !(read_number(directory, "cpu.cfs_quota_us", &quota) && read_number(directory, "cpu.cfs_period_us", &period)))
        return INT32_MAX;
    if (quota <= 0 || period <= 0 || quota / period >= INT32_MAX) return INT32_MAX;
    return (int32_t)(quota / period + (quota % period > 0));
}

/* The least of a group and those around it, up to where its hierarchy is mounted.  A group that cannot be seen from
 * here, as in a container, counts as the outermost that can. */
static int32_t hierarchy_cpus(const char *root, const char *mount, const char *group)
{
    char directory[MAX_PATH];
    int32_t least = INT32_MAX;
    int mount_length = snprintf(directory, sizeof directory, "%s%s", root, mount);
    int length = snprintf(directory, sizeof directory, "%s%s%s", root, mount, group);
    if (length >= (int)sizeof directory) directory[mount_length] = '\0';
    for (;;) {
        int32_t cpus = group_cpus(directory);
        if (cpus < least) least = cpus;
        char *slash = strrchr(directory, '/');
        if (!slash || slash - directory < mount_length) return least;
        *slash = '\0';
    }
}

static int has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || at[n] == '\0')) return 1;
    return 0;
}

/* A line of /proc/self/cgroup: "4:cpu,cpuacct:/group" of version 1, "0::/group" of version 2. */
static int32_t line_cpus(const char *root, char *line)
{
    static const char *const mounts[][2] = {{"/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"},
                                            {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}};
    int32_t least = INT32_MAX;
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) return least;
    *group++ = '\0';
    controllers++;
    group[strcspn(group, "\n")] = '\0';
    if (controllers[0] && !has_word(controllers, "cpu")) return least;
    for (int i = 0; i < 2; i++) {
        int32_t cpus = hierarchy_cpus(root, mounts[!controllers[0]][i], group);
        if (cpus < least) least = cpus;
    }
    return least;
}

int32_t quota_cpus(const char *root)
{
    char line[MAX_PATH + 64];
    int32_t least = INT32_MAX;
    snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
    FILE *file = fopen(line, "re");
    if (!file) return least;
    while (fgets(line, sizeof line, file)) {
        int32_t cpus = line_cpus(root, line);
        if (cpus < least) least = cpus;
    }
    fclose(file);
    return least;
}
