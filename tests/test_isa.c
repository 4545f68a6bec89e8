/* isa_best from the registers of real CPUs and of systems that hide some of what the CPU has. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/isa.h"

enum { INTEL = 0x756E6547 };

static const struct recorded {
    const char *name;
    struct cpu_features features; /* max leaf, 1.ecx, 7.ebx, 7.ecx (VNNI alone), 7.edx (AMX alone), 7.1.eax, xcr0;
                                     hwcap, hwcap2; 0.ebx */
    moe4_isa best;
} recorded[] = {
    {"nothing known", {0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, MOE4_ISA_C},
    {"Westmere: no AVX", {0x0B, 0x029EE3FF, 0, 0, 0, 0, 0, 0, 0, INTEL}, MOE4_ISA_C},
    {"Sandy Bridge: AVX alone", {0x0D, 0x1FBAE3FF, 0, 0, 0, 0, 0x7, 0, 0, INTEL}, MOE4_ISA_C},
    {"Haswell", {0x0D, 0x7FFAFBFF, 0x000027AB, 0, 0, 0, 0x7, 0, 0, INTEL}, MOE4_ISA_AVX2},
    {"Zen 2, Rome", {0x10, 0x7EF8320B, 0x219C91A9, 0, 0, 0, 0x207, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Zen 3, Milan", {0x10, 0x7EDA320B, 0x219C97A9, 0, 0, 0, 0x207, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Skylake-X", {0x16, 0x7FFEFBFF, 0xD39FFFFB, 0, 0, 0, 0x2FF, 0, 0, INTEL}, MOE4_ISA_AVX512},
    {"Cascade Lake", {0x16, 0x7FFEFBFF, 0xD39FFFFB, 0x800, 0, 0, 0x2FF, 0, 0, INTEL}, MOE4_ISA_AVX512_VNNI},
    {"Ice Lake SP", {0x1B, 0x7FFEFBFF, 0xF3BFBFFF, 0x800, 0, 0, 0x2E7, 0, 0, INTEL}, MOE4_ISA_AVX512_VNNI},
    {"Alder Lake, AVX-512 left on",
     {0x20, 0x7FFAFBFF, 0xF3BFA7EB, 0x800, 0, 0x00401C30, 0x2E7, 0, 0, INTEL},
     MOE4_ISA_AVX512_VNNI}, /* vdpbf16ps is slow there */
    {"Sapphire Rapids", {0x20, 0x7FFEFBFF, 0xF3BFBFFB, 0x800, 0xFFDD4432, 0x1C30, 0x602E7, 0, 0, INTEL}, MOE4_ISA_AMX},
    {"Sapphire Rapids, no tiles",
     {0x20, 0x7FFEFBFF, 0xF3BFBFFB, 0x800, 0xFFDD4432, 0x1C30, 0x2E7, 0, 0, INTEL},
     MOE4_ISA_AVX512_VNNI},
    {"Zen 4, Genoa", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x2E7, 0, 0, 0}, MOE4_ISA_AVX512_BF16},
    {"Zen 4, virtual", {0x1C, 0xFFFA3203, 0xF1BF07AB, 0x800, 0, 0x20, 0xE7, 0, 0, 0}, MOE4_ISA_AVX512_BF16},
    {"Zen 5, Turin", {0x10, 0x7EFA320B, 0xF1BF97AB, 0x800, 0, 0x30, 0x2E7, 0, 0, 0}, MOE4_ISA_AVX512_BF16},
    /* The same CPUs below systems that do not save all of their registers. */
    {"Zen 4, no ZMM state", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x07, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Zen 4, opmask only", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x27, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Zen 4, no ZMM 16-31", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x67, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Zen 4, no opmask", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0xC7, 0, 0, 0}, MOE4_ISA_AVX2},
    {"Zen 4, no YMM state", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0xE3, 0, 0, 0}, MOE4_ISA_C},
    {"Zen 4, SSE state only", {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x03, 0, 0, 0}, MOE4_ISA_C},
    {"Zen 4, no OSXSAVE", {0x10, 0x76FA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0, 0, 0, 0}, MOE4_ISA_C},
    {"Zen 4, leaf 7 cut off", {0x06, 0x7EFA320B, 0, 0, 0, 0, 0x2E7, 0, 0, 0}, MOE4_ISA_C},
    /* aarch64 */
    {"Cortex-A72", {0, 0, 0, 0, 0, 0, 0, 0x887, 0, 0}, MOE4_ISA_NEON},
    {"Neoverse N1", {0, 0, 0, 0, 0, 0, 0, 0x10119FFF, 0, 0}, MOE4_ISA_NEON},
    {"Neoverse V1", {0, 0, 0, 0, 0, 0, 0, 0xDFFFFFFF, 0x1F201, 0}, MOE4_ISA_NEON_BF16},
    {"Neoverse V1, no BF16", {0, 0, 0, 0, 0, 0, 0, 0xDFFFFFFF, 0x1B201, 0}, MOE4_ISA_NEON},
    {"Neoverse V1, no floating point", {0, 0, 0, 0, 0, 0, 0, 0xDFFFFFFC, 0x1F201, 0}, MOE4_ISA_C},
};

static void test_recorded_cpus(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof recorded / sizeof *recorded; i++) {
        moe4_isa best = isa_best(&recorded[i].features);
        if (best != recorded[i].best)
            fail_msg("%s: %s, expected %s", recorded[i].name, isa_name(best), isa_name(recorded[i].best));
    }
}

