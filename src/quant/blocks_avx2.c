#define BLOCK_KERNELS blocks_avx2
#include "quant/blocks_template.h"
