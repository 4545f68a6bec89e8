#include "probe_kernel.h"

enum { CHAINS = 12 };

/* In assembly, so that no compiler rearranges what is measured.  Registers 14 and 15 hold 1 and 2^-20. */
static void run(int64_t rounds)
{
    __asm__ volatile("vmovd %1, %%xmm14\n\t"
                     "vmovd %2, %%xmm15\n\t"
                     "vbroadcastss %%xmm14, %%ymm14\n\t"
                     "vbroadcastss %%xmm15, %%ymm15\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11\n\t"
                     "vpxor %%ymm\\sum, %%ymm\\sum, %%ymm\\sum\n\t"
                     ".endr\n"
                     "1:\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11\n\t"
                     "vfmadd231ps %%ymm14, %%ymm15, %%ymm\\sum\n\t"
                     ".endr\n\t"
                     "dec %0\n\t"
                     "jnz 1b"
                     : "+r"(rounds)
                     : "r"(0x3F800000), "r"(0x35800000)
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                       "xmm11", "xmm14", "xmm15");
}

const struct probe_kernel probe_kernel_avx2 = {"vfmadd231ps ymm", MOE4_ISA_AVX2, MOE4_COMPUTE_BF16, 16, CHAINS, 1, run};
