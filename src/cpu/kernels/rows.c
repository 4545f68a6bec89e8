#include "cpu/kernels/rows.h"

#include "cpu/isa.h"

const struct row_kernels *row_kernels_for(moe4_isa isa)
{
#if defined(__x86_64__)
    if (isa_includes(isa, MOE4_ISA_AVX512)) return &rows_avx512;
    if (isa_includes(isa, MOE4_ISA_AVX2)) return &rows_avx2;
#endif
    (void)isa;
    return &rows_c;
}
