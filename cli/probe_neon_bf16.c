#define INSTRUCTION "bfmmla"
#define OPERANDS    "8h"
#define FACTOR      0x3F803F80 /* two of 1 */
#define TERM        0x35803580 /* two of 2^-20 */
#include "probe_neon_template.h"

const struct probe_kernel probe_kernel_neon_bf16 = {
    INSTRUCTION " v.4s", MOE4_ISA_NEON_BF16, MOE4_COMPUTE_BF16, 32, CHAINS, 1, run};
