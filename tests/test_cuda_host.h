/* What tests on a GPU know of it. */
#ifndef MOE4_TEST_CUDA_HOST_H
#define MOE4_TEST_CUDA_HOST_H

#include "moe4/moe4.h"

/* The level that all contexts ask for: what the environment variable GPU_ISA says, sm_80 or sm_90a, else AUTO. */
moe4_isa gpu_isa(void);

#endif
