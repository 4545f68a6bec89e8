/* Packs a checkpoint's matrix, already on the device, to the bytes that cuda_pack_tile makes. */
#include "cuda/launch.cuh"
#include "cuda/pack.h"

namespace
{

/* Rows are dense, so a block is aligned to its 16 bytes. */
__device__ int is_zero_block(const uint8_t *codes)
{
    const uint4 words = *(const uint4 *)codes;
    return ((words.x | words.y | words.z | words.w) & 0x77777777u) == 0;
}

__global__ void range_kernel(const __grid_constant__ pack_call call, scale_range *range)
{
    const int64_t n_blocks = call.rows * (call.K / BLOCK_SIZE);
    int32_t least = SCALE_NAN, most = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n_blocks;
         i += (int64_t)gridDim.x * blockDim.x) {
        int32_t scale = call.scales[i];
        if (!is_used_row(&call.order, i / (call.K / BLOCK_SIZE))) continue;
        if (scale != SCALE_NAN && is_zero_block(call.codes + i * BLOCK_BYTES)) continue;
        least = min(least, scale);
        most = max(most, scale);
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32) return;
    atomicMin(&range->least, least);
    atomicMax(&range->most, most);
}

/* A tile a block. */
__global__ void tile_range_kernel(const __grid_constant__ pack_call call, scale_range *range)
{
    __shared__ int32_t least, most;
    const int64_t n_blocks = call.K / BLOCK_SIZE;
    if (threadIdx.x == 0) least = SCALE_NAN, most = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < CUDA_TILE_ROWS * n_blocks; i += blockDim.x) {
        const int64_t row = source_row(&call.order, blockIdx.x, (int32_t)(i / n_blocks));
        const int64_t index = row * n_blocks + i % n_blocks;
        if (row < 0 || (call.scales[index] != SCALE_NAN && is_zero_block(call.codes + index * BLOCK_BYTES))) continue;
        atomicMin(&least, call.scales[index]);
        atomicMax(&most, call.scales[index]);
    }
    __syncthreads();
    if (threadIdx.x) return;
    call.tile_base[blockIdx.x] = (uint8_t)(most < least ? CUDA_FP8_MOST : least);
    if (!fp8_holds(least, most)) atomicOr(&range->is_wide, 1);
}

__device__ uint8_t packed_scale(const pack_call &call, int64_t tile, int64_t step, int32_t i, int32_t base)
{
    int64_t row = source_row(&call.order, tile, scale_row(i)), block = step * 2 + scale_block(i);
    if (row < 0 || block >= call.K / BLOCK_SIZE) return stored_scale(0, 1, base);
    int64_t index = row * (call.K / BLOCK_SIZE) + block;
    return stored_scale(call.scales[index], is_zero_block(call.codes + index * BLOCK_BYTES), base);
}

__device__ uint32_t packed_word(const pack_call &call, int64_t tile, int64_t step, int32_t thread, int32_t j)
{
    uint32_t pairs[4];
    for (int32_t n = 0; n < 4; n++) {
        int64_t row = source_row(&call.order, tile, word_row(thread, n)), k = step * CUDA_STEP_K + word_k(thread, j, n);
        pairs[n] = row < 0 || k >= call.K ? 0 : spread_pair(call.codes[row * (call.K / 2) + k / 2]);
    }
    return join_registers(pairs);
}

/* Four codes of a row, two bytes. */
__device__ uint32_t four_codes(const pack_call &call, int64_t row, int64_t k)
{
    if (row < 0 || k >= call.K) return 0;
    const uint8_t *codes = call.codes + row * (call.K / 2) + k / 2;
    return codes[0] | (uint32_t)codes[1] << 8;
}

__device__ uint32_t packed_fp8_word(const pack_call &call, int64_t tile, int64_t step, int32_t thread, int32_t j)
{
    const int64_t row = source_row(&call.order, tile, fp8_word_row(thread, j));
    const int64_t k = step * CUDA_STEP_K + fp8_word_k(thread, j);
    return fp8_join(four_codes(call, row, k) | four_codes(call, row, k + 16) << 16);
}

/* One step of one tile a block of 128 threads. */
__global__ void pack_kernel(const __grid_constant__ pack_call call)
{
    const int64_t tile = blockIdx.x, step = blockIdx.y;
    const int32_t thread = threadIdx.x;
    int32_t base = base_of(call.ranges[0].least, call.ranges[0].most);
    const scale_range other = call.ranges[call.other_range];
    const bool is_wide = call.tile_base && (call.ranges[0].is_wide || other.is_wide);
    const bool is_exact = base < 0 || base_of(other.least, other.most) < 0 || is_wide;
    if (is_exact) base = CUDA_RAW_BASE;

    uint8_t *out = call.packed + (tile * call.n_steps + step) * CUDA_STEP_BYTES;
    out[thread] = packed_scale(call, tile, step, thread, base);
    uint32_t words[4];
    for (int32_t j = 0; j < 4; j++)
        words[j] = call.tile_base && !is_exact ? packed_fp8_word(call, tile, step, thread, j)
                                               : packed_word(call, tile, step, thread, j);
    ((uint4 *)(out + CUDA_STEP_SCALES))[thread] = {words[0], words[1], words[2], words[3]};
    if (call.tile_base && step == 0 && thread == 0) call.tile_base[tile] = stored_scale(call.tile_base[tile], 0, base);

    if (step == 0 && thread < CUDA_TILE_ROWS) {
        int64_t row = source_row(&call.order, tile, thread);
        call.packed_bias[tile * CUDA_TILE_ROWS + thread] =
            row < 0 || !call.bias ? 0.0f : load_float(call.bias, call.bias_dtype, row);
    }
    if (tile == 0 && step == 0 && thread == 0) {
        *call.unit = is_exact ? 1.0f : ldexpf(1.0f, base);
        *call.is_exact = is_exact;
    }
}

} // namespace

int pack_range(const pack_call *call, scale_range *range, cuda_stream stream)
{
    range_kernel<<<512, 256, 0, stream>>>(*call, range);
    if (call->tile_base) tile_range_kernel<<<call->n_tiles, 256, 0, stream>>>(*call, range);
    return cudaGetLastError();
}

int pack_matrix(const pack_call *call, cuda_stream stream)
{
    pack_kernel<<<dim3(call->n_tiles, call->n_steps), 128, 0, stream>>>(*call);
    return cudaGetLastError();
}
