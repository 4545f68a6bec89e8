/* Packs a checkpoint's matrix, already on the device, to the bytes that cuda_pack_tile makes. */
#include "cuda/launch.cuh"
#include "cuda/pack.h"

namespace
{

enum {
    RANGE_THREADS = 512,
    PACK_THREADS = 128,
    PACK_STEPS = 4,                           /* that a block packs: 128 bytes of codes a row */
    ROW_CODES = PACK_STEPS * CUDA_STEP_K / 2, /* bytes */
    ROW_BLOCKS = ROW_CODES / BLOCK_BYTES,     /* and blocks of 16 */
    ROW_PITCH = ROW_CODES + 16,               /* rows of a fragment lie in different banks */
    LOAD_ROWS = PACK_THREADS / ROW_BLOCKS     /* rows that a block loads at once */
};

__device__ __forceinline__ int is_zero_block(const uint4 &codes)
{
    return ((codes.x | codes.y | codes.z | codes.w) & 0x77777777u) == 0;
}

/* Rows are dense, so a block is aligned to its 16 bytes. */
__device__ __forceinline__ uint4 load_block(const pack_call &call, int64_t row, int64_t block)
{
    return *(const uint4 *)(call.codes + (row * (call.K / BLOCK_SIZE) + block) * BLOCK_BYTES);
}

__device__ __forceinline__ int32_t load_scale(const pack_call &call, int64_t row, int64_t block)
{
    return call.scales[row * (call.K / BLOCK_SIZE) + block];
}

struct least_and_most {
    int32_t least, most;
};

/* Of the tile's scales, as a thread sees them whose warp takes every 16th row. */
__device__ least_and_most thread_range(const pack_call &call)
{
    enum { N_WARPS = RANGE_THREADS / 32, N_ROWS = CUDA_TILE_ROWS / N_WARPS };
    const int32_t n_blocks = (int32_t)(call.K / BLOCK_SIZE);
    int64_t rows[N_ROWS];
    for (int32_t i = 0; i < N_ROWS; i++) rows[i] = source_row(&call.order, blockIdx.x, threadIdx.x / 32 + i * N_WARPS);
    least_and_most range = {SCALE_NAN, 0};
    for (int32_t block = threadIdx.x % 32; block < n_blocks; block += 32)
#pragma unroll
        for (int32_t i = 0; i < N_ROWS; i++) {
            if (rows[i] < 0) continue;
            const int32_t scale = load_scale(call, rows[i], block);
            if (is_zero_block(load_block(call, rows[i], block)) && scale != SCALE_NAN) continue;
            range.least = min(range.least, scale);
            range.most = max(range.most, scale);
        }
    return range;
}

/* A tile a block. */
__global__ __launch_bounds__(RANGE_THREADS) void range_kernel(const __grid_constant__ pack_call call,
                                                              scale_range *range)
{
    __shared__ least_and_most of_tile;
    if (threadIdx.x == 0) of_tile = {SCALE_NAN, 0};
    __syncthreads();
    const least_and_most mine = thread_range(call);
    const int32_t least = __reduce_min_sync(~0u, mine.least), most = __reduce_max_sync(~0u, mine.most);
    if (threadIdx.x % 32 == 0) {
        atomicMin(&of_tile.least, least);
        atomicMax(&of_tile.most, most);
    }
    __syncthreads();
    if (threadIdx.x) return;
    atomicMin(&range->least, of_tile.least);
    atomicMax(&range->most, of_tile.most);
    if (!call.tile_base) return;
    call.tile_base[blockIdx.x] = (uint8_t)(of_tile.most < of_tile.least ? CUDA_FP8_MOST : of_tile.least);
    if (!fp8_holds(of_tile.least, of_tile.most)) atomicOr(&range->is_wide, 1);
}

/* What a block packs: rows of a tile, padding as zeros. */
struct pack_rows {
    alignas(16) uint8_t codes[CUDA_TILE_ROWS][ROW_PITCH];
};

__device__ __forceinline__ void load_rows(const pack_call &call, int64_t tile, int64_t first_block, pack_rows &rows)
{
    const int32_t column = threadIdx.x % ROW_BLOCKS, n_blocks = (int32_t)(call.K / BLOCK_SIZE);
    uint4 loaded[CUDA_TILE_ROWS / LOAD_ROWS];
#pragma unroll
    for (int32_t i = 0; i < CUDA_TILE_ROWS / LOAD_ROWS; i++) {
        const int64_t row = source_row(&call.order, tile, threadIdx.x / ROW_BLOCKS + i * LOAD_ROWS);
        loaded[i] = {0, 0, 0, 0};
        if (row >= 0 && first_block + column < n_blocks) loaded[i] = load_block(call, row, first_block + column);
    }
#pragma unroll
    for (int32_t i = 0; i < CUDA_TILE_ROWS / LOAD_ROWS; i++)
        *(uint4 *)(rows.codes[threadIdx.x / ROW_BLOCKS + i * LOAD_ROWS] + column * BLOCK_BYTES) = loaded[i];
}

/* Block `block` of the loaded row r. */
__device__ __forceinline__ const uint4 &block_at(const pack_rows &rows, int32_t r, int32_t block)
{
    return *(const uint4 *)(rows.codes[r] + block * BLOCK_BYTES);
}

/* Byte t of each word of the thread's two rows, words 2j and 2j+1 to word j of the result. */
__device__ __forceinline__ uint4 packed_words(const pack_rows &rows, int32_t step)
{
    const int32_t shift = threadIdx.x % 4 * 8;
    uint32_t words[4];
#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        const uint4 a = block_at(rows, word_row(threadIdx.x, 0), 2 * step + half);
        const uint4 b = block_at(rows, word_row(threadIdx.x, 1), 2 * step + half);
        const uint32_t first[4] = {spread_pair(a.x >> shift), spread_pair(b.x >> shift), spread_pair(a.y >> shift),
                                   spread_pair(b.y >> shift)};
        const uint32_t second[4] = {spread_pair(a.z >> shift), spread_pair(b.z >> shift), spread_pair(a.w >> shift),
                                    spread_pair(b.w >> shift)};
        words[2 * half] = join_registers(first);
        words[2 * half + 1] = join_registers(second);
    }
    return {words[0], words[1], words[2], words[3]};
}

