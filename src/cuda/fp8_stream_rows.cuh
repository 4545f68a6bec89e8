/* How rows come into shared memory in fp8_stream.cuh: four warps bring a segment's, as codes, or as bf16 that they
 * quantise where there are so few that another kernel for it would cost more. */
#ifndef MOE4_CUDA_FP8_STREAM_ROWS_CUH
#define MOE4_CUDA_FP8_STREAM_ROWS_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream.cuh"

namespace fp8_stream
{

enum : int { LOADERS = 128 /* threads */ };

/* The rows of segments in shared memory: [blocks of 128 k][width][128 bytes], the width being that of the token tile,
 * and their scales, [blocks][width] of the intermediate, [width] of x. */
struct row_store {
    uint32_t codes, scales;
    uint32_t full, empty; /* barriers, one a buffer */
    uint32_t maxima;      /* a word a warp of the loaders */
    int n_blocks, rows;   /* rows: the most that a token tile has */

    __device__ __forceinline__ uint32_t codes_of(int buffer) const
    {
        return codes + buffer * n_blocks * rows * FP8_BLOCK;
    }
    __device__ __forceinline__ uint32_t scales_of(int buffer) const
    {
        return scales + buffer * n_blocks * rows * 4;
    }
};

static __device__ __forceinline__ int width_of(const token_tile &tokens)
{
    return (tokens.n_rows + 7) / 8 * 8;
}

/* ---- The block's share ------------------------------------------------------------------------------------------ */

/* As share_of_block has it; but where wide token tiles leave room for one buffer of rows, and as many blocks for each
 * of them leave few without work, none has to go from one token tile to the next. */
static __device__ __forceinline__ stream_share share_of(const stream_call &call, int n_token_tiles, int n_tiles)
{
    const int n_blocks = gridDim.x, each = n_blocks / max(n_token_tiles, 1), block = blockIdx.x;
    if (call.n_buffers > 1 || n_token_tiles * each * 16 < n_blocks * 15) return share_of_block(n_token_tiles, n_tiles);
    const int part = block % each, first = part * n_tiles / each, n_own = (part + 1) * n_tiles / each - first;
    const bool is_there = block < n_token_tiles * each;
    return {{block / each, first}, is_there ? n_own : 0, is_there && n_own ? 1 : 0};
}

/* ---- Rows in e4m3 ----------------------------------------------------------------------------------------------- */

/* x: rows of tokens, which know no swizzle; a warp a row. */
static __device__ __forceinline__ void gather_x(const fp8_stream_call &call, const row_store &store, int buffer,
                                                const token_tile &tokens, bool is_dry)
{
    const int lane = threadIdx.x % 32, width = width_of(tokens);
    const int64_t block_bytes = call.x.rows * FP8_BLOCK;
    const int sources = !is_dry && lane < tokens.n_rows ? call.stream.gemm.row_source[tokens.first_row + lane] : 0;
    for (int row = threadIdx.x % LOADERS / 32; row < tokens.n_rows; row += LOADERS / 32) {
        const int source = __shfl_sync(~0u, sources, row);
        const uint8_t *from = call.x.codes + lane / 8 * block_bytes + (int64_t)source * FP8_BLOCK + lane % 8 * 16;
        uint32_t to = store.codes_of(buffer) + (lane / 8 * width + row) * FP8_BLOCK + (lane % 8 ^ row % 8) * 16;
#pragma unroll 4
        for (int block = lane / 8; block < store.n_blocks; block += 4) {
            copy16_if(!is_dry, to, from, 16);
            from += 4 * block_bytes, to += 4 * width * FP8_BLOCK;
        }
        if (!is_dry && lane == 0) copy4(store.scales_of(buffer) + row * 4, call.x.scales + source);
    }
}

/* The intermediate: a bulk copy a block, whose scales are a warp's. */
static __device__ __forceinline__ void load_v(const fp8_stream_call &call, const row_store &store, int buffer,
                                              const token_tile &tokens, bool is_dry)
{
    const int thread = threadIdx.x % LOADERS, lane = thread % 32, width = width_of(tokens);
    const uint32_t full = store.full + buffer * 8, bytes = tokens.n_rows * FP8_BLOCK;
    for (int block = thread; block < store.n_blocks; block += LOADERS) {
        if (is_dry) continue;
        barrier_expect(full, bytes);
        bulk_copy(store.codes_of(buffer) + block * width * FP8_BLOCK,
                  call.x.codes + (block * call.x.rows + tokens.first_row) * FP8_BLOCK, bytes, full);
    }
    if (lane >= tokens.n_rows) return;
    for (int block = thread / 32; block < store.n_blocks; block += LOADERS / 32)
        if (!is_dry)
            copy4(store.scales_of(buffer) + (block * width + lane) * 4,
                  call.x.scales + block * call.x.rows + tokens.first_row + lane);
}

/* ---- Rows in bf16 ----------------------------------------------------------------------------------------------- */

/* A row of x or of the intermediate. */
struct source_row {
    const uint16_t *values;
    uint32_t to; /* its bytes of block 0 */
    int row, K;  /* row: in its token tile */

