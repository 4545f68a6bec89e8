/* The streaming GEMM for calls of a few tokens, as the host launches it. */
#ifndef MOE4_CUDA_STREAM_FEW_H
#define MOE4_CUDA_STREAM_FEW_H

#include "cuda/stream_one.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FEW_TOKENS = 8,
    FEW_SLOTS = 128,  /* of all tokens, at most */
    FEW_REPEATS = 15, /* how often a token may choose an expert */
    FEW_SHARED_BYTES = 220 * 1024
};

/* Of two to FEW_TOKENS tokens. */
typedef struct one_call few_call;

/* ---- Shared memory ----------------------------------------------------------------------------------------------- */

/* Rows of a token tile; of fp8 there is room for FEW_TOKENS. */
MOE4_CUDA_BOTH int32_t few_rows_bytes(int32_t n_steps, int32_t rows, int is_fp8)
{
    return is_fp8 ? (n_steps + 1) / 2 * (FP8_BLOCK + 4) * FEW_TOKENS : rows * stream_pitch(n_steps);
}

/* Token tiles that a block meets at most. */
MOE4_CUDA_BOTH int32_t few_segments(int32_t n_slots, int32_t n_tiles, int32_t n_blocks)
{
    const int32_t most = (n_slots * n_tiles + n_blocks - 1) / n_blocks, spread = (most + n_tiles - 2) / n_tiles + 1;
    return most < spread ? most : spread;
}

/* What routing takes behind x. */
MOE4_CUDA_BOTH int32_t few_choice_bytes(const struct device_router *router, int32_t L)
{
    return router->n_group * 8 * FEW_TOKENS + (router->n_experts + L) * 4;
}

/* ---- Launches ---------------------------------------------------------------------------------------------------- */

int gemm_few_configure(void);
int gemm_few(const few_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* The same in fp8 compute (fp8_few.cu). */
int fp8_few_configure(void);
int fp8_few(const few_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

#ifdef __cplusplus
}
#endif
#endif
