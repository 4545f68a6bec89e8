/* The epilogue of tiles that a team sums up: as epilogue.cuh has it, or quantised to MXFP8. */
#ifndef MOE4_CUDA_STREAM_EPILOGUE_CUH
#define MOE4_CUDA_STREAM_EPILOGUE_CUH

#include "cuda/epilogue.cuh"
#include "cuda/mxfp8.cuh"
#include "cuda/ptx.cuh"

enum : int {
    TEAM = 128, /* threads that multiply */
    STREAM_WARPS = STREAM_TEAMS * TEAM / 32
};

/* Largest magnitudes of each warp's columns, by row.  One half while the other is still read. */
struct tile_maxima {
    uint32_t of[2][STREAM_WARPS][STREAM_ROWS];
};

/* Columns of v' that a lane has of a row: gated ones are made of both its rows. */
static __device__ constexpr int columns_of_lane(moe4_activation activation)
{
    return activation == MOE4_ACTIVATION_IDENTITY || activation == MOE4_ACTIVATION_RELU2 ? 2 : 1;
}

/* They, from the lane's two sums. */
template <moe4_activation activation>
static __device__ __forceinline__ void v_of_row(const row_pair &rows, float lower_sum, float upper_sum,
                                                uint16_t (&v)[2])
{
    constexpr bool is_plain = columns_of_lane(activation) == 2;
    const float lower = with_bias(rows, 0, lower_sum), upper = with_bias(rows, 1, upper_sum);
    v[0] = bf16_bits(activate<activation>(is_plain ? 0.0f : lower, is_plain ? lower : upper, rows.params));
    v[1] = is_plain ? bf16_bits(activate<activation>(0.0f, upper, rows.params)) : 0;
}

/* The largest magnitude, as bf16's bits, that n_warps warps have in a row, from each one's. */
static __device__ __forceinline__ uint32_t maximum_of_row(uint32_t (&of)[STREAM_WARPS][STREAM_ROWS], int n_warps,
                                                          int row)
{
    const int first = threadIdx.x / 32 / n_warps * n_warps;
    uint32_t all = 0;
    for (int warp = first; warp < first + n_warps; warp++) all = max(all, of[warp][row]);
    return all;
}

/* A team's v' to what its codes are worth: a lane has n_columns columns of two rows, which it shares with the lanes of
 * the same remainder by 4.  A block of 32 columns is a gated tile, or half of another. */
template <int n_columns>
static __device__ __forceinline__ void quantize_tile(uint16_t (&v)[2][2], uint32_t (&maxima)[STREAM_WARPS][STREAM_ROWS])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        uint32_t own = max(v[c][0] & 0x7FFFu, v[c][n_columns - 1] & 0x7FFFu);
        for (int offset = 4; offset < 32; offset *= 2) own = max(own, __shfl_xor_sync(~0u, own, offset));
        if (lane < 4) maxima[warp][row + c] = own;
    }
    barrier_sync<TEAM>(warp / 4 + 1);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        const uint32_t amax = maximum_of_row(maxima, 4 / n_columns, row + c);
        for (int i = 0; i < n_columns; i++) v[c][i] = worth_of(v[c][i], amax);
    }
}

template <moe4_activation activation>
static __device__ __forceinline__ void store_quantized(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                       const row_pair &rows, const float (&d)[4],
                                                       uint32_t (&maxima)[STREAM_WARPS][STREAM_ROWS])
{
    constexpr int n_columns = columns_of_lane(activation);
    const int lane = threadIdx.x % 32, row = lane % 4 * 2;
    uint16_t v[2][2];
#pragma unroll
    for (int c = 0; c < 2; c++) v_of_row<activation>(rows, d[c], d[2 + c], v[c]);
    quantize_tile<n_columns>(v, maxima);
    const int column = at.tile * 32 * n_columns + (at.quarter * 8 + lane / 4) * n_columns;
    if (column >= call.columns) return;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + row) * call.ldout + column;
#pragma unroll
    for (int c = 0; c < 2; c++, out += call.ldout)
        for (int i = 0; i < n_columns && row + c < tokens.n_rows; i++) out[i] = v[c][i];
}

#endif
