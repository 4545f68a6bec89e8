/* What this machine can do at best, measured here and now: read bandwidth, multiply-accumulate rate and clock. */
#ifndef MOE4_CLI_PROBE_H
#define MOE4_CLI_PROBE_H

#include "memory.h"
#include "moe4/moe4.h"

struct probe_result {
    double bandwidth_gbs;    /* the best of {1, 8} streams a thread x {with, without} software prefetch */
    double rate_gflops;      /* 2 FLOP a multiply-accumulate, of integers in int8 compute */
    const char *instruction; /* that the rate was measured with */
    double clock_ghz;        /* of one thread; 0 where it cannot be measured */
    double rate_per_clock;   /* instructions a clock and thread; 0 where unknown */
};

struct probe;

/* Prepares to measure with n_threads threads, pinned where there is a CPU for each and no more, for a layer of
 * weight_bytes.  Reads the weights themselves where they are known and 256 MiB or more, since pages of a virtual
 * machine differ in how fast they are; else, or where there are several memories, a buffer of its own that is four
 * times as large as the layer, but 1 GiB at most.  Both are far more than any cache. */
int probe_open(int32_t n_threads, int64_t weight_bytes, const struct memory_record *weights, struct probe **probe);
void probe_close(struct probe *probe);

/* Each takes a fraction of a second, and raises what is in *best if it finds better. */
void probe_bandwidth(struct probe *probe, struct probe_result *best);
void probe_rate(struct probe *probe, moe4_isa isa, moe4_compute compute, struct probe_result *best);

#endif
