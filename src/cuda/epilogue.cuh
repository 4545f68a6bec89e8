/* What becomes of a warp's sums: d holds rows g and g+8 of a strip of 16 weight rows by N tokens, as m64nN's and
 * m16n8's accumulators both lie: d[4j + c] of row g, d[4j + 2 + c] of row g+8, of token 8j + 2t + c. */
#ifndef MOE4_CUDA_EPILOGUE_CUH
#define MOE4_CUDA_EPILOGUE_CUH

#include "cuda/activation.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* A warp's 16 rows of a weight tile. */
struct strip {
    int tile, quarter;
};

/* What an epilogue needs of a thread's two rows, g and g+8 of its warp's 16. */
struct row_pair {
    float bias[2], unit;
    activation_params params;
};

static __device__ __forceinline__ row_pair rows_of_thread(const gemm_call &call, int l, const strip &at)
{
    const float *bias =
        call.bias + ((int64_t)l * call.n_tiles + at.tile) * CUDA_TILE_ROWS + at.quarter * 16 + threadIdx.x % 32 / 4;
    return {{bias[0], bias[8]}, call.unit[l], call.params[l]};
}

static __device__ __forceinline__ float with_bias(const row_pair &rows, int row, float sum)
{
    return fmaf(sum, rows.unit, rows.bias[row]);
}

/* Gated gate/up: a thread's rows are a gate and its up, so it has one column of v' [row, I].  Two-byte stores, eight
 * lanes a row, reach memory as well as wider ones would after an exchange between lanes, and any such exchange
 * (movmatrix, shfl) makes the compiler give up uniform registers in the loop over k: a tenth of the whole GEMM at small
 * T. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_gated(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                   const row_pair &rows, const float (&d)[N / 2])
{
    const int lane = threadIdx.x % 32, n_rows = tokens.n_rows - lane % 4 * 2; /* from the thread's first on */
    uint16_t *out = call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + at.tile * CUDA_GATED_COLUMNS +
                    at.quarter * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float v = activate<activation>(with_bias(rows, 0, d[4 * j + c]), with_bias(rows, 1, d[4 * j + 2 + c]),
                                                 rows.params);
            store_2_if(8 * j + c < n_rows, out + (8 * j + c) * call.ldout, bf16_pair(v, 0.0f));
        }
    }
}

/* A thread's rows are neighbours.  Stores out [row, columns]. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_plain(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                   const row_pair &rows, const float (&d)[N / 2])
{
    const int lane = threadIdx.x % 32, n_rows = tokens.n_rows - lane % 4 * 2;
    const int column = at.tile * CUDA_TILE_ROWS + at.quarter * 16 + lane / 4 * 2;
    if (column >= call.columns) return;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + column;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float low = activate<activation>(0.0f, with_bias(rows, 0, d[4 * j + c]), rows.params);
            const float high = activate<activation>(0.0f, with_bias(rows, 1, d[4 * j + 2 + c]), rows.params);
            store_4_if(8 * j + c < n_rows, out + (8 * j + c) * call.ldout, bf16_pair(low, high));
        }
    }
}

template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_sums(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                  const row_pair &rows, const float (&d)[N / 2])
{
    if constexpr (activation == MOE4_ACTIVATION_IDENTITY || activation == MOE4_ACTIVATION_RELU2)
        store_plain<N, activation>(call, tokens, at, rows, d);
    else
        store_gated<N, activation>(call, tokens, at, rows, d);
}

#endif
