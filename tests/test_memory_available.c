/* What memory control groups leave to the command, in made-up trees of both versions. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "memory.h"

static char root[] = "/tmp/moe4_memory_XXXXXX";

/* A file under root, with the folders around it. */
static void put(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + sizeof root; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(full, 0755);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static int make_root(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
}

static int clear(void **state)
{
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s/*", root);
    return system(command);
}

static void test_no_groups(void **state)
{
    (void)state;
    assert_int_equal(memory_available(root), INT64_MAX);
    put("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n");
    assert_int_equal(memory_available(root), 8000 * 1024);
}

static void test_version_2(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 8000 kB\n");
    put("/proc/self/cgroup", "0::/outer/inner\n");
    put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    put("/sys/fs/cgroup/outer/inner/memory.current", "5000\n");
    assert_int_equal(memory_available(root), 8000 * 1024);
    put("/sys/fs/cgroup/outer/memory.max", "70000\n");
    put("/sys/fs/cgroup/outer/memory.current", "50000\n");
    put("/sys/fs/cgroup/outer/memory.stat", "anon 40000\ninactive_file 3000\n");
    assert_int_equal(memory_available(root), 23000);
    put("/proc/self/cgroup", "0::/seen/only/from/outside\n");
    put("/sys/fs/cgroup/memory.max", "60000\n");
    put("/sys/fs/cgroup/memory.current", "61000\n");
    assert_int_equal(memory_available(root), 0);
}

static void test_version_1(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 8000 kB\n");
    put("/proc/self/cgroup", "4:memory:/g/h\n1:cpu:/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123456\n");
    assert_int_equal(memory_available(root), 8000 * 1024);
    put("/sys/fs/cgroup/memory/g/h/memory.limit_in_bytes", "40000\n");
    put("/sys/fs/cgroup/memory/g/h/memory.usage_in_bytes", "30000\n");
    put("/sys/fs/cgroup/memory/g/h/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
    assert_int_equal(memory_available(root), 10500);
}

static int remove_root(void **state)
{
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_no_groups, clear),
        cmocka_unit_test_teardown(test_version_2, clear),
        cmocka_unit_test_teardown(test_version_1, clear),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