    __device__ __forceinline__ chunk16 load(int chunk) const
    {
        if (chunk * 16 >= K) return {};
        const uint4 *from = (const uint4 *)(values + chunk * 16);
        return {from[0], from[1]};
    }
    __device__ __forceinline__ void store(int chunk, const chunk16 &v, const fp8_divisor &by) const
    {
        constexpr int chunks = FP8_BLOCK / 16;
        store_shared_16(to + chunk / chunks * STREAM_ROWS * FP8_BLOCK + (uint32_t)fp8_chunk_offset(row, chunk % chunks),
                        fp8_chunk(v.first, v.second, by));
    }
};

static __device__ __forceinline__ source_row row_of(const gemm_call &call, const row_store &store, int buffer,
                                                    const token_tile &tokens, int row, bool is_dry = false)
{
    int from = tokens.first_row + row;
    if (call.row_source && !is_dry) from = call.row_source[from];
    return {call.x + from * call.ldx, store.codes_of(buffer) + row * FP8_BLOCK, row, call.K};
}

/* x: one scale a row.  The warps share up to four rows, whose parts' maxima meet in shared memory; what a lane does not
 * keep comes from the first-level cache when it is read again. */
static __device__ __forceinline__ void quantise_x(const gemm_call &call, const row_store &store, int buffer,
                                                  const token_tile &tokens, bool is_dry)
{
    constexpr int kept = 2, warps = LOADERS / 32;
    const int warp = threadIdx.x % LOADERS / 32, lane = threadIdx.x % 32, n_chunks = store.n_blocks * (FP8_BLOCK / 16);
    for (int first = 0; first < tokens.n_rows; first += warps) {
        const int n_rows = min(tokens.n_rows - first, warps), n_parts = n_rows == 1 ? 4 : n_rows == 2 ? 2 : 1;
        const int part = warp % n_parts, own = part * 32 + lane, step = n_parts * 32;
        const bool is_there = warp / n_parts < n_rows;
        const source_row row = row_of(call, store, buffer, tokens, first + (is_there ? warp / n_parts : 0), is_dry);
        chunk16 v[kept];
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < kept; i++) v[i] = row.load(own + i * step);
        for (int chunk = own + kept * step; chunk < n_chunks; chunk += step) {
            const chunk16 more = row.load(chunk);
            most = fp8_larger(fp8_larger(most, more.first), more.second);
        }
#pragma unroll
        for (int i = 0; i < kept; i++) most = fp8_larger(fp8_larger(most, v[i].first), v[i].second);
        most = __reduce_max_sync(~0u, fp8_largest(most));
        if (lane == 0) store_shared_4(store.maxima + warp * 4, most);
        barrier_sync<LOADERS>(1);
        most = 0;
        for (int i = 0; i < n_parts; i++) most = max(most, load_shared_4(store.maxima + (warp - part + i) * 4));
        const fp8_divisor by = fp8_divisor_of(most);
        if (is_there) {
#pragma unroll
            for (int i = 0; i < kept; i++)
                if (own + i * step < n_chunks) row.store(own + i * step, v[i], by);
            for (int chunk = own + kept * step; chunk < n_chunks; chunk += step) row.store(chunk, row.load(chunk), by);
            if (own == 0) store_shared_4(store.scales_of(buffer) + row.row * 4, __float_as_uint(by.scale));
        }
        barrier_sync<LOADERS>(1);
    }
}

/* The intermediate: a scale for each block; eight lanes a block, whose maxima meet in shared memory. */
static __device__ __forceinline__ void quantise_v(const gemm_call &call, const row_store &store, int buffer,
                                                  const token_tile &tokens)
{
    constexpr int chunks = FP8_BLOCK / 16;
    const int thread = threadIdx.x % LOADERS, n_units = tokens.n_rows * store.n_blocks;
    for (int first = thread / 32 * 4; first < n_units; first += LOADERS / chunks) {
        const bool is_there = first + thread % 32 / chunks < n_units;
        const int unit = is_there ? first + thread % 32 / chunks : first;
        const int block = unit / tokens.n_rows, chunk = block * chunks + thread % chunks;
        const source_row row = row_of(call, store, buffer, tokens, unit % tokens.n_rows);
        const chunk16 v = row.load(chunk);
        const fp8_divisor by = fp8_divisor_of_eight(v);
        if (is_there) row.store(chunk, v, by);
        if (is_there && thread % chunks == 0)
            store_shared_4(store.scales_of(buffer) + (block * STREAM_ROWS + row.row) * 4, __float_as_uint(by.scale));
    }
}

/* is_dry: as if, for the sake of the instruction caches. */
template <bool is_down>
static __device__ __forceinline__ void load_segment(const fp8_stream_call &call, const row_store &store, int segment,
                                                    const token_tile &tokens, bool is_dry)
{
    const stream_call &stream = call.stream;
    const int buffer = segment % stream.n_buffers, round = segment / stream.n_buffers;
    if (round) barrier_wait(store.empty + buffer * 8, round - 1 & 1);
    if (call.is_bf16) {
        if (is_down)
            quantise_v(stream.gemm, store, buffer, tokens);
        else
            quantise_x(stream.gemm, store, buffer, tokens, is_dry);
        async_proxy_fence();
    } else if (is_down) {
        load_v(call, store, buffer, tokens, is_dry);
    } else {
        gather_x(call, store, buffer, tokens, is_dry);
    }
    if (!is_dry) copies_arrive(store.full + buffer * 8);
}

/* What the warps that load do in down, whose token tiles are old; without any rows at first, as in gate/up. */
static __device__ __forceinline__ void serve_down(const fp8_stream_call &call, const row_store &store)
{
    const stream_call &stream = call.stream;
    launch_dependents();
    __syncthreads();
    const stream_share share = share_of(stream, *stream.gemm.n_token_tiles, stream.gemm.n_tiles);
    for (int segment = call.is_bf16 ? 0 : -1; segment < share.n_segments; segment++) {
        const bool is_dry = segment < 0;
        const token_tile tokens = stream.gemm.token_tiles[share.first.token_tile + max(segment, 0)];
        if (segment == 0) wait_for_predecessors();
        load_segment<true>(call, store, max(segment, 0), tokens, is_dry);
    }
}

} // namespace fp8_stream

#endif