/* Every feature that a level needs, taken away alone. */
static void test_each_feature_counts(void **state)
{
    (void)state;
    static const struct {
        uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_1_eax;
        moe4_isa left;
    } hidden[] = {
        {1u << 12, 0, 0, 0, MOE4_ISA_C},           /* FMA */
        {1u << 27, 0, 0, 0, MOE4_ISA_C},           /* OSXSAVE */
        {1u << 29, 0, 0, 0, MOE4_ISA_C},           /* F16C */
        {0, 1u << 5, 0, 0, MOE4_ISA_C},            /* AVX2 */
        {0, 1u << 16, 0, 0, MOE4_ISA_AVX2},        /* AVX-512 F */
        {0, 1u << 17, 0, 0, MOE4_ISA_AVX2},        /* DQ */
        {0, 1u << 30, 0, 0, MOE4_ISA_AVX2},        /* BW */
        {0, 1u << 31, 0, 0, MOE4_ISA_AVX2},        /* VL */
        {0, 0, 1u << 11, 0, MOE4_ISA_AVX512},      /* VNNI */
        {0, 0, 0, 1u << 5, MOE4_ISA_AVX512_VNNI},  /* BF16 */
        {0, 1u << 21, 0, 0, MOE4_ISA_AVX512_BF16}, /* IFMA, which nothing needs */
    };
    for (size_t i = 0; i < sizeof hidden / sizeof *hidden; i++) {
        struct cpu_features features = {0x10, 0x7EFA320B, 0xF1BF97A9, 0x800, 0, 0x20, 0x2E7, 0, 0, 0};
        features.leaf1_ecx &= ~hidden[i].leaf1_ecx;
        features.leaf7_ebx &= ~hidden[i].leaf7_ebx;
        features.leaf7_ecx &= ~hidden[i].leaf7_ecx;
        features.leaf7_1_eax &= ~hidden[i].leaf7_1_eax;
        assert_int_equal(isa_best(&features), hidden[i].left);
    }
}

/* Offered where CPU and system have all of it. */
static void test_amx(void **state)
{
    (void)state;
    const struct cpu_features whole = {0x20, 0x7FFEFBFF, 0xF3BFBFFB, 0x800, 0xFFDD4432, 0x1C30, 0x602E7, 0, 0, INTEL};
    assert_true(isa_is_offered(&whole, MOE4_ISA_AMX));
    assert_int_equal(isa_best(&whole), MOE4_ISA_AMX);
    for (int bit = 0; bit < 32; bit++) {
        struct cpu_features less = whole;
        const uint32_t edx_needed = 1u << 22 | 1u << 24, xcr0_needed = 0x600E6;
        less.leaf7_edx &= ~(1u << bit);
        assert_int_equal(isa_is_offered(&less, MOE4_ISA_AMX), !(edx_needed >> bit & 1));
        less = whole;
        less.xcr0 &= ~(UINT64_C(1) << bit);
        assert_int_equal(isa_is_offered(&less, MOE4_ISA_AMX), !(xcr0_needed >> bit & 1));
    }
}

/* includes[isa][part] */
static void test_families(void **state)
{
    (void)state;
    static const char *const includes[] = {
        [MOE4_ISA_C] = "1.......",           [MOE4_ISA_AVX2] = "11......",        [MOE4_ISA_AVX512] = "111.....",
        [MOE4_ISA_AVX512_VNNI] = "1111....", [MOE4_ISA_AVX512_BF16] = "11111...", [MOE4_ISA_AMX] = "111111..",
        [MOE4_ISA_NEON] = "1.....1.",        [MOE4_ISA_NEON_BF16] = "1.....11",
    };
    for (moe4_isa isa = MOE4_ISA_C; isa_name(isa); isa++)
        for (moe4_isa part = MOE4_ISA_C; isa_name(part); part++)
            assert_int_equal(isa_includes(isa, part), includes[isa][part - MOE4_ISA_C] == '1');
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(isa_name(MOE4_ISA_AUTO), "auto");
    assert_string_equal(isa_name(MOE4_ISA_C), "c");
    assert_string_equal(isa_name(MOE4_ISA_AVX2), "avx2");
    assert_string_equal(isa_name(MOE4_ISA_AVX512), "avx512");
    assert_string_equal(isa_name(MOE4_ISA_AVX512_VNNI), "avx512_vnni");
    assert_string_equal(isa_name(MOE4_ISA_AVX512_BF16), "avx512_bf16");
    assert_string_equal(isa_name(MOE4_ISA_AMX), "amx");
    assert_string_equal(isa_name(MOE4_ISA_NEON), "neon");
    assert_string_equal(isa_name(MOE4_ISA_NEON_BF16), "neon_bf16");
    assert_null(isa_name((moe4_isa)(MOE4_ISA_NEON_BF16 + 1)));
    assert_null(isa_name((moe4_isa)-1));
}

static void test_this_cpu(void **state)
{
    (void)state;
    struct cpu_features features = isa_read_features();
    char name[64], cut[4];
    assert_true(isa_is_offered(&features, isa_best(&features)));
#if defined(__x86_64__)
    assert_in_range(isa_best(&features), MOE4_ISA_C, MOE4_ISA_AMX);
#elif defined(__aarch64__)
    assert_in_range(isa_best(&features), MOE4_ISA_NEON, MOE4_ISA_NEON_BF16);
#endif
    isa_cpu_name(name, sizeof name);
    assert_true(strlen(name) > 0 && name[0] != ' ');
    isa_cpu_name(cut, sizeof cut);
    assert_true(strlen(cut) < sizeof cut && strncmp(name, cut, strlen(cut)) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recorded_cpus), cmocka_unit_test(test_each_feature_counts),
        cmocka_unit_test(test_amx),           cmocka_unit_test(test_families),
        cmocka_unit_test(test_names),         cmocka_unit_test(test_this_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
