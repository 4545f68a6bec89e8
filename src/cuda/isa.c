#include "cuda/isa.h"

#include <stddef.h>

static const struct cuda_level levels[] = {
    {MOE4_ISA_SM_90A, "sm_90a", "gemm_sm90", "wgmma_k16", gemm, gemm_stream},
    {MOE4_ISA_SM_80, "sm_80", "gemm_mma", "mma_k16", gemm_mma, NULL},
};

static int is_offered(moe4_isa isa, const struct cuda_features *features)
{
    if (isa == MOE4_ISA_SM_90A) return features->major == 9 && features->runs_sm_90a;
    return features->major >= 8;
}

const struct cuda_level *cuda_level_of(moe4_isa isa, const struct cuda_features *features)
{
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if ((isa == MOE4_ISA_AUTO || isa == levels[i].isa) && is_offered(levels[i].isa, features)) return &levels[i];
    return NULL;
}

int cuda_level_includes(moe4_isa isa, moe4_isa part)
{
    return isa == part || (isa == MOE4_ISA_SM_90A && part == MOE4_ISA_SM_80);
}
