/* gate/up's epilogue of fp8_stream.cuh: v' of 128 columns has one scale for each row, so the teams that have its tiles
 * exchange their maxima before each stores its own codes. */
#ifndef MOE4_CUDA_FP8_STREAM_EPILOGUE_CUH
#define MOE4_CUDA_FP8_STREAM_EPILOGUE_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream_epilogue.cuh"

namespace fp8_stream
{

/* Largest magnitudes of each warp's columns, as bf16's bits, by row.  One half while the other is still read. */
struct group_maxima {
    uint16_t of[2][FP8_STREAM_ROWS][STREAM_WARPS];
};

/* A lane's v' of rows 8j + lane%4*2 and the next, the first in the low half, by column; 0 where there is none. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void find_v(uint32_t (&v)[N / 8][columns_of_lane(activation)], const row_pair &rows,
                                              const float (&total)[N / 2], uint32_t x_scales, bool is_there)
{
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const uint2 bits = load_shared_8(x_scales + j * 32);
        const float scales[2] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
        float first[2], second[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float lower = total[4 * j + c] * rows.unit * scales[c] + rows.bias[0];
            const float upper = total[4 * j + 2 + c] * rows.unit * scales[c] + rows.bias[1];
            first[c] = columns_of_lane(activation) == 1 ? activate<activation>(lower, upper, rows.params)
                                                        : activate<activation>(0.0f, lower, rows.params);
            second[c] = activate<activation>(0.0f, upper, rows.params);
        }
        v[j][0] = is_there ? bf16_pair(first[0], first[1]) : 0;
        if (columns_of_lane(activation) == 2) v[j][1] = is_there ? bf16_pair(second[0], second[1]) : 0;
    }
}

/* The warp's part of its rows' maxima. */
template <int N, int n_columns>
static __device__ __forceinline__ void store_maxima(const uint32_t (&v)[N / 8][n_columns],
                                                    uint16_t (*maxima)[STREAM_WARPS])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        uint32_t most = __vmaxu2(v[j][0] & 0x7FFF7FFFu, v[j][n_columns - 1] & 0x7FFF7FFFu);
        for (int offset = 4; offset < 32; offset *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
        if (lane >= 4) continue;
        maxima[8 * j + lane * 2][warp] = (uint16_t)most;
        maxima[8 * j + lane * 2 + 1][warp] = (uint16_t)(most >> 16);
    }
}

/* By the maxima of `tiles` teams. */
template <int tiles>
static __device__ __forceinline__ fp8_divisor divisor_of_row(const uint16_t (*maxima)[STREAM_WARPS], int row)
{
    const uint4 *from = (const uint4 *)&maxima[row][threadIdx.x / (tiles * TEAM) * tiles * (TEAM / 32)];
    uint32_t most = 0;
    for (int i = 0; i < tiles / 2; i++) most = fp8_larger(most, from[i]);
    return fp8_divisor_of(fp8_largest(most));
}

static __device__ __forceinline__ fp8_divisor of_lane(const fp8_divisor &by, int lane)
{
    return {__shfl_sync(~0u, by.scale, lane), __shfl_sync(~0u, by.reciprocal, lane)};
}

/* The code of a bf16; `all_ordinary`: so is every scale. */
template <bool all_ordinary> static __device__ __forceinline__ uint32_t code_of(uint32_t bf16, const fp8_divisor &by)
{
    const float x = __uint_as_float(bf16 << 16);
    if (all_ordinary || by.scale >= FP8_ORDINARY_SCALE) return fp8_code_pair(fp8_divide<true>(x, by), 0.0f);
    return by.scale >= 0.0f ? fp8_code_pair(fp8_divide<false>(x, by), 0.0f) : 0;
}

/* A lane's codes of n_rows rows from its first on, which begins at `out`.  No branches, so that the compiler can do
 * several at once. */
template <int N, int n_columns, bool all_ordinary>
static __device__ __forceinline__ void store_codes(const uint32_t (&v)[N / 8][n_columns],
                                                   const fp8_divisor (&by)[(N / 4 + 7) / 8], uint8_t *out, int column,
                                                   int n_rows)
{
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const fp8_divisor own = of_lane(by[j / 4], (2 * j + c) % 8 * 4 + lane % 4);
            uint8_t *to = out + (8 * j + c) * FP8_BLOCK + fp8_chunk_offset(pair + c, column % FP8_BLOCK / 16);
            uint32_t code = code_of<all_ordinary>(c ? v[j][0] >> 16 : v[j][0] & 0xFFFFu, own);
            if (n_columns == 2) code |= code_of<all_ordinary>(c ? v[j][1] >> 16 : v[j][1] & 0xFFFFu, own) << 8;
            if (8 * j + c >= n_rows) continue;
            if (n_columns == 1)
                *to = (uint8_t)code;
            else
                *(uint16_t *)to = (uint16_t)code;
        }
    }
}

/* All threads of the teams that share a group of 128 columns call it together.  Divisors, which cost some 40
 * instructions, are found once for the eight lanes that need the same. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_v(const fp8_stream_call &call, const token_tile &tokens, const strip &at,
                                               const row_pair &rows, const float (&total)[N / 2], uint32_t x_scales,
                                               uint16_t (*maxima)[STREAM_WARPS])
{
    constexpr int n_columns = columns_of_lane(activation), tiles = n_columns == 1 ? 4 : 2, rounds = (N / 4 + 7) / 8;
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    const int column = (at.tile * 32 + at.quarter * 8 + lane / 4) * n_columns, group = column / FP8_BLOCK;
    const bool is_group = group * FP8_BLOCK < call.stream.gemm.columns;
    const int64_t first_row = group * call.v.rows + tokens.first_row;
    uint32_t v[N / 8][n_columns];
    find_v<N, activation>(v, rows, total, x_scales, column < call.stream.gemm.columns);
    store_maxima<N, n_columns>(v, maxima);
    barrier_sync<tiles * TEAM>(1 + threadIdx.x / (tiles * TEAM));
    fp8_divisor by[rounds];
    bool is_ordinary = true;
#pragma unroll
    for (int i = 0; i < rounds; i++) {
        const int index = min(8 * i + lane / 4, N / 4 - 1), row = index / 2 * 8 + index % 2 + pair;
        by[i] = divisor_of_row<tiles>(maxima, row);
        is_ordinary &= by[i].scale >= FP8_ORDINARY_SCALE || row >= tokens.n_rows;
        if (is_group && at.tile % tiles == 0 && at.quarter == 0 && row < tokens.n_rows)
            call.v.scales[first_row + row] = by[i].scale;
    }
    uint8_t *out = call.v.codes + (first_row + pair) * FP8_BLOCK + column % 16;
    const int n_rows = is_group ? tokens.n_rows - pair : 0;
    if (__all_sync(~0u, is_ordinary))
        store_codes<N, n_columns, true>(v, by, out, column, n_rows);
    else
        store_codes<N, n_columns, false>(v, by, out, column, n_rows);
}

} // namespace fp8_stream

#endif
