#define ACTIVATION_KERNELS activation_avx2
#include "cpu/activation_template.h"
