/* Which instruction-set level a CPU offers, as a pure function of what CPUID and XGETBV say. */
#ifndef MOE4_CPU_ISA_H
#define MOE4_CPU_ISA_H

#include <stdint.h>

#include "moe4/moe4.h"

/* The registers that decide.  All zero on a CPU that is not x86. */
struct cpu_features {
    uint32_t max_leaf;    /* leaf 0 eax */
    uint32_t leaf1_ecx;   /* FMA, OSXSAVE, AVX, F16C */
    uint32_t leaf7_ebx;   /* AVX2, AVX-512 F DQ BW VL */
    uint32_t leaf7_1_eax; /* AVX-512 BF16; 0 when leaf 7 has no subleaf 1 */
    uint64_t xcr0;        /* register state that the operating system saves; 0 without OSXSAVE */
};

struct cpu_features isa_read_features(void);

/* The best level of a CPU with these features: never AUTO. */
moe4_isa isa_best(const struct cpu_features *features);

/* "c", "avx2", "avx512", "avx512_bf16"; "auto" for AUTO, NULL for what is no level. */
const char *isa_name(moe4_isa isa);

/* The CPU's own name into text, "unknown CPU" where it has none. */
void isa_cpu_name(char *text, size_t bytes);

#endif
