#define INSTRUCTION "vdpbf16ps"
#define FACTOR      0x3F803F80 /* two of 1 */
#define TERM        0x35803580 /* two of 2^-20 */
#include "probe_zmm_template.h"

const struct probe_kernel probe_kernel_avx512_bf16 = {
    INSTRUCTION " zmm", MOE4_ISA_AVX512_BF16, MOE4_COMPUTE_BF16, 64, CHAINS, 1, run};
