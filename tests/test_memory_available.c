/* What memory control groups leave to the command, in made-up trees of both versions. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "made_tree.h"
#include "memory.h"

static void test_no_groups(void **state)
{
    (void)state;
    assert_int_equal(memory_available(made_root), INT64_MAX);
    put("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n");
    assert_int_equal(memory_available(made_root), 8000 * 1024);
}

static void test_version_2(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 8000 kB\n");
    put("/proc/self/cgroup", "0::/outer/inner\n");
    put("/sys/fs/cgroup/outer/inner/memory.max", "max\n");
    put("/sys/fs/cgroup/outer/inner/memory.current", "5000\n");
    assert_int_equal(memory_available(made_root), 8000 * 1024);
    put("/sys/fs/cgroup/outer/memory.max", "70000\n");
    put("/sys/fs/cgroup/outer/memory.current", "50000\n");
    put("/sys/fs/cgroup/outer/memory.stat", "anon 40000\ninactive_file 3000\n");
    assert_int_equal(memory_available(made_root), 23000);
    put("/proc/self/cgroup", "0::/seen/only/from/outside\n");
    put("/sys/fs/cgroup/memory.max", "60000\n");
    put("/sys/fs/cgroup/memory.current", "61000\n");
    assert_int_equal(memory_available(made_root), 0);
}

static void test_version_1(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable: 8000 kB\n");
    put("/proc/self/cgroup", "4:memory:/g/h\n1:cpu:/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "123456\n");
    assert_int_equal(memory_available(made_root), 8000 * 1024);
    put("/sys/fs/cgroup/memory/g/h/memory.limit_in_bytes", "40000\n");
    put("/sys/fs/cgroup/memory/g/h/memory.usage_in_bytes", "30000\n");
    put("/sys/fs/cgroup/memory/g/h/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n");
    assert_int_equal(memory_available(made_root), 10500);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_no_groups, made_tree_clear),
        cmocka_unit_test_teardown(test_version_2, made_tree_clear),
        cmocka_unit_test_teardown(test_version_1, made_tree_clear),
    };
    return cmocka_run_group_tests(tests, made_tree_create, made_tree_remove);
}
