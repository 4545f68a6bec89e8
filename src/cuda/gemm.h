/* One grouped GEMM of the CUDA backend, as the host launches it. */
#ifndef MOE4_CUDA_GEMM_H
#define MOE4_CUDA_GEMM_H

#include <stdint.h>

#include "cpu/activation.h"
#include "cuda/layout.h"

#ifdef __CUDACC__
#define MOE4_CUDA_BOTH static __host__ __device__ inline
#else
#define MOE4_CUDA_BOTH static inline
#endif

enum { MAX_TOKENS = 160, NARROW_TOKENS = 80 }; /* rows of a token tile; those up to which a block takes more tiles */

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
    int32_t tile_rows;     /* that no token tile exceeds */
    int32_t tiles_are_old; /* 1 = the kernel before this one did not write them, only x: weights need not wait for it */

    uint16_t *out; /* bf16 [rows, columns], ldout even */
    int64_t ldout;
    int32_t columns; /* those beyond, to the next even number, are written too */
};

/* ---- Resident: the GEMM for token tiles whose x fits into shared memory beside the weights' rings (resident.cuh) ----
 */

enum {
    RESIDENT_TEAMS = 4,
    RESIDENT_ROWS = 24, /* most of a token tile */
    RESIDENT_LEAST_STAGES = 3,
    RESIDENT_STAGES = 8,
    RESIDENT_PARTS = 32,               /* of x, a stage's each, at most */
    RESIDENT_SHARED_BYTES = 226 * 1024 /* rings and x, and what aligns them */
};

/* Steps of a stage: such that stages have as few empty ones as can be. */
MOE4_CUDA_BOTH int32_t resident_steps(int32_t n_steps)
{
    return n_steps % 3 == 0 ? 3 : 4;
}

/* Bytes of x of token tiles of so many rows, a multiple of 8. */
MOE4_CUDA_BOTH int32_t resident_x_bytes(int32_t n_steps, int32_t rows)
{
    const int32_t steps = resident_steps(n_steps);
    return (n_steps + steps - 1) / steps * steps * 128 * rows;
}

/* Stages of a team's ring that fit beside that, at most RESIDENT_STAGES; 0 = too few to be of use. */
MOE4_CUDA_BOTH int32_t resident_stages(int32_t n_steps, int32_t rows)
{
    if (rows > RESIDENT_ROWS || n_steps > RESIDENT_PARTS * resident_steps(n_steps)) return 0;
    const int32_t room = RESIDENT_SHARED_BYTES - 1024 - resident_x_bytes(n_steps, (rows + 7) / 8 * 8);
    const int32_t n = room / (RESIDENT_TEAMS * resident_steps(n_steps) * CUDA_STEP_BYTES);
    return n < RESIDENT_LEAST_STAGES ? 0 : n < RESIDENT_STAGES ? n : RESIDENT_STAGES;
}

/* ---- Streaming: the GEMM for token tiles of up to STREAM_ROWS rows (stream.cuh) ---------------------------------- */

/* Each of a block's four teams has a ring of stages of four steps; x follows the rings. */
enum {
    STREAM_ROWS = 8,
    STREAM_TEAMS = 4,
    STREAM_STEPS = 4,
    STREAM_STAGE_BYTES = STREAM_STEPS * CUDA_STEP_BYTES,
    STREAM_RING_BYTES = STREAM_TEAMS * STREAM_STAGE_BYTES, /* of one stage of every team */
    STREAM_LEAST_STAGES = 3,
    STREAM_STAGES = 6,
    STREAM_SHARED_BYTES = 225 * 1024, /* rings and x */
    STREAM_SLACK = 128                /* behind x: a step past the last row's end is read, not used */
};

struct stream_call {
    struct gemm_call gemm;
    const uint8_t *next_weights; /* of the GEMM after this one, on the same token tiles; NULL = none */
    int32_t next_tiles, next_steps;
    int32_t quantizes;           /* 1 = out holds what MXFP8 codes of the results are worth */
    int32_t n_buffers, n_stages; /* the former of fp8 kernels; set by gemm_stream, fp8_stream */
};

/* Bytes between rows of x: all steps and 16, so that eight neighbours lie in different banks. */
MOE4_CUDA_BOTH int32_t stream_pitch(int32_t n_steps)
{
    return n_steps * 128 + 16;
}

/* Rows of x that fit beside the shortest rings, at most those of two token tiles; 0 = not even one's. */
MOE4_CUDA_BOTH int32_t stream_slots(int32_t n_steps)
{
    const int32_t n = (STREAM_SHARED_BYTES - STREAM_LEAST_STAGES * STREAM_RING_BYTES) / stream_pitch(n_steps);
    return n < STREAM_ROWS ? 0 : n < 2 * STREAM_ROWS ? n : 2 * STREAM_ROWS;
}

#endif
