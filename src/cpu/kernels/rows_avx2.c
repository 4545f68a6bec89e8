#define VECTOR_BYTES 32
#define ROW_KERNELS  rows_avx2
#include "cpu/kernels/rows_template.h"
