/* The kernel of experts whose scales no bf16 factor holds: extremes, NaN, or too many binades apart.  A thread a weight
 * row, sums in ascending k; weights as f32, sums in double, which no product leaves at either end.  Rare, so speed is
 * secondary. */
#include "cuda/activation.cuh"
#include "cuda/launch.cuh"
#include "cuda/raw.cuh"

namespace
{

__device__ double dot(const gemm_call &call, const uint8_t *tile, int32_t r, const uint16_t *x)
{
    double sum = 0.0;
    for (int32_t k = 0; k < call.K; k += 2) {
        const float2 w = raw_weights(tile + k / CUDA_STEP_K * CUDA_STEP_BYTES, r, k % CUDA_STEP_K);
        sum += (double)bf16_float(x[k]) * (double)w.x;
        sum += (double)bf16_float(x[k + 1]) * (double)w.y;
    }
    return sum;
}

template <moe4_activation activation>
__device__ void store_element(const gemm_call &call, const token_tile &tokens, int32_t tile, int32_t row,
                              const float *y)
{
    constexpr bool gated = activation != MOE4_ACTIVATION_IDENTITY && activation != MOE4_ACTIVATION_RELU2;
    const int32_t r = threadIdx.x, warp = r / 16, half = r / 8 % 2, g = r % 8;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + row) * call.ldout;
    if (gated) {
        if (half) return;
        out[tile * CUDA_GATED_COLUMNS + warp * 8 + g] =
            bf16_bits(activate<activation>(y[r], y[r + 8], call.params[tokens.l]));
    } else {
        int32_t column = tile * CUDA_TILE_ROWS + warp * 16 + 2 * g + half;
        if (column < call.columns) out[column] = bf16_bits(activate<activation>(0.0f, y[r], call.params[tokens.l]));
    }
}

template <moe4_activation activation> __global__ void exact_kernel(const __grid_constant__ gemm_call call)
{
    __shared__ float y[CUDA_TILE_ROWS];
    begin_kernel();
    const int32_t r = threadIdx.x, n_items = *call.n_token_tiles * call.n_tiles;
    for (int32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
        const token_tile tokens = call.token_tiles[item / call.n_tiles];
        const int32_t tile = item % call.n_tiles;
        const int64_t index = (int64_t)tokens.l * call.n_tiles + tile;
        const uint8_t *weights = call.weights + index * call.n_steps * CUDA_STEP_BYTES;
        for (int32_t row = 0; row < tokens.n_rows; row++) {
            int64_t source = tokens.first_row + row;
            if (call.row_source) source = call.row_source[source];
            const double sum = dot(call, weights, r, call.x + source * call.ldx);
            y[r] = (float)(sum + (double)call.bias[index * CUDA_TILE_ROWS + r]);
            __syncthreads();
            store_element<activation>(call, tokens, tile, row, y);
            __syncthreads();
        }
    }
}

struct kernels {
    typedef void function(const gemm_call);
    template <moe4_activation activation> static constexpr function *of = exact_kernel<activation>;
};

} // namespace

int gemm_exact(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<kernels>[activation], call, n_blocks, CUDA_TILE_ROWS, 0, stream);
}
