#define INSTRUCTION "vpdpwssd"
#define FACTOR      0x00010001 /* two of 1 */
#define TERM        0x00010001
#include "probe_zmm_template.h"

const struct probe_kernel probe_kernel_avx512_vnni = {
    INSTRUCTION " zmm", MOE4_ISA_AVX512_VNNI, MOE4_COMPUTE_BF16, 64, CHAINS, 1, run};
