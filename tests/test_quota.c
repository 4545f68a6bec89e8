/* CPU quotas of control groups, in made-up trees of both versions. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/quota.h"
#include "made_tree.h"

static void test_no_quota(void **state)
{
    (void)state;
    assert_int_equal(quota_cpus(made_root), INT32_MAX); /* no /proc */
    put("/proc/self/cgroup", "0::/\n");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
    put("/sys/fs/cgroup/cpu.max", "nonsense");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
}

static void test_version_2(void **state)
{
    put("/proc/self/cgroup", "0::/outer/inner\n");
    put("/sys/fs/cgroup/outer/inner/cpu.max", "450000 100000\n");
    assert_int_equal(quota_cpus(made_root), 5); /* rounded up */
    put("/sys/fs/cgroup/outer/cpu.max", "200000 100000\n");
    assert_int_equal(quota_cpus(made_root), 2);
    put("/sys/fs/cgroup/cpu.max", "1000 100000\n");
    assert_int_equal(quota_cpus(made_root), 1);
    assert_int_equal(made_tree_clear(state), 0);
    put("/proc/self/cgroup", "0::/seen/only/from/outside\n");
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    assert_int_equal(quota_cpus(made_root), 3);
    assert_int_equal(made_tree_clear(state), 0);
    put("/proc/self/cgroup", "9:pids:/\n0::/g\n"); /* both versions mounted */
    put("/sys/fs/cgroup/unified/g/cpu.max", "700000 100000\n");
    assert_int_equal(quota_cpus(made_root), 7);
}

static void test_version_1(void **state)
{
    (void)state;
    put("/proc/self/cgroup", "12:cpuset:/g\n4:cpu,cpuacct:/g/h\n1:name=systemd:/g\n");
    put("/sys/fs/cgroup/cpuset/g/cpu.cfs_quota_us", "100000\n"); /* not where quotas are */
    put("/sys/fs/cgroup/cpuset/g/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_quota_us", "150000\n");
    assert_int_equal(quota_cpus(made_root), 2);
    put("/sys/fs/cgroup/cpu/g/cpu.cfs_quota_us", "50000\n");
    put("/sys/fs/cgroup/cpu/g/cpu.cfs_period_us", "50000\n");
    assert_int_equal(quota_cpus(made_root), 1);
}

static void test_lines_that_are_none(void **state)
{
    (void)state;
    char line[3000];
    memset(line, 'x', sizeof line);
    memcpy(line, "0::/", 4);
    line[sizeof line - 1] = '\0';
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    put("/proc/self/cgroup", line); /* longer than a path may be: the mount counts */
    assert_int_equal(quota_cpus(made_root), 3);
    put("/proc/self/cgroup", "\n:\nno colon\n7:cpu\n");
    assert_int_equal(quota_cpus(made_root), INT32_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_no_quota, made_tree_clear),
        cmocka_unit_test_teardown(test_version_2, made_tree_clear),
        cmocka_unit_test_teardown(test_version_1, made_tree_clear),
        cmocka_unit_test_teardown(test_lines_that_are_none, made_tree_clear),
    };
    return cmocka_run_group_tests(tests, made_tree_create, made_tree_remove);
}
