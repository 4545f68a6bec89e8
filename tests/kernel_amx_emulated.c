/* The AMX kernel itself, on tiles made of C. */
#include "amx_tiles.h"

#define kernel_amx kernel_amx_emulated
#include "cpu/kernels/gemm_amx.c"
