/* The instruction-set levels of the CPU backend: which includes which, and which a CPU offers, as a pure function of
 * what the CPU and its operating system say. */
#ifndef MOE4_CPU_ISA_H
#define MOE4_CPU_ISA_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"

/* The words that decide.  Those of another architecture are zero. */
struct cpu_features {
    uint32_t max_leaf;    /* CPUID leaf 0 eax */
    uint32_t leaf1_ecx;   /* FMA, OSXSAVE, AVX, F16C */
    uint32_t leaf7_ebx;   /* AVX2, AVX-512 F DQ BW VL */
    uint32_t leaf7_ecx;   /* AVX-512 VNNI */
    uint32_t leaf7_edx;   /* AMX tiles, AMX BF16 */
    uint32_t leaf7_1_eax; /* AVX-512 BF16; 0 when leaf 7 has no subleaf 1 */
    uint64_t xcr0;        /* register state that the operating system saves; 0 without OSXSAVE */
    uint64_t hwcap;       /* aarch64: AT_HWCAP and AT_HWCAP2 of Linux's auxiliary vector */
    uint64_t hwcap2;
    uint32_t leaf0_ebx; /* who made it */
};

/* The state that a system which saves it gives to everybody; the rest isa_enable asks for. */
#define ISA_XCR0_ALWAYS UINT64_C(0xFFFF)

struct cpu_features isa_read_features(void);

/* Whether a CPU with these features has a level (not AUTO). */
int isa_is_offered(const struct cpu_features *features, moe4_isa isa);

/* What AUTO stands for on such a CPU: its highest level that is not known to be slower than one below it. */
moe4_isa isa_best(const struct cpu_features *features);

/* Whether what is made for level `part` runs at level `isa`: it is that level, or one below it in the same family. */
int isa_includes(moe4_isa isa, moe4_isa part);

/* Asks the operating system for what an offered level needs beyond its instructions.  0 = refused. */
int isa_enable(moe4_isa isa);

/* "c", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "neon_bf16"; "auto" for AUTO, NULL for what is
 * none. */
const char *isa_name(moe4_isa isa);

/* The CPU's own name into text, "unknown CPU" where it has none. */
void isa_cpu_name(char *text, size_t bytes);

#endif
