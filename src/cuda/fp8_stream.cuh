/* The fp8 GEMMs for few rows an expert: tiles, teams and rings of stream.cuh, products of fp8.cuh.
 *
 * x comes as the caller's bf16, the intermediate as gate/up's; four warps of their own quantise a segment's rows into
 * shared memory, [blocks of 128 k][8 rows][128 bytes] in wgmma's swizzle, and their scales behind all buffers.  A team
 * is a warpgroup.  Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"): a block of 128 k is added up by the tensor
 * core from zero, and blocks are promoted in ascending order. */
#ifndef MOE4_CUDA_FP8_STREAM_CUH
#define MOE4_CUDA_FP8_STREAM_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_stream
{

enum : int {
    QUANTISERS = 128, /* threads */
    THREADS = STREAM_THREADS + QUANTISERS,
    TEAM_THREADS = STREAM_TEAMS * TEAM,
    TEAM_REGISTERS = 96, /* of what 80 a thread leave when the others give some back */
    FILLER_REGISTERS = 40,
    QUANTISER_REGISTERS = 56,
    N = STREAM_ROWS,
    X_BLOCK_BYTES = N * FP8_BLOCK,
    CHUNKS = FP8_BLOCK / 16 /* of a block */
};

/* Where the rows of segments lie in shared memory. */
struct row_store {
    uint32_t codes, scales, maxima; /* maxima: a word a quantiser, or a warp's part of a row */
    uint32_t full, empty;           /* barriers, one a buffer */
    int n_blocks;

    __device__ __forceinline__ uint32_t codes_of(int buffer) const
    {
        return codes + buffer * n_blocks * X_BLOCK_BYTES;
    }
    /* [blocks][8 rows] of the intermediate, [8 rows] of x */
    __device__ __forceinline__ uint32_t scales_of(int buffer) const
    {
        return scales + buffer * n_blocks * N * 4;
    }
};

/* ---- Quantisers -------------------------------------------------------------------------------------------------- */

/* A row of x or of the intermediate. */
struct source_row {
    const uint16_t *values;
    uint32_t to; /* its bytes of block 0 */
    int row;     /* in its token tile */
};

static __device__ __forceinline__ source_row row_of(const gemm_call &call, const row_store &store, int buffer,
                                                    const token_tile &tokens, int row)
{
    int from = tokens.first_row + row;
    if (call.row_source) from = call.row_source[from];
    return {call.x + from * call.ldx, store.codes_of(buffer) + row * FP8_BLOCK, row};
}

struct chunk16 {
    uint4 first, second;
};

static __device__ __forceinline__ chunk16 load_chunk(const gemm_call &call, const source_row &row, int chunk)
{
    if (chunk * 16 >= call.K) return {};
    const uint4 *from = (const uint4 *)(row.values + chunk * 16);
    return {from[0], from[1]};
}

static __device__ __forceinline__ void store_chunk(const source_row &row, int chunk, const chunk16 &v,
                                                   const fp8_divisor &by)
{
    store_shared_16(row.to + chunk / CHUNKS * X_BLOCK_BYTES + (uint32_t)fp8_chunk_offset(row.row, chunk % CHUNKS),
                    fp8_chunk(v.first, v.second, by));
}

/* A warp's part of a row of x: chunks first, first + step, ... */
struct row_part {
    source_row row;
    int first, step;
};

static __device__ __forceinline__ row_part part_of_warp(const gemm_call &call, const row_store &store, int buffer,
                                                        const token_tile &tokens, int part, int n_parts)
{
    return {row_of(call, store, buffer, tokens, part / n_parts), part % n_parts * 32 + (int)threadIdx.x % 32,
            n_parts * 32};
}

/* x: one scale a row.  The warps share few rows, whose parts' maxima meet in shared memory; rows come from the
 * first-level cache when they are read again. */
static __device__ __forceinline__ void quantise_x(const gemm_call &call, const row_store &store, int buffer,
                                                  const token_tile &tokens)
{
    const int n_parts = tokens.n_rows == 1 ? 4 : tokens.n_rows == 2 ? 2 : 1, n_chunks = store.n_blocks * CHUNKS;
    const int warp = threadIdx.x % QUANTISERS / 32, lane = threadIdx.x % 32;
    for (int part = warp; part < tokens.n_rows * n_parts; part += QUANTISERS / 32) {
        const row_part own = part_of_warp(call, store, buffer, tokens, part, n_parts);
        uint32_t most = 0;
#pragma unroll 3
        for (int chunk = own.first; chunk < n_chunks; chunk += own.step) {
            const chunk16 v = load_chunk(call, own.row, chunk);
            most = fp8_larger(fp8_larger(most, v.first), v.second);
        }
        most = __reduce_max_sync(~0u, fp8_largest(most));
        if (lane == 0) store_shared_4(store.maxima + part * 4, most);
    }
    barrier_sync<QUANTISERS>(1);
    for (int part = warp; part < tokens.n_rows * n_parts; part += QUANTISERS / 32) {
        const row_part own = part_of_warp(call, store, buffer, tokens, part, n_parts);
        uint32_t most = 0;
        for (int i = 0; i < n_parts; i++)
            most = max(most, load_shared_4(store.maxima + (part / n_parts * n_parts + i) * 4));
        const fp8_divisor by = fp8_divisor_of(most);
#pragma unroll 2
        for (int chunk = own.first; chunk < n_chunks; chunk += own.step)
            store_chunk(own.row, chunk, load_chunk(call, own.row, chunk), by);
        if (part % n_parts == 0 && lane == 0)
            store_shared_4(store.scales_of(buffer) + part / n_parts * 4, __float_as_uint(by.scale));
    }
    barrier_sync<QUANTISERS>(1);
}

/* The intermediate: a scale for each block; eight lanes a block, whose maxima meet in shared memory. */
static __device__ __forceinline__ void quantise_v(const gemm_call &call, const row_store &store, int buffer,
                                                  const token_tile &tokens)
{
    const int thread = threadIdx.x % QUANTISERS, n_units = tokens.n_rows * store.n_blocks;
    const uint32_t own = store.maxima + thread / CHUNKS * CHUNKS * 4;
    for (int first = thread / 32 * 4; first < n_units; first += QUANTISERS / CHUNKS) {
        const bool is_there = first + thread % 32 / CHUNKS < n_units;
        const int unit = is_there ? first + thread % 32 / CHUNKS : first;
        const int block = unit / tokens.n_rows, chunk = block * CHUNKS + thread % CHUNKS;
        const source_row row = row_of(call, store, buffer, tokens, unit % tokens.n_rows);
        const chunk16 v = load_chunk(call, row, chunk);
        store_shared_4(store.maxima + thread * 4, fp8_larger(fp8_larger(0, v.first), v.second));
        __syncwarp();
        const uint4 low = load_shared_16(own), high = load_shared_16(own + 16);
        const uint32_t most = __vmaxu2(__vmaxu2(__vmaxu2(low.x, low.y), __vmaxu2(low.z, low.w)),
                                       __vmaxu2(__vmaxu2(high.x, high.y), __vmaxu2(high.z, high.w)));
        __syncwarp();
        const fp8_divisor by = fp8_divisor_of(fp8_largest(most));
        if (is_there) store_chunk(row, chunk, v, by);
        if (is_there && thread % CHUNKS == 0)
            store_shared_4(store.scales_of(buffer) + (block * N + row.row) * 4, __float_as_uint(by.scale));
    }
}

template <bool is_down>
static __device__ __forceinline__ void quantise_segments(const stream_block &block, const row_store &store)
{
    const gemm_call &call = block.call.gemm;
    wait_for_predecessors();
    for (int segment = 0; segment < block.share.n_segments; segment++) {
        const int buffer = segment % block.call.n_buffers, round = segment / block.call.n_buffers;
        const token_tile tokens = call.token_tiles[block.share.first.token_tile + segment];
        if (round) barrier_wait(store.empty + buffer * 8, round - 1 & 1);
        if (is_down)
            quantise_v(call, store, buffer, tokens);
        else
            quantise_x(call, store, buffer, tokens);
        async_proxy_fence();
        barrier_arrive(store.full + buffer * 8);
    }
}

/* ---- Sums ------------------------------------------------------------------------------------------------------- */

/* A lane's part of a block of 128 k from a step on; a block of one step has it twice, since x is zero in the second. */
static __device__ __forceinline__ void decode_block(uint32_t step, int left, const fp8_magnitudes &of,
                                                    uint32_t (&a)[16])
{
    const packed_step first = load_step(step), second = load_step(left > 1 ? step + CUDA_STEP_BYTES : step);
    fp8_decode_step(first.codes, first.scales, of, a);
    fp8_decode_step(second.codes, second.scales, of, a + 8);
}

static __device__ __forceinline__ void multiply_block(float (&d)[N / 2], uint32_t (&a)[16], uint32_t b)
{
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    wgmma_fence();
    wgmma_fp8<N, false>::run(d, a, b);
    wgmma_fp8<N, true>::run(d, a + 4, b + 2);
    wgmma_fp8<N, true>::run(d, a + 8, b + 4);
    wgmma_fp8<N, true>::run(d, a + 12, b + 6);
    wgmma_commit();
}

/* `scales`: of the thread's first two rows. */
template <bool is_down>
static __device__ __forceinline__ void promote_block(float (&total)[N / 2], float (&d)[N / 2], uint32_t scales)
{
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const uint2 bits = is_down ? load_shared_8(scales + j * 32) : make_uint2(0, 0);
        const float s[2] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &to = total[4 * j + i];
            to = is_down ? fmaf(d[4 * j + i], s[i % 2], to) : to + d[4 * j + i];
        }
    }
}

