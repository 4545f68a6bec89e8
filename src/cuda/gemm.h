/* One grouped GEMM of the CUDA backend, as the host launches it. */
#ifndef MOE4_CUDA_GEMM_H
#define MOE4_CUDA_GEMM_H

#include <stdint.h>

#include "cpu/activation.h"

enum { MAX_TOKENS = 160 }; /* rows of a token tile */

/* Up to MAX_TOKENS routed rows of one local expert. */
struct token_tile {
    int32_t l, first_row, n_rows;
};

/* Device pointers throughout. */
struct gemm_call {
    const uint8_t *weights;                 /* [L][n_tiles][n_steps] packed steps */
    const float *bias;                      /* [L][n_tiles][64] */
    const float *unit;                      /* [L] 2^base, which sums are multiplied with */
    const struct activation_params *params; /* [L] */
    int32_t n_tiles, n_steps;
    int32_t K; /* columns of x */

    const uint16_t *x; /* bf16, rows 16-byte aligned */
    int64_t ldx;
    const int32_t *row_source; /* [rows] row of x behind each routed row; NULL = the same */
    const struct token_tile *token_tiles;
    const int32_t *n_token_tiles;
    int32_t tiles_are_old; /* 1 = the kernel before this one did not write them, only x: weights need not wait for it */

    uint16_t *out; /* bf16 [rows, columns], ldout even */
    int64_t ldout;
    int32_t columns; /* those beyond, to the next even number, are written too */
};

#endif
