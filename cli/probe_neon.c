#define INSTRUCTION "fmla"
#define OPERANDS    "4s"
#define FACTOR      0x3F800000 /* 1 */
#define TERM        0x35800000 /* 2^-20 */
#include "probe_neon_template.h"

const struct probe_kernel probe_kernel_neon = {
    INSTRUCTION " v.4s", MOE4_ISA_NEON, MOE4_COMPUTE_BF16, 8, CHAINS, 1, run};
