/* CPU quotas of control groups, in made-up trees of both versions. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "cpu/quota.h"

static char root[] = "/tmp/moe4_quota_XXXXXX";

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

static void clear(void)
{
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s/*", root);
    assert_int_equal(system(command), 0);
}

static void test_no_quota(void **state)
{
    (void)state;
    assert_int_equal(quota_cpus(root), INT32_MAX); /* no /proc */
    put("/proc/self/cgroup", "0::/\n");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    put("/sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    put("/sys/fs/cgroup/cpu.max", "nonsense");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    clear();
}

static void test_version_2(void **state)
{
    (void)state;
    put("/proc/self/cgroup", "0::/outer/inner\n");
    put("/sys/fs/cgroup/outer/inner/cpu.max", "450000 100000\n");
    assert_int_equal(quota_cpus(root), 5); /* rounded up */
    put("/sys/fs/cgroup/outer/cpu.max", "200000 100000\n");
    assert_int_equal(quota_cpus(root), 2);
    put("/sys/fs/cgroup/cpu.max", "1000 100000\n");
    assert_int_equal(quota_cpus(root), 1);
    clear();
    put("/proc/self/cgroup", "0::/seen/only/from/outside\n");
    put("/sys/fs/cgroup/cpu.max", "300000 100000\n");
    assert_int_equal(quota_cpus(root), 3);
    clear();
    put("/proc/self/cgroup", "9:pids:/\n0::/g\n"); /* both versions mounted */
    put("/sys/fs/cgroup/unified/g/cpu.max", "700000 100000\n");
    assert_int_equal(quota_cpus(root), 7);
    clear();
}

static void test_version_1(void **state)
{
    (void)state;
    put("/proc/self/cgroup", "12:cpuset:/g\n4:cpu,cpuacct:/g/h\n1:name=systemd:/g\n");
    put("/sys/fs/cgroup/cpuset/g/cpu.cfs_quota_us", "100000\n"); /* not where quotas are */
    put("/sys/fs/cgroup/cpuset/g/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_period_us", "100000\n");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    put("/sys/fs/cgroup/cpu,cpuacct/g/h/cpu.cfs_quota_us", "150000\n");
    assert_int_equal(quota_cpus(root), 2);
    put("/sys/fs/cgroup/cpu/g/cpu.cfs_quota_us", "50000\n");
    put("/sys/fs/cgroup/cpu/g/cpu.cfs_period_us", "50000\n");
    assert_int_equal(quota_cpus(root), 1);
    clear();
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
    assert_int_equal(quota_cpus(root), 3);
    put("/proc/self/cgroup", "\n:\nno colon\n7:cpu\n");
    assert_int_equal(quota_cpus(root), INT32_MAX);
    clear();
}

static int make_root(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
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
        cmocka_unit_test(test_no_quota),
        cmocka_unit_test(test_version_2),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_lines_that_are_none),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
