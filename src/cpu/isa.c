#include "cpu/isa.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

enum {
    LEAF0_EBX_INTEL = 0x756E6547, /* "Genu", of "GenuineIntel" */
    LEAF1_ECX_FMA = 1 << 12,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_F16C = 1 << 29,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512BW = 1 << 30,
    LEAF7_ECX_AVX512VNNI = 1 << 11,
    LEAF7_EDX_AMX_BF16 = 1 << 22,
    LEAF7_EDX_AMX_TILE = 1 << 24,
    LEAF7_1_EAX_AVX512BF16 = 1 << 5,
    XCR0_YMM = 0x06,        /* XMM and upper halves of YMM */
    XCR0_ZMM = 0xE6,        /* + opmask, upper halves of ZMM 0-15, ZMM 16-31 */
    XCR0_TILES = 3 << 17,   /* tile configuration and tile data */
    AARCH64_ASIMD = 1 << 1, /* AT_HWCAP */
    AARCH64_CPUID = 1 << 11,
    AARCH64_BF16 = 1 << 14 /* AT_HWCAP2 */
};
#define LEAF7_EBX_AVX512VL (1u << 31)

/* A level needs of the CPU what is said here and all that the level below it needs.  A family is a chain of levels that
 * ends in C, which needs nothing. */
static const struct level {
    const char *name;
    moe4_isa below;   /* 0 = none */
    uint32_t slow_on; /* whose CPUs AUTO does not mean it on: they are faster at the level below it */
    struct cpu_features needs;
} levels[] = {
    [MOE4_ISA_AUTO] = {.name = "auto"},
    [MOE4_ISA_C] = {.name = "c"},
    [MOE4_ISA_AVX2] = {.name = "avx2",
                       .below = MOE4_ISA_C,
                       .needs = {.max_leaf = 7,
                                 .leaf1_ecx = LEAF1_ECX_FMA | LEAF1_ECX_OSXSAVE | LEAF1_ECX_F16C,
                                 .leaf7_ebx = LEAF7_EBX_AVX2,
                                 .xcr0 = XCR0_YMM}},
    [MOE4_ISA_AVX512] = {.name = "avx512",
                         .below = MOE4_ISA_AVX2,
                         .needs = {.leaf7_ebx =
                                       LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL,
                                   .xcr0 = XCR0_ZMM}},
    [MOE4_ISA_AVX512_VNNI] = {.name = "avx512_vnni",
                              .below = MOE4_ISA_AVX512,
                              .needs = {.leaf7_ecx = LEAF7_ECX_AVX512VNNI}},
    [MOE4_ISA_AVX512_BF16] = {.name = "avx512_bf16",
                              .below = MOE4_ISA_AVX512_VNNI,
                              .slow_on = LEAF0_EBX_INTEL, /* vdpbf16ps takes four times as long as an fma */
                              .needs = {.leaf7_1_eax = LEAF7_1_EAX_AVX512BF16}},
    [MOE4_ISA_AMX] = {.name = "amx",
                      .below = MOE4_ISA_AVX512_BF16,
                      .needs = {.leaf7_edx = LEAF7_EDX_AMX_BF16 | LEAF7_EDX_AMX_TILE, .xcr0 = XCR0_TILES}},
    [MOE4_ISA_NEON] = {.name = "neon", .below = MOE4_ISA_C, .needs = {.hwcap = AARCH64_ASIMD}},
    [MOE4_ISA_NEON_BF16] = {.name = "neon_bf16", .below = MOE4_ISA_NEON, .needs = {.hwcap2 = AARCH64_BF16}},
};

const char *isa_name(moe4_isa isa)
{
    return (unsigned)isa < sizeof levels / sizeof *levels ? levels[isa].name : NULL;
}

static int has(const struct cpu_features *f, const struct cpu_features *needs)
{
    return f->max_leaf >= needs->max_leaf && !(needs->leaf1_ecx & ~f->leaf1_ecx) &&
           !(needs->leaf7_ebx & ~f->leaf7_ebx) && !(needs->leaf7_ecx & ~f->leaf7_ecx) &&
           !(needs->leaf7_edx & ~f->leaf7_edx) && !(needs->leaf7_1_eax & ~f->leaf7_1_eax) &&
           !(needs->xcr0 & ~f->xcr0) && !(needs->hwcap & ~f->hwcap) && !(needs->hwcap2 & ~f->hwcap2);
}

int isa_is_offered(const struct cpu_features *features, moe4_isa isa)
{
    while (isa && has(features, &levels[isa].needs)) isa = levels[isa].below;
    return !isa;
}

int isa_includes(moe4_isa isa, moe4_isa part)
{
    while (isa && isa != part) isa = levels[isa].below;
    return isa == part;
}

moe4_isa isa_best(const struct cpu_features *features)
{
    moe4_isa best = MOE4_ISA_C;
    for (moe4_isa isa = MOE4_ISA_C; isa_name(isa); isa++)
        if (isa_is_offered(features, isa) && isa_includes(isa, best) &&
            (!levels[isa].slow_on || levels[isa].slow_on != features->leaf0_ebx))
            best = isa;
    return best;
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
    if (!__get_cpuid(0, &f.max_leaf, &f.leaf0_ebx, &c, &d)) return f;
    if (__get_cpuid(1, &a, &b, &f.leaf1_ecx, &d) && f.leaf1_ecx & LEAF1_ECX_OSXSAVE) f.xcr0 = read_xcr0();
    uint32_t max_subleaf = 0;
    if (__get_cpuid_count(7, 0, &max_subleaf, &f.leaf7_ebx, &f.leaf7_ecx, &f.leaf7_edx) && max_subleaf >= 1)
        __get_cpuid_count(7, 1, &f.leaf7_1_eax, &b, &c, &d);
    return f;
}

/* Linux gives the tiles' large state only to processes that ask; all threads of the process then have it. */
int isa_enable(moe4_isa isa)
{
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, which old headers lack; a bit of XCR0 */
    return !isa_includes(isa, MOE4_ISA_AMX) || syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
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

int isa_enable(moe4_isa isa)
{
    (void)isa;
    return 1;
}

#if defined(__aarch64__)

struct cpu_features isa_read_features(void)
{
    return (struct cpu_features){.hwcap = getauxval(AT_HWCAP), .hwcap2 = getauxval(AT_HWCAP2)};
}

/* Arm CPUs have numbers, which Linux lets programs read where it says so. */
void isa_cpu_name(char *text, size_t bytes)
{
    uint64_t midr = 0;
    if (getauxval(AT_HWCAP) & AARCH64_CPUID) __asm__("mrs %0, midr_el1" : "=r"(midr));
    if (midr)
        snprintf(text, bytes, "Arm implementer 0x%02x, part 0x%03x", (unsigned)(midr >> 24 & 0xFF),
                 (unsigned)(midr >> 4 & 0xFFF));
    else
        snprintf(text, bytes, "unknown CPU");
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
#endif
