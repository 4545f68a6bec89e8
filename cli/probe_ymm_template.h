/* Chains of INSTRUCTION on 256-bit registers, FACTOR and TERM being the four bytes of which its operands are made.  In
 * assembly, so that no compiler rearranges what is measured. */
#include "probe_kernel.h"

enum { CHAINS = 12 };

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
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11\n\t" INSTRUCTION " %%ymm14, %%ymm15, %%ymm\\sum\n\t"
                     ".endr\n\t"
                     "dec %0\n\t"
                     "jnz 1b"
                     : "+r"(rounds)
                     : "r"(FACTOR), "r"(TERM)
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                       "xmm11", "xmm14", "xmm15");
}
