#define ACTIVATION_KERNELS activation_avx512
#include "cpu/activation_template.h"
