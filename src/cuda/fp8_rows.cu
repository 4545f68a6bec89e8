/* Rows of x and of the intermediate in fp8 compute: gathering with quantisation, and dense copies for callers. */
#include "cuda/fp8_quantize.cuh"
#include "cuda/launch.cuh"

namespace
{

constexpr int MAX_THREADS = 1024, CHUNK = 16;

__device__ uint32_t load_pair(const fp8_gather_call &call, int64_t index, const float *weight)
{
    uint16_t low = bf16_bits(load_float(call.x, call.dtype, index));
    uint16_t high = bf16_bits(load_float(call.x, call.dtype, index + 1));
    if (weight) low = bf16_bits(bf16_float(low) * *weight), high = bf16_bits(bf16_float(high) * *weight);
    return low | (uint32_t)high << 16;
}

/* Columns 16*chunk .. of a token as bf16, times the router's weight where that goes on the input. */
__device__ chunk16 load_chunk(const fp8_gather_call &call, int64_t token, int64_t chunk)
{
    const int64_t index = token * call.ldx + chunk * CHUNK;
    if (chunk * CHUNK >= call.columns) return {};
    if (call.is_direct) {
        const uint4 *from = (const uint4 *)((const uint16_t *)call.x + index);
        return {from[0], from[1]};
    }
    const float *weight = call.weights ? call.weights + token : nullptr;
    uint32_t words[8];
    for (int i = 0; i < 8; i++) words[i] = load_pair(call, index + 2 * i, weight);
    return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

/* The largest of all threads' numbers. */
__device__ uint32_t block_max(uint32_t value)
{
    __shared__ uint32_t warps[MAX_THREADS / 32];
    value = __reduce_max_sync(~0u, value);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    value = __reduce_max_sync(~0u, lane < blockDim.x / 32 ? warps[lane] : 0);
    __syncthreads();
    return value;
}

/* One chunk of codes to each of the token's routed rows, or to its own. */
__device__ void scatter(const fp8_gather_call &call, int64_t token, int64_t chunk, uint4 codes)
{
    const int64_t block = chunk / 8 * call.out.rows;
    if (!call.row_map) {
        *(uint4 *)(call.out.codes + (block + token) * FP8_BLOCK + fp8_chunk_offset(0, chunk % 8)) = codes;
        return;
    }
    for (int32_t a = 0; a < call.top_k; a++) {
        const int64_t slot = token * call.top_k + a, row = call.row_map[slot];
        if (row < 0) continue;
        const int64_t at = (block + row) * FP8_BLOCK;
        *(uint4 *)(call.out.codes + at + fp8_chunk_offset(row - call.first[call.locals[slot]], chunk % 8)) = codes;
    }
}

__device__ void scatter_scale(const fp8_gather_call &call, int64_t token, float scale)
{
    if (!call.row_map && threadIdx.x == 0) call.out.scales[token] = scale;
    for (int32_t a = threadIdx.x; call.row_map && a < call.top_k; a += blockDim.x) {
        const int64_t row = call.row_map[token * call.top_k + a];
        if (row >= 0) call.out.scales[row] = scale;
    }
}

/* A thread keeps its first chunk, which is its only one as a rule, and reads others twice. */
__device__ void gather_values(const fp8_gather_call &call, int64_t token, int64_t n_chunks)
{
    const chunk16 first = load_chunk(call, token, threadIdx.x);
    uint32_t largest = fp8_larger(fp8_larger(0, first.first), first.second);
    for (int64_t chunk = threadIdx.x + blockDim.x; chunk < n_chunks; chunk += blockDim.x) {
        const chunk16 v = load_chunk(call, token, chunk);
        largest = fp8_larger(fp8_larger(largest, v.first), v.second);
    }
    const fp8_divisor by = fp8_divisor_of(block_max(fp8_largest(largest)));
    for (int64_t chunk = threadIdx.x; chunk < n_chunks; chunk += blockDim.x) {
        const chunk16 v = chunk == threadIdx.x ? first : load_chunk(call, token, chunk);
        scatter(call, token, chunk, fp8_chunk(v.first, v.second, by));
    }
    scatter_scale(call, token, by.scale);
}

__device__ void gather_codes(const fp8_gather_call &call, int64_t token, int64_t n_chunks)
{
    const float scale = call.x_scale[token * call.ldx_scale];
    for (int64_t chunk = threadIdx.x; chunk < n_chunks; chunk += blockDim.x) {
        uint32_t words[4] = {0, 0, 0, 0};
        for (int i = 0; i < CHUNK && chunk * CHUNK < call.columns; i++)
            words[i / 4] |= (uint32_t)((const uint8_t *)call.x)[token * call.ldx + chunk * CHUNK + i] << i % 4 * 8;
        scatter(call, token, chunk, {words[0], words[1], words[2], words[3]});
    }
    scatter_scale(call, token, fabsf(scale) < INFINITY ? scale : __uint_as_float(0x7FC00000u));
}

/* The scales of the intermediate that the token's slots may have. */
__device__ void clear_scales(const fp8_gather_call &call, int64_t token)
{
    for (int32_t i = threadIdx.x; i < call.n_cleared * call.top_k; i += blockDim.x)
        call.v_scales[i / call.top_k * call.out.rows + token * call.top_k + i % call.top_k] = 0.0f;
}

__global__ void __launch_bounds__(MAX_THREADS) gather_kernel(const __grid_constant__ fp8_gather_call call)
{
    begin_kernel();
    const int64_t n_tokens = token_count_of(call.T);
    const int64_t n_chunks = (call.columns + FP8_BLOCK - 1) / FP8_BLOCK * (FP8_BLOCK / CHUNK);
    for (int64_t token = blockIdx.x; token < n_tokens; token += gridDim.x) {
        clear_scales(call, token);
        if (call.dtype == MOE4_DTYPE_F8_E4M3)
            gather_codes(call, token, n_chunks);
        else
            gather_values(call, token, n_chunks);
    }
}

/* A block a row of a tile. */
__global__ void copy_kernel(const __grid_constant__ fp8_copy_call call)
{
    begin_kernel();
    const int64_t n_groups = (call.columns + FP8_BLOCK - 1) / FP8_BLOCK;
    for (int32_t i = blockIdx.x; i < *call.n_token_tiles; i += gridDim.x) {
        const token_tile tile = call.token_tiles[i];
        for (int32_t r = 0; r < tile.n_rows; r++) {
            const int64_t row = tile.first_row + r, to = call.row_output ? call.row_output[row] : row;
            for (int64_t k = threadIdx.x; call.codes && k < call.columns; k += blockDim.x)
                call.codes[to * call.columns + k] =
                    call.from.codes[(k / FP8_BLOCK * call.from.rows + row) * FP8_BLOCK +
                                    fp8_chunk_offset(r, k % FP8_BLOCK / CHUNK) + k % CHUNK];
            for (int64_t g = threadIdx.x; call.scales && g < n_groups; g += blockDim.x)
                call.scales[to * n_groups + g] = call.from.scales[g * call.from.rows + row];
        }
    }
}

} // namespace

int fp8_gather(const fp8_gather_call *call, cuda_stream stream)
{
    const int64_t chunks = (call->columns + FP8_BLOCK - 1) / FP8_BLOCK * (FP8_BLOCK / CHUNK);
    const int threads = (int)min((chunks + 31) / 32 * 32, (int64_t)MAX_THREADS);
    return launch(gather_kernel, call, min(call->T.n_tokens, 65535), threads, 0, stream);
}

int fp8_copy(const fp8_copy_call *call, cuda_stream stream)
{
    return launch(copy_kernel, call, 1024, 128, 0, stream);
}
