#include "cpu/isa.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

enum {
    LEAF1_ECX_FMA = 1 << 12,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_F16C = 1 << 29,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512BW = 1 << 30,
    LEAF7_1_EAX_AVX512BF16 = 1 << 5,
    XCR0_YMM = 0x06, /* XMM and upper halves of YMM */
    XCR0_ZMM = 0xE6  /* + opmask, upper halves of ZMM 0-15, ZMM 16-31 */
};
#define LEAF7_EBX_AVX512VL (1u << 31)

moe4_isa isa_best(const struct cpu_features *f)
{
    const uint32_t avx2 = LEAF7_EBX_AVX2, fma = LEAF1_ECX_FMA | LEAF1_ECX_F16C;
    const uint32_t avx512 = LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL;

    if (f->max_leaf < 7 || !(f->leaf1_ecx & LEAF1_ECX_OSXSAVE)) return MOE4_ISA_C;
    if ((f->xcr0 & XCR0_YMM) != XCR0_YMM) return MOE4_ISA_C;
    if (!(f->leaf7_ebx & avx2) || (f->leaf1_ecx & fma) != fma) return MOE4_ISA_C;
    if ((f->xcr0 & XCR0_ZMM) != XCR0_ZMM || (f->leaf7_ebx & avx512) != avx512) return MOE4_ISA_AVX2;
    return f->leaf7_1_eax & LEAF7_1_EAX_AVX512BF16 ? MOE4_ISA_AVX512_BF16 : MOE4_ISA_AVX512;
}

const char *isa_name(moe4_isa isa)
{
    static const char *const names[] = {"auto", "c", "avx2", "avx512", "avx512_bf16"};
    return (unsigned)isa < sizeof names / sizeof *names ? names[isa] : NULL;
}

#if defined(__x86_64__)

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

struct cpu_features isa_read_features(void)
{
    struct cpu_features f = {0};
    uint32_t a, b, c, d;
    if (!__get_cpuid(0, &f.max_leaf, &b, &c, &d)) return f;
    if (__get_cpuid(1, &a, &b, &f.leaf1_ecx, &d) && f.leaf1_ecx & LEAF1_ECX_OSXSAVE) f.xcr0 = read_xcr0();
    uint32_t max_subleaf = 0;
    if (__get_cpuid_count(7, 0, &max_subleaf, &f.leaf7_ebx, &c, &d) && max_subleaf >= 1)
        __get_cpuid_count(7, 1, &f.leaf7_1_eax, &b, &c, &d);
    return f;
}

void isa_cpu_name(char *text, size_t bytes)
{
    uint32_t words[13] = {0}; /* 48 bytes of name and a terminator */
    for (uint32_t i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]))
            break;
    const char *name = (const char *)words;
    while (*name == ' ') name++;
    snprintf(text, bytes, "%s", *name ? name : "unknown CPU");
}

#else

struct cpu_features isa_read_features(void)
{
    return (struct cpu_features){0};
}

void isa_cpu_name(char *text, size_t bytes)
{
    snprintf(text, bytes, "unknown CPU");
}

#endif
