/* Chains of the best multiply-accumulate instruction of one ISA level; a file a level, compiled with its flags. */
#ifndef MOE4_CLI_PROBE_KERNEL_H
#define MOE4_CLI_PROBE_KERNEL_H

#include "moe4/moe4.h"

struct probe_kernel {
    const char *instruction;
    moe4_isa isa;
    moe4_compute compute;        /* INT8, or any other */
    int32_t flops;               /* of one instruction */
    int32_t chains;              /* independent instructions a round: enough to hide their latency */
    int32_t counts_instructions; /* 0 = the compiler chose them */
    void (*run)(int64_t rounds); /* at least 1 */
};

extern const struct probe_kernel probe_kernel_c;
#if defined(__x86_64__)
extern const struct probe_kernel probe_kernel_avx2, probe_kernel_avx512, probe_kernel_avx512_vnni,
    probe_kernel_avx512_bf16, probe_kernel_amx, probe_kernel_int8_avx2, probe_kernel_int8_avx512_vnni;
#elif defined(__aarch64__)
extern const struct probe_kernel probe_kernel_neon, probe_kernel_neon_bf16;
#endif

#endif
