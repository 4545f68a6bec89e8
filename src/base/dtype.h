/* Facts about moe4_dtype. */
#ifndef MOE4_BASE_DTYPE_H
#define MOE4_BASE_DTYPE_H

#include "moe4/moe4.h"

/* F32, F16 or BF16: what load_f32 reads. */
static inline int dtype_is_float(moe4_dtype dtype)
{
    return dtype == MOE4_DTYPE_F32 || dtype == MOE4_DTYPE_F16 || dtype == MOE4_DTYPE_BF16;
}

static inline const char *dtype_name(moe4_dtype dtype)
{
    static const char *const names[] = {"none", "f32", "f16", "bf16", "f8_e4m3", "e8m0", "i16", "i32", "i64", "i8"};
    return (unsigned)dtype < sizeof names / sizeof *names ? names[dtype] : "unknown";
}

#endif
