/* Chains of INSTRUCTION on 512-bit registers, FACTOR and TERM being the four bytes of which its operands are made.  In
 * assembly, so that no compiler rearranges what is measured. */
#include "probe_kernel.h"

enum { CHAINS = 24 };

static void run(int64_t rounds)
{
    __asm__ volatile("vpbroadcastd %1, %%zmm30\n\t"
                     "vpbroadcastd %2, %%zmm31\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
                     "vpxord %%zmm\\sum, %%zmm\\sum, %%zmm\\sum\n\t"
                     ".endr\n"
                     "1:\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t" INSTRUCTION
                     " %%zmm30, %%zmm31, %%zmm\\sum\n\t"
                     ".endr\n\t"
                     "dec %0\n\t"
                     "jnz 1b"
                     : "+r"(rounds)
                     : "r"(FACTOR), "r"(TERM)
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
                       "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20",
                       "xmm21", "xmm22", "xmm23", "xmm30", "xmm31");
}
