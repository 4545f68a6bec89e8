#define INSTRUCTION "vfmadd231ps"
#define FACTOR      0x3F800000 /* 1 */
#define TERM        0x35800000 /* 2^-20 */
#include "probe_ymm_template.h"

const struct probe_kernel probe_kernel_avx2 = {
    INSTRUCTION " ymm", MOE4_ISA_AVX2, MOE4_COMPUTE_BF16, 16, CHAINS, 1, run};
