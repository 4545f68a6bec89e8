#define BLOCK_KERNELS blocks_avx512
#include "quant/blocks_template.h"
