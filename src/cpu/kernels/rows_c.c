#define VECTOR_BYTES 16
#define ROW_KERNELS  rows_c
#include "cpu/kernels/rows_template.h"
