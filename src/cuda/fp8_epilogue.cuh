/* What consumers of the fp8 GEMMs (fp8.cuh) do with their sums. */
#ifndef MOE4_CUDA_FP8_EPILOGUE_CUH
#define MOE4_CUDA_FP8_EPILOGUE_CUH

#include "cuda/epilogue.cuh"
#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_ring.cuh"

namespace fp8
{

static __device__ __forceinline__ row_pair rows_of_thread(const fp8_call &call, int l, int tile)
{
    const int64_t index = (int64_t)l * call.n_tiles + tile;
    const float *bias = call.bias + index * CUDA_TILE_ROWS + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    return {{bias[0], bias[8]}, call.unit[l] * fp8_tile_unit(call.tile_base[index]), call.params[l]};
}

/* Eights of rows whose activations are mixed. */
template <int N>
constexpr int eights_at_once = N % 32 == 0   ? 4
                               : N % 40 == 0 ? 5
                               : N % 56 == 0 ? 7
                               : N % 24 == 0 ? 3
                               : N % 16 == 0 ? 2
                                             : 1;

/* gate/up: v' to shared memory, [row][128 columns] bf16.  `slot`: which of their tiles this is.  Rows that are not
 * there have room and are computed like the others, since branches would keep the compiler from doing several at a
 * time; so would a load behind stores, hence scales are loaded ahead.  A unit is a power of two: it may come after the
 * scale. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_v(const row_pair &rows, uint32_t v, uint32_t x_scales, int slot,
                                               const float (&total)[N / 2])
{
    constexpr int at_once = eights_at_once<N>;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int column = is_gated<activation> ? slot * CUDA_GATED_COLUMNS + warp * 8 + lane / 4
                                            : slot * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    const uint32_t to = v + lane % 4 * 2 * V_PITCH + column * 2;
    const float2 *scales = shared_pairs(x_scales + lane % 4 * 8);
    float2 next[at_once];
#pragma unroll
    for (int i = 0; i < at_once; i++) next[i] = scales[4 * i];
#pragma unroll
    for (int j = 0; j < N / 8; j += at_once) {
        uint32_t values[at_once][2];
#pragma unroll
        for (int i = 0; i < at_once; i++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float scale = c ? next[i].y : next[i].x;
                const float low = fmaf(total[4 * (j + i) + c] * scale, rows.unit, rows.bias[0]);
                const float high = fmaf(total[4 * (j + i) + 2 + c] * scale, rows.unit, rows.bias[1]);
                values[i][c] = is_gated<activation> ? bf16_pair(activate<activation>(low, high, rows.params), 0.0f)
                                                    : bf16_pair(activate<activation>(0.0f, low, rows.params),
                                                                activate<activation>(0.0f, high, rows.params));
            }
            if (j + at_once < N / 8) next[i] = scales[4 * (j + at_once + i)];
        }
#pragma unroll
        for (int i = 0; i < at_once; i++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                (is_gated<activation> ? store_shared_2 : store_shared_4)(to + (8 * (j + i) + c) * V_PITCH,
                                                                         values[i][c]);
    }
}

/* down: z' to memory, without branches, as above. */
template <int N>
static __device__ __forceinline__ void store_z(const fp8_call &call, const token_tile &tokens, int tile,
                                               const float (&total)[N / 2])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const row_pair rows = rows_of_thread(call, tokens.l, tile);
    const int column = tile * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    const int n_rows = column < call.columns ? tokens.n_rows - lane % 4 * 2 : 0;
    const uint32_t pitch = (uint32_t)call.ldout * sizeof *call.out;
    char *out = (char *)(call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + column);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int c = 0; c < 2; c++)
            store_4_if(8 * j + c < n_rows, out + (uint64_t)pitch * (uint32_t)(8 * j + c),
                       bf16_pair(fmaf(total[4 * j + c], rows.unit, rows.bias[0]),
                                 fmaf(total[4 * j + 2 + c], rows.unit, rows.bias[1])));
}

/* What the epilogue and the next item's start will read, while there is time.  Not x's scales: the kernel that writes
 * them may still run. */
template <kind k>
static __device__ __forceinline__ void prefetch_pass(const fp8_call &call, const token_tile &tokens, int tile)
{
    const int thread = threadIdx.x % WARPGROUP;
    const int64_t index = (int64_t)tokens.l * call.n_tiles + tile;
    if (thread < 2) prefetch(call.bias + index * CUDA_TILE_ROWS + thread * 32);
    if (thread == 2) prefetch(call.unit + tokens.l);
    if (thread == 3) prefetch(call.params + tokens.l);
}

} // namespace fp8

#endif
