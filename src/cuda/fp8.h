/* The grouped GEMMs of fp8 compute, as the host launches them. */
#ifndef MOE4_CUDA_FP8_H
#define MOE4_CUDA_FP8_H

#include <stdint.h>

#include "cpu/activation.h"
#include "cuda/gemm.h"

enum {
    FP8_BLOCK = 128,    /* k whose products are added up before they are promoted; columns of I under one scale */
    FP8_MAX_ROWS = 288, /* of a token tile */
};

/* Routed rows in e4m3, as the GEMMs read them: [ceil(K/128)] blocks of [rows][128] codes.  A row's 16-byte chunks are
 * exchanged by the low three bits of its number within its expert: wgmma's 128-byte swizzle.  Columns past K are 0. */
struct fp8_rows {
    uint8_t *codes;
    float *scales; /* x: [rows]; the intermediate: [blocks][rows] */
    int64_t rows;  /* of a block: room for all of the call */
};

/* Device pointers throughout. */
struct fp8_call {
    const uint8_t *weights;                 /* [L][n_tiles][n_steps] packed steps, arranged for fp8 (layout.h) */
    const uint8_t *tile_base;               /* [L][n_tiles] stored scale byte that decodes to relative exponent 0 */
    const float *bias;                      /* [L][n_tiles][64] */
    const float *unit;                      /* [L] */
    const struct activation_params *params; /* [L] */
    int32_t n_tiles, n_steps;
    struct fp8_rows x;
    const struct token_tile *token_tiles;
    const int32_t *n_token_tiles;
    int32_t tiles_are_old; /* as in gemm_call */
    int32_t *claims;       /* how many items blocks have claimed: 0 at first */

    struct fp8_rows v; /* gate/up: the intermediate */
    int32_t columns;   /* gate/up: I; down: of out, those to the next even number are written too */
    uint16_t *out;     /* down: bf16 [rows, columns], ldout even */
    int64_t ldout;
};

/* ---- For few rows an expert (fp8_stream.cuh) -------------------------------------------------------------------- */

enum { FP8_STREAM_ROWS = 24 /* most of a token tile */, FP8_STREAM_SHARED_BYTES = 222 * 1024 /* rings and rows */ };

struct fp8_stream_call {
    struct stream_call stream;
    int32_t is_bf16;          /* x and the intermediate are those of stream.gemm, and quantised by whoever reads them */
    const uint8_t *tile_base; /* as in fp8_call */
    struct fp8_rows x;        /* gate/up: a row a token, chunks in their order; down: as in fp8_call */
    struct fp8_rows v;        /* gate/up: the intermediate, its scales 0 before; its bf16 go to stream.gemm.out first */
};

/* Bytes of a buffer of so many rows, a multiple of 8, and their scales. */
MOE4_CUDA_BOTH int32_t fp8_stream_buffer_bytes(int32_t n_steps, int32_t rows)
{
    return (n_steps + 1) / 2 * rows * (FP8_BLOCK + 4);
}

/* Buffers that fit beside the shortest rings, at most 2; 0 = K is too long. */
MOE4_CUDA_BOTH int32_t fp8_stream_buffers(int32_t n_steps, int32_t rows)
{
    const int32_t room = FP8_STREAM_SHARED_BYTES - STREAM_LEAST_STAGES * STREAM_RING_BYTES;
    const int32_t n = room / fp8_stream_buffer_bytes(n_steps, rows);
    return n < 2 ? n : 2;
}

/* ---- For some 18 to 64 rows an expert (fp8_narrow.cuh), by the same calls, x as in fp8_call ---------------------- */

enum { FP8_NARROW_ROWS = 80 };

#endif
