#include <stddef.h>

#include "cpu/kernels/kernel.h"

/* Best first.  The portable kernel is last: it runs everywhere and holds every scale exactly. */
static const struct kernel *const kernels[] = {
#if defined(__x86_64__)
    &kernel_avx512_bf16,
    &kernel_avx512,
    &kernel_avx2,
#endif
    &kernel_c,
};
enum { N_KERNELS = sizeof kernels / sizeof *kernels };

const struct kernel *kernel_best(moe4_isa isa)
{
    for (size_t i = 0; i < N_KERNELS; i++)
        if (kernels[i]->isa <= isa) return kernels[i];
    return kernel_exact();
}

const struct kernel *kernel_exact(void)
{
    return kernels[N_KERNELS - 1];
}
