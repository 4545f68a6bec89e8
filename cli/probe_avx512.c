#define INSTRUCTION "vfmadd231ps"
#define FACTOR      0x3F800000 /* 1 */
#define TERM        0x35800000 /* 2^-20 */
#include "probe_zmm_template.h"

const struct probe_kernel probe_kernel_avx512 = {
    INSTRUCTION " zmm", MOE4_ISA_AVX512, MOE4_COMPUTE_BF16, 32, CHAINS, 1, run};
