/* The GEMM kernels by what a GPU can run, best first.  The packed weights are the same for all. */
#ifndef MOE4_CUDA_ISA_H
#define MOE4_CUDA_ISA_H

#include "cuda/kernels.h"

struct cuda_level {
    moe4_isa isa;
    const char *name;   /* as moe4_context_info's isa_name */
    const char *kernel; /* the GEMM's */
    const char *order;  /* of its sums */
    int (*gemm)(const struct gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);
    int (*gemm_stream)(const struct stream_call *call, moe4_activation activation, int32_t n_blocks,
                       cuda_stream stream); /* same sums, for few rows an expert; NULL = there is none */
};

/* What decides: the compute capability, and whether the machine code of sm_90a can be loaded, which needs a GPU of
 * exactly that kind. */
struct cuda_features {
    int32_t major, minor;
    int32_t runs_sm_90a;
};

/* The level of that name, or for AUTO the best; NULL if the GPU has it not, or it is no GPU's. */
const struct cuda_level *cuda_level_of(moe4_isa isa, const struct cuda_features *features);

/* Whether a context at `isa` runs layers that were prepared at `part`. */
int cuda_level_includes(moe4_isa isa, moe4_isa part);

#endif
