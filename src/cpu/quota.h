/* How many CPUs control groups let this process keep busy. */
#ifndef MOE4_CPU_QUOTA_H
#define MOE4_CPU_QUOTA_H

#include <stdint.h>

/* The least quota of the process's group and those around it, of version 1 or 2, in whole CPUs (rounded up, so at least
 * 1); INT32_MAX where there is none.  root: what stands before /proc and /sys, "" but for tests. */
int32_t quota_cpus(const char *root);

#endif
