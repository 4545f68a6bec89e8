/* fp8 compute for experts whose scales e5m2 does not hold: codes times raw weights (layout.h) in plain fp32, a thread a
 * weight row, sums in ascending k.  Rare, so speed is secondary. */
#include "cuda/activation.cuh"
#include "cuda/e4m3.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/launch.cuh"
#include "cuda/raw.cuh"

namespace
{

constexpr int TILES = 4, THREADS = TILES * CUDA_TILE_ROWS; /* that gated gate/up needs for 128 columns */

/* A block of 128 k of one routed row, `in_tile` its number in its tile. */
__device__ float block_dot(const fp8_call &call, const uint8_t *tile, int32_t r, int64_t row, int32_t in_tile,
                           int32_t block)
{
    const uint8_t *codes = call.x.codes + (block * call.x.rows + row) * FP8_BLOCK;
    float sum = 0.0f;
    for (int32_t step = 2 * block; step < min(2 * block + 2, call.n_steps); step++)
        for (int32_t k = 0; k < CUDA_STEP_K; k += 2) {
            const int32_t column = step % 2 * CUDA_STEP_K + k;
            const uint8_t *x = codes + fp8_chunk_offset(in_tile, column / 16) + column % 16;
            const float2 w = raw_weights(tile + step * CUDA_STEP_BYTES, r, k);
            sum += e4m3_value(x[0]) * w.x;
            sum += e4m3_value(x[1]) * w.y;
        }
    return sum;
}

/* The sum over all of K of weight row r of a tile, scales applied, and its bias. */
template <bool is_down>
__device__ float row_sum(const fp8_call &call, const token_tile &tokens, int32_t tile, int32_t r, int32_t in_tile)
{
    const int64_t index = (int64_t)tokens.l * call.n_tiles + tile, row = tokens.first_row + in_tile;
    const uint8_t *weights = call.weights + index * call.n_steps * CUDA_STEP_BYTES;
    float sum = 0.0f;
    for (int32_t block = 0; block < (call.n_steps + 1) / 2; block++) {
        float part = block_dot(call, weights, r, row, in_tile, block);
        sum = is_down ? fmaf(part, call.x.scales[block * call.x.rows + row], sum) : sum + part;
    }
    if (!is_down) sum *= call.x.scales[row];
    return sum + call.bias[index * CUDA_TILE_ROWS + r];
}

/* 128 columns of the intermediate of a row: v [128] bf16 to codes. */
__device__ void quantise_group(const fp8_call &call, const uint16_t *v, int32_t group, int64_t row, int32_t in_tile)
{
    if (threadIdx.x >= FP8_BLOCK / 16) return;
    uint32_t largest = 0;
    for (int k = 0; k < FP8_BLOCK; k++) largest = max(largest, v[k] & 0x7FFFu);
    const fp8_divisor by = fp8_divisor_of(largest);
    const uint4 *own = (const uint4 *)(v + threadIdx.x * 16);
    const int64_t at = group * call.v.rows + row;
    *(uint4 *)(call.v.codes + at * FP8_BLOCK + fp8_chunk_offset(in_tile, threadIdx.x)) = fp8_chunk(own[0], own[1], by);
    if (threadIdx.x == 0) call.v.scales[at] = by.scale;
}

template <moe4_activation activation> __global__ void gate_up_kernel(const __grid_constant__ fp8_call call)
{
    constexpr bool gated = activation != MOE4_ACTIVATION_IDENTITY && activation != MOE4_ACTIVATION_RELU2;
    constexpr int columns = gated ? CUDA_GATED_COLUMNS : CUDA_TILE_ROWS, tiles = FP8_BLOCK / columns;
    __shared__ float y[THREADS];
    __shared__ __align__(16) uint16_t v[FP8_BLOCK];
    begin_kernel();
    const int32_t n_groups = (call.n_tiles + tiles - 1) / tiles, r = threadIdx.x % CUDA_TILE_ROWS;
    const int32_t warp = r / 16, half = r / 8 % 2, g = r % 8, slot = threadIdx.x / CUDA_TILE_ROWS;
    const int32_t column = gated ? slot * columns + warp * 8 + g : slot * columns + warp * 16 + 2 * g + half;
    for (int32_t item = blockIdx.x; item < *call.n_token_tiles * n_groups; item += gridDim.x) {
        const token_tile tokens = call.token_tiles[item / n_groups];
        const int32_t group = item % n_groups, tile = group * tiles + slot;
        const bool is_there = slot < tiles && tile < call.n_tiles;
        for (int32_t in_tile = 0; in_tile < tokens.n_rows; in_tile++) {
            if (is_there) y[threadIdx.x] = row_sum<false>(call, tokens, tile, r, in_tile);
            if (threadIdx.x < FP8_BLOCK) v[threadIdx.x] = 0;
            __syncthreads();
            if (is_there && !gated)
                v[column] = bf16_bits(activate<activation>(0.0f, y[threadIdx.x], call.params[tokens.l]));
            if (is_there && gated && !half)
                v[column] = bf16_bits(activate<activation>(y[threadIdx.x], y[threadIdx.x + 8], call.params[tokens.l]));
            __syncthreads();
            quantise_group(call, v, group, tokens.first_row + in_tile, in_tile);
            __syncthreads();
        }
    }
}

__global__ void down_kernel(const __grid_constant__ fp8_call call)
{
    begin_kernel();
    const int32_t r = threadIdx.x, column_in_tile = r / 16 * 16 + r % 8 * 2 + r / 8 % 2;
    for (int32_t item = blockIdx.x; item < *call.n_token_tiles * call.n_tiles; item += gridDim.x) {
        const token_tile tokens = call.token_tiles[item / call.n_tiles];
        const int32_t tile = item % call.n_tiles, column = tile * CUDA_TILE_ROWS + column_in_tile;
        for (int32_t in_tile = 0; in_tile < tokens.n_rows && column < call.columns; in_tile++)
            call.out[(tokens.first_row + in_tile) * call.ldout + column] =
                bf16_bits(row_sum<true>(call, tokens, tile, r, in_tile));
    }
}

struct gate_ups {
    typedef void function(const fp8_call);
    template <moe4_activation activation> static constexpr function *of = gate_up_kernel<activation>;
};

} // namespace

int fp8_exact_gate_up(const fp8_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<gate_ups>[activation], call, n_blocks, THREADS, 0, stream);
}

int fp8_exact_down(const fp8_call *call, int32_t n_blocks, cuda_stream stream)
{
    return launch(down_kernel, call, n_blocks, CUDA_TILE_ROWS, 0, stream);
}