/* All of K: a block is decoded while the one before is multiplied. */
template <bool is_down>
static __device__ __forceinline__ void multiply_tile(const stream_block &block, const fp8_magnitudes &of,
                                                     float (&total)[N / 2], uint32_t x, uint32_t scales, ring_place &at)
{
    static_assert(STREAM_STEPS == 4, "two blocks a stage");
    constexpr uint32_t block_units = X_BLOCK_BYTES / 16;
    uint32_t a[2][16], b = x >> 4 | 1 << 16;
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = total[i] = 0.0f;
    barrier_wait(at.full, at.parity);
    decode_block(at.stage, block.call.gemm.n_steps, of, a[0]);
    for (int left = block.call.gemm.n_steps;; b += 2 * block_units, scales += 2 * N * 4) {
        multiply_block(d, a[0], b);
        if (left > 2) decode_block(at.stage + 2 * CUDA_STEP_BYTES, left - 2, of, a[1]);
        barrier_arrive(at.empty); /* all of this stage is read */
        advance(block.call, at);
        promote_block<is_down>(total, d, scales);
        if ((left -= 2) <= 0) return;
        multiply_block(d, a[1], b + block_units);
        if (left > 2) {
            barrier_wait(at.full, at.parity);
            decode_block(at.stage, left - 2, of, a[0]);
        }
        promote_block<is_down>(total, d, scales + N * 4);
        if ((left -= 2) <= 0) return;
    }
}

