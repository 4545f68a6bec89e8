#include "cpu/kernels/pack.h"

#include "cpu/isa.h"

pack_rows_fn *pack_rows_for(moe4_isa isa)
{
#if defined(__x86_64__)
    if (isa_includes(isa, MOE4_ISA_AVX512)) return pack_rows_avx512;
    if (isa_includes(isa, MOE4_ISA_AVX2)) return pack_rows_avx2;
#endif
    (void)isa;
    return pack_rows_c;
}
