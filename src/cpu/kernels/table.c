#include "cpu/isa.h"
#include "cpu/kernels/kernel.h"

/* Best first.  The portable kernel is last: it runs everywhere and holds every scale exactly. */
static const struct kernel *const kernels[] = {
#if defined(__x86_64__)
    &kernel_amx, &kernel_avx512_bf16, &kernel_avx512_vnni, &kernel_avx512, &kernel_avx2,
#elif defined(__aarch64__)
    &kernel_neon_bf16,
    &kernel_neon,
#endif
    &kernel_c,
};
static const struct kernel *const int8_kernels[] = {
#if defined(__x86_64__)
    &kernel_int8_avx512_vnni,
    &kernel_int8_avx2,
#endif
    &kernel_int8_c,
};
enum { N_KERNELS = sizeof kernels / sizeof *kernels, N_INT8_KERNELS = sizeof int8_kernels / sizeof *int8_kernels };

static const struct kernel *first_included(const struct kernel *const *table, moe4_isa isa)
{
    while (!isa_includes(isa, (*table)->isa)) table++;
    return *table;
}

const struct kernel *kernel_best(moe4_isa isa)
{
    return first_included(kernels, isa);
}

const struct kernel *kernel_exact(void)
{
    return kernels[N_KERNELS - 1];
}

const struct kernel *kernel_int8_best(moe4_isa isa)
{
    return first_included(int8_kernels, isa);
}

const struct kernel *kernel_int8_exact(void)
{
    return int8_kernels[N_INT8_KERNELS - 1];
}