/* ---- A team's tiles --------------------------------------------------------------------------------------------- */

/* Leaves segments until this one's rows are there. */
static __device__ __forceinline__ void enter(const stream_block &block, const row_store &store, int *segment,
                                             int wanted)
{
    const int n_buffers = block.call.n_buffers;
    while (*segment < wanted) {
        if (*segment >= 0) barrier_arrive(store.empty + *segment % n_buffers * 8);
        ++*segment;
        barrier_wait(store.full + *segment % n_buffers * 8, *segment / n_buffers & 1);
    }
}

template <moe4_activation activation, bool is_down>
static __device__ __forceinline__ void run_tiles(const fp8_stream_call &call, const stream_block &block,
                                                 const row_store &store, ring_place at)
{
    const gemm_call &gemm = block.call.gemm;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / 4, columns = threadIdx.x % 4 * 8;
    tile_place tile = block.share.first;
    advance(tile, team, gemm.n_tiles);
    int segment = -1;
    for (int left = block.share.n_tiles - team; left > 0; left -= STREAM_TEAMS) {
        const token_tile tokens = gemm.token_tiles[tile.token_tile];
        const strip own = {tile.tile, warp % 4};
        const int base = call.tile_base[(int64_t)tokens.l * gemm.n_tiles + tile.tile];
        const fp8_magnitudes magnitudes = fp8_magnitudes_of(base);
        row_pair rows = rows_of_thread(gemm, tokens.l, own);
        float total[N / 2];
        enter(block, store, &segment, tile.token_tile - block.share.first.token_tile);
        const int buffer = segment % block.call.n_buffers;
        const uint32_t scales = store.scales_of(buffer) + columns;
        multiply_tile<is_down>(block, magnitudes, total, store.codes_of(buffer), scales, at);
        const float unit = rows.unit * fp8_tile_unit(base);
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const uint2 bits = is_down ? make_uint2(0, 0) : load_shared_8(scales + j * 32);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i++) {
                total[i] *= unit;
                if (!is_down) total[i] *= __uint_as_float(i % 2 ? bits.y : bits.x);
            }
        }
        rows.unit = 1.0f;
        store_sums<N, activation>(gemm, tokens, own, rows, total);
        advance(tile, STREAM_TEAMS, gemm.n_tiles);
    }
    enter(block, store, &segment, block.share.n_segments - 1);
}

