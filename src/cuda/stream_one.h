/* The streaming GEMM for calls of one token, as the host launches it. */
#ifndef MOE4_CUDA_STREAM_ONE_H
#define MOE4_CUDA_STREAM_ONE_H

#include "cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ONE_TOP_K = 32, /* at most */ ONE_NARROW_TEAMS = 2 };

struct one_call {
    struct stream_call stream;      /* the GEMM; x is bf16 */
    const uint8_t *tile_base;       /* fp8: as in fp8_call */
    struct route_logits_call route; /* of gate/up, which routes and groups the token itself; no expert is exact */
    moe4_topk topk;                 /* instead of logits, if it has ids; as many as the router chooses */
    int32_t is_down;
    int32_t quantizes_x; /* 1 = x's MXFP8 codes are multiplied */
};

int gemm_one_configure(void);
int gemm_one(const struct one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

/* The same in fp8 compute (fp8_one.cu). */
int fp8_one_configure(void);
int fp8_one(const struct one_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream);

#ifdef __cplusplus
}
#endif
#endif
