#define ACTIVATION_KERNELS activation_c
#include "cpu/activation_template.h"
