/* Where a verb runs the library: this machine's CPU, or its GPU. */
#ifndef MOE4_CLI_MACHINE_H
#define MOE4_CLI_MACHINE_H

#include "gpu.h"
#include "moe4/moe4.h"

/* What the command line says of it; isa and threads are the CPU's. */
struct machine_choice {
    moe4_device device;
    int isa;                         /* moe4_isa */
    int64_t n_threads;               /* 0 = as many as the process may use */
    const char *tuning;              /* a file of moe4 tune; NULL = none */
    const moe4_allocator *allocator; /* NULL = the library's own */
};

struct machine {
    moe4_context *context;
    moe4_context_info info;
    struct gpu *gpu;        /* NULL = the CPU */
    int32_t n_host_threads; /* for what the command itself computes: the oracle, synthetic weights */
    int32_t n_busy_threads; /* the context's that are at work at a time: there may be more than CPUs */
};

/* Opens it; on failure says why.  machine_close is right either way. */
int machine_open(const struct machine_choice *choice, struct machine *machine);
void machine_close(struct machine *machine);

/* "cpu" or "cuda" */
const char *machine_word(const struct machine *machine);

/* "AMD EPYC, avx512_bf16, 8 threads" or "NVIDIA H200, sm_90a, 132 multiprocessors" */
struct machine_text {
    char text[160];
};
struct machine_text machine_show(const struct machine *machine);

#endif