/* Codes 4t..4t+3 and 16+4t..16+4t+3 of a block. */
__device__ __forceinline__ uint32_t packed_fp8_word(const uint4 &block, int32_t t)
{
    const uint32_t low = t < 2 ? block.x : block.y, high = t < 2 ? block.z : block.w;
    return fp8_join(__byte_perm(low, high, t % 2 ? 0x7632 : 0x5410));
}

__device__ __forceinline__ uint4 packed_fp8_words(const pack_rows &rows, int32_t step)
{
    const int32_t t = threadIdx.x % 4, a = fp8_word_row(threadIdx.x, 0), b = fp8_word_row(threadIdx.x, 1);
    return {packed_fp8_word(block_at(rows, a, 2 * step), t), packed_fp8_word(block_at(rows, b, 2 * step), t),
            packed_fp8_word(block_at(rows, a, 2 * step + 1), t), packed_fp8_word(block_at(rows, b, 2 * step + 1), t)};
}

/* How the expert's matrices are stored. */
struct pack_form {
    int32_t base;
    bool is_exact;
};

__device__ __forceinline__ pack_form form_of(const pack_call &call)
{
    const scale_range mine = call.ranges[0], other = call.ranges[call.other_range];
    const int32_t base = base_of(mine.least, mine.most);
    const bool is_wide = call.tile_base && (mine.is_wide || other.is_wide);
    if (base < 0 || base_of(other.least, other.most) < 0 || is_wide) return {CUDA_RAW_BASE, true};
    return {base, false};
}

/* By the block of a tile's first steps: what there is one of a tile, or of the matrix. */
__device__ void pack_tile_numbers(const pack_call &call, int64_t tile, pack_form form)
{
    if (threadIdx.x < CUDA_TILE_ROWS) {
        const int64_t row = source_row(&call.order, tile, threadIdx.x);
        call.packed_bias[tile * CUDA_TILE_ROWS + threadIdx.x] =
            row < 0 || !call.bias ? 0.0f : load_float(call.bias, call.bias_dtype, row);
    }
    if (threadIdx.x) return;
    if (call.tile_base) call.tile_base[tile] = stored_scale(call.tile_base[tile], 0, form.base);
    if (tile) return;
    *call.unit = form.is_exact ? 1.0f : ldexpf(1.0f, form.base);
    *call.is_exact = form.is_exact;
}

/* Some steps of a tile a block. */
__global__ __launch_bounds__(PACK_THREADS) void pack_kernel(const __grid_constant__ pack_call call)
{
    __shared__ pack_rows rows;
    const int64_t tile = blockIdx.x, first_step = (int64_t)blockIdx.y * PACK_STEPS;
    const pack_form form = form_of(call);
    const int32_t scaled = scale_row(threadIdx.x), block = scale_block(threadIdx.x);
    const int64_t row = source_row(&call.order, tile, scaled), n_blocks = call.K / BLOCK_SIZE;
    int32_t scales[PACK_STEPS];
#pragma unroll
    for (int32_t s = 0; s < PACK_STEPS; s++) {
        const int64_t b = 2 * (first_step + s) + block;
        scales[s] = row < 0 || b >= n_blocks ? 0 : load_scale(call, row, b);
    }
    load_rows(call, tile, 2 * first_step, rows);
    __syncthreads();

    uint8_t *out = call.packed + (tile * call.n_steps + first_step) * CUDA_STEP_BYTES;
#pragma unroll
    for (int32_t s = 0; s < PACK_STEPS; s++, out += CUDA_STEP_BYTES) {
        if (first_step + s >= call.n_steps) break;
        out[threadIdx.x] = stored_scale(scales[s], is_zero_block(block_at(rows, scaled, 2 * s + block)), form.base);
        ((uint4 *)(out + CUDA_STEP_SCALES))[threadIdx.x] =
            call.tile_base && !form.is_exact ? packed_fp8_words(rows, s) : packed_words(rows, s);
    }
    if (first_step == 0) pack_tile_numbers(call, tile, form);
}

} // namespace

int pack_range(const pack_call *call, scale_range *range, cuda_stream stream)
{
    range_kernel<<<call->n_tiles, RANGE_THREADS, 0, stream>>>(*call, range);
    return cudaGetLastError();
}

int pack_matrix(const pack_call *call, cuda_stream stream)
{
    const dim3 blocks(call->n_tiles, (call->n_steps + PACK_STEPS - 1) / PACK_STEPS);
    pack_kernel<<<blocks, PACK_THREADS, 0, stream>>>(*call);
    return cudaGetLastError();
}
