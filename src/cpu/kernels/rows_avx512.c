#define VECTOR_BYTES 64
#define ROW_KERNELS  rows_avx512
#include "cpu/kernels/rows_template.h"
