/* Token tiles of a call of a few tokens, and what becomes of their sums.  All tiles multiply the same rows of x: a
 * token is a column of operand B, whoever chooses it, and what a tile's expert has no row for is not stored. */
#ifndef MOE4_CUDA_FEW_TILES_CUH
#define MOE4_CUDA_FEW_TILES_CUH

#include "cuda/stream_epilogue.cuh"
#include "cuda/stream_few.h"

/* A token tile for each local expert, more where a token has chosen it more than once.  A digit in base 16 stands for
 * each token. */
struct few_tiles {
    token_tile of[FEW_SLOTS];
    uint32_t columns[FEW_SLOTS]; /* 1 for tokens that have a row in this tile */
    uint32_t counts[FEW_SLOTS];  /* how many rows of the expert's a token has */
    int32_t n;
};

/* 1 where a digit is larger than `least`. */
static __device__ __forceinline__ uint32_t digits_above(uint32_t digits, int32_t least)
{
    uint32_t above = (digits | digits >> 1 | digits >> 2 | digits >> 3) & 0x11111111u;
    for (; least > 0 && above; least--) {
        digits -= above;
        above = (digits | digits >> 1 | digits >> 2 | digits >> 3) & 0x11111111u;
    }
    return above;
}

/* Digits of tokens before this one. */
static __device__ __forceinline__ uint32_t digits_before(uint32_t digits, int32_t token)
{
    return digits & ((1u << 4 * token) - 1);
}

static __device__ __forceinline__ int32_t sum_of_digits(uint32_t digits)
{
    return __dp4a(digits & 0x0F0F0F0Fu, 0x01010101u, __dp4a(digits >> 4 & 0x0F0F0F0Fu, 0x01010101u, 0u));
}

/* The routed row of a column, -1 if it has none in this tile. */
static __device__ __forceinline__ int32_t row_of_column(const few_tiles &tiles, int tile, int column)
{
    if (!(tiles.columns[tile] >> 4 * column & 1)) return -1;
    return tiles.of[tile].first_row + sum_of_digits(digits_before(tiles.counts[tile], column));
}

/* A team's sums of those columns that are this expert's, as store_sums and store_quantized store them. */
template <moe4_activation activation>
static __device__ __forceinline__ void store_columns(const gemm_call &call, const few_tiles &tiles, int tile,
                                                     const strip &at, const row_pair &rows, const float (&d)[4],
                                                     bool quantizes, uint32_t (&maxima)[STREAM_WARPS][STREAM_ROWS])
{
    constexpr int n_columns = columns_of_lane(activation);
    const int lane = threadIdx.x % 32;
    uint16_t v[2][2]; /* of two tokens */
#pragma unroll
    for (int c = 0; c < 2; c++) v_of_row<activation>(rows, d[c], d[2 + c], v[c]);
    if (quantizes) quantize_tile<n_columns>(v, maxima);
    const int column = at.tile * 32 * n_columns + (at.quarter * 8 + lane / 4) * n_columns;
    if (column >= call.columns) return;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const int32_t row = row_of_column(tiles, tile, lane % 4 * 2 + c);
        uint16_t *const out = call.out + row * call.ldout + column;
        if (n_columns == 1)
            store_2_if(row >= 0, out, v[c][0]);
        else
            store_4_if(row >= 0, out, v[c][0] | (uint32_t)v[c][1] << 16);
    }
}

#endif
