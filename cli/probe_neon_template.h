/* Chains of INSTRUCTION, whose operands are of the arrangement OPERANDS and hold FACTOR and TERM, four bytes each.  In
 * assembly, so that no compiler rearranges what is measured. */
#include "probe_kernel.h"

enum { CHAINS = 24 };

static void run(int64_t rounds)
{
    __asm__ volatile("dup v30.4s, %w1\n\t"
                     "dup v31.4s, %w2\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
                     "movi v\\sum\\().4s, #0\n\t"
                     ".endr\n"
                     "1:\n\t"
                     ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t" INSTRUCTION
                     " v\\sum\\().4s, v30." OPERANDS ", v31." OPERANDS "\n\t"
                     ".endr\n\t"
                     "subs %0, %0, #1\n\t"
                     "b.ne 1b"
                     : "+r"(rounds)
                     : "r"(FACTOR), "r"(TERM)
                     : "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
                       "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v30", "v31");
}
