/* What becomes of a warp's sums: d holds rows g and g+8 of a strip of 16 weight rows by N tokens, as m64nN's and
 * m16n8's accumulators both lie: d[4j + c] of row g, d[4j + 2 + c] of row g+8, of token 8j + 2t + c. */
#ifndef MOE4_CUDA_EPILOGUE_CUH
#define MOE4_CUDA_EPILOGUE_CUH

#include "cuda/activation.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"

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

/* Gated gate/up: a thread's rows are a gate and its up, so it has one column of v' [row, I].  Two-byte stores, eight
 * lanes a row, reach memory as well as wider ones would after an exchange between lanes, and any such exchange
 * (movmatrix, shfl) makes the compiler give up uniform registers in the loop over k: a tenth of the whole GEMM at small
 * T. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_gated(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                   const row_pair &rows, const float (&d)[N / 2])
{
    const int lane = threadIdx.x % 32;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + at.tile * CUDA_GATED_COLUMNS +
                    at.quarter * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++, out += 8 * call.ldout) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (8 * j + lane % 4 * 2 + c >= tokens.n_rows) continue;
            float v = activate<activation>(d[4 * j + c] * rows.unit + rows.bias[0],
                                           d[4 * j + 2 + c] * rows.unit + rows.bias[1], rows.params);
            out[c * call.ldout] = (uint16_t)bf16_pair(v, 0.0f);
        }
    }
}

/* A thread's rows are neighbours.  Stores out [row, columns]. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_plain(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                   const row_pair &rows, const float (&d)[N / 2])
{
    const int lane = threadIdx.x % 32;
    const int column = at.tile * CUDA_TILE_ROWS + at.quarter * 16 + lane / 4 * 2;
    if (column >= call.columns) return;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + column;
#pragma unroll
    for (int j = 0; j < N / 8; j++, out += 8 * call.ldout) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            if (8 * j + lane % 4 * 2 + c >= tokens.n_rows) continue;
            float low = activate<activation>(0.0f, d[4 * j + c] * rows.unit + rows.bias[0], rows.params);
            float high = activate<activation>(0.0f, d[4 * j + 2 + c] * rows.unit + rows.bias[1], rows.params);
            *(uint32_t *)(out + c * call.ldout) = bf16_pair(low, high);
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
