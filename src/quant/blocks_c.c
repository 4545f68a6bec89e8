#define BLOCK_KERNELS blocks_c
#include "quant/blocks_template.h"
