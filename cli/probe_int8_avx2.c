/* The products are not added up: on the ports that multiply, adding costs nothing. */
#define INSTRUCTION "vpmaddubsw"
#define FACTOR      0x01010101 /* four of 1, signed */
#define TERM        0x01010101 /* the same, unsigned */
#include "probe_ymm_template.h"

const struct probe_kernel probe_kernel_int8_avx2 = {
    INSTRUCTION " ymm", MOE4_ISA_AVX2, MOE4_COMPUTE_INT8, 64, CHAINS, 1, run};
