#include <stddef.h>

#include "cpu/isa.h"
#include "cpu/kernels/kernel.h"

/* Best first.  The portable kernel is last: it runs everywhere and holds every scale exactly. */
static const struct kernel *const kernels[] = {
#if defined(__x86_64__)
    &kernel_amx, &kernel_avx512_bf16, &kernel_avx512, &kernel_avx2,
#elif defined(__aarch64__)
    &kernel_neon_bf16,
    &kernel_neon,
#endif
    &kernel_c,
};
enum { N_KERNELS = sizeof kernels / sizeof *kernels };

const struct kernel *kernel_best(moe4_isa isa)
{
    size_t i = 0;
    while (!isa_includes(isa, kernels[i]->isa)) i++;
    return kernels[i];
}

const struct kernel *kernel_exact(void)
{
    return kernels[N_KERNELS - 1];
}