template <moe4_activation activation, bool is_down>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ fp8_stream_call call)
{
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t x_full[2], x_empty[2], ring[STREAM_TEAMS * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ __align__(16) uint32_t maxima[QUANTISERS];
    const stream_call &stream = call.stream;
    const int n_stages = STREAM_TEAMS * stream.n_stages, n_blocks = (stream.gemm.n_steps + 1) / 2;
    const uint32_t x = (shared_address(shared) + 1023) / 1024 * 1024;
    const uint32_t stages = x + stream.n_buffers * n_blocks * X_BLOCK_BYTES;
    const row_store store = {x,
                             stages + n_stages * STREAM_STAGE_BYTES,
                             shared_address(maxima),
                             shared_address(x_full),
                             shared_address(x_empty),
                             n_blocks};
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x < 2) {
            barrier_init(shared_address(&x_full[threadIdx.x]), QUANTISERS);
            barrier_init(shared_address(&x_empty[threadIdx.x]), TEAM_THREADS);
        }
        barrier_init_fence();
    }
    if (!stream.gemm.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    const int n_token_tiles = *stream.gemm.n_token_tiles;
    const stream_share share = share_of_block(n_token_tiles, stream.gemm.n_tiles);
    const stream_block block = {stream, stream.gemm.token_tiles, n_token_tiles, share, x, 0, nullptr};
    const int warp = threadIdx.x / 32, is_filling = warp >= STREAM_WARPS;
    const int team = is_filling ? warp - STREAM_WARPS : threadIdx.x / TEAM;
    if (threadIdx.x >= STREAM_THREADS) {
        registers_lower<QUANTISER_REGISTERS>();
        quantise_segments<is_down>(block, store);
        return;
    }
    const ring_place at = ring_of_team(stream, team, stages, shared_address(ring));
    if (is_filling) {
        registers_lower<FILLER_REGISTERS>();
        if (threadIdx.x % 32 == 0) fill_ring(block, team, at);
        __syncwarp();
        if (stream.next_weights) prefetch_next(block, team);
    } else {
        registers_raise<TEAM_REGISTERS>();
        run_tiles<activation, is_down>(call, block, store, at);
    }
}

} // namespace fp8_stream

#endif
