#define INSTRUCTION "vpdpbusd"
#define FACTOR      0x01010101 /* four of 1, signed */
#define TERM        0x01010101 /* the same, unsigned */
#include "probe_zmm_template.h"

const struct probe_kernel probe_kernel_int8_avx512_vnni = {
    INSTRUCTION " zmm", MOE4_ISA_AVX512_VNNI, MOE4_COMPUTE_INT8, 128, CHAINS, 1, run};
