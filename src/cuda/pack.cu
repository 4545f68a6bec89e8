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

/* One step of one tile a block of 128 threads. */
__global__ void pack_kernel(const __grid_constant__ pack_call call)
{
    const int64_t tile = blockIdx.x, step = blockIdx.y;
    const int32_t thread = threadIdx.x;
    int32_t base = base_of(call.ranges[0].least, call.ranges[0].most);
    const scale_range other = call.ranges[call.other_range];
    const bool is_exact = base < 0 || base_of(other.least, other.most) < 0;
    if (is_exact) base = CUDA_RAW_BASE;

    uint8_t *out = call.packed + (tile * call.n_steps + step) * CUDA_STEP_BYTES;
    out[thread] = packed_scale(call, tile, step, thread, base);
    uint4 words = {packed_word(call, tile, step, thread, 0), packed_word(call, tile, step, thread, 1),
                   packed_word(call, tile, step, thread, 2), packed_word(call, tile, step, thread, 3)};
    ((uint4 *)(out + CUDA_STEP_SCALES))[thread] = words;

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
    return cudaGetLastError();
}

int pack_matrix(const pack_call *call, cuda_stream stream)
{
    pack_kernel<<<dim3(call->n_tiles, call->n_steps), 128, 0, stream>>>(*call);
    return cudaGetLastError();
}
