/* The fp8 GEMMs for up to about 17 rows an expert: tiles, teams and rings of stream.cuh, products of fp8.cuh.
 *
 *   rows       of x in e4m3, one a token, as they were quantised while routing ran, or of the intermediate as gate/up
 *              leaves it: four warps of their own bring a segment's into shared memory, whole, in wgmma's swizzle
 *   teams      are warpgroups, which leave v' in bf16: 128 columns have one scale for each row
 *   pieces     of v' are those of the 128 columns that the block has; the four warps quantise them
 *              (fp8_stream_pieces.cuh)
 *   few rows   come in bf16, and the four warps quantise them; v' stays as it is
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"): a block of 128 k is added up by the tensor core from zero,
 * and blocks are promoted in ascending order. */
#ifndef MOE4_CUDA_FP8_STREAM_CUH
#define MOE4_CUDA_FP8_STREAM_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_stream_pieces.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_stream
{

enum : int {
    THREADS = STREAM_THREADS + LOADERS,
    TEAM_THREADS = STREAM_TEAMS * TEAM,
    TEAM_REGISTERS = 88, /* of what 80 a thread leave when the fillers give some back */
    FILLER_REGISTERS = 40
};

/* ---- Sums ------------------------------------------------------------------------------------------------------- */

/* A lane's part of a block of 128 k from a step on; a block of one step has it twice, since x is zero in the second. */
struct packed_block {
    packed_step first, second;
};

static __device__ __forceinline__ packed_block load_block(uint32_t step, int left)
{
    return {load_step(step), load_step(left > 1 ? step + CUDA_STEP_BYTES : step)};
}

static __device__ __forceinline__ void decode_block(const packed_block &packed, const fp8_magnitudes &of,
                                                    uint32_t (&a)[16])
{
    fp8_decode_step(packed.first.codes, packed.first.scales, of, a);
    fp8_decode_step(packed.second.codes, packed.second.scales, of, a + 8);
}

static __device__ __forceinline__ void decode_block(uint32_t step, int left, const fp8_magnitudes &of,
                                                    uint32_t (&a)[16])
{
    decode_block(load_block(step, left), of, a);
}

template <int N> static __device__ __forceinline__ void multiply_block(float (&d)[N / 2], uint32_t (&a)[16], uint32_t b)
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
template <int N, bool is_down>
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
template <int N, bool is_down>
static __device__ __forceinline__ void multiply_tile(const stream_block &block, const fp8_magnitudes &of,
                                                     float (&total)[N / 2], uint32_t x, uint32_t scales, ring_place &at)
{
    static_assert(STREAM_STEPS == 4, "two blocks a stage");
    constexpr uint32_t block_units = N * FP8_BLOCK / 16;
    uint32_t a[2][16], b = x >> 4 | 1 << 16;
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = total[i] = 0.0f;
#pragma unroll
    for (uint32_t &each : a[1]) each = 0; /* else its registers are taken from the kernel's start on, for each width */
    barrier_wait(at.full, at.parity);
    decode_block(at.stage, block.call.gemm.n_steps, of, a[0]);
    for (int left = block.call.gemm.n_steps;; b += 2 * block_units, scales += 2 * N * 4) {
        multiply_block<N>(d, a[0], b);
        if (left > 2) decode_block(at.stage + 2 * CUDA_STEP_BYTES, left - 2, of, a[1]);
        barrier_arrive(at.empty); /* all of this stage is read */
        ::advance(block.call, at);
        promote_block<N, is_down>(total, d, scales);
        if ((left -= 2) <= 0) return;
        multiply_block<N>(d, a[1], b + block_units);
        if (left > 2) {
            barrier_wait(at.full, at.parity);
            decode_block(at.stage, left - 2, of, a[0]);
        }
        promote_block<N, is_down>(total, d, scales + N * 4);
        if ((left -= 2) <= 0) return;
    }
}

/* ---- A team's work ---------------------------------------------------------------------------------------------- */

/* Leaves segments until this one's rows are there. */
template <bool is_down>
static __device__ __forceinline__ void enter(const stream_block &block, const row_store &store, int *segment,
                                             int wanted)
{
    const int n_buffers = block.call.n_buffers;
    while (*segment < wanted) {
        if (*segment >= 0) barrier_arrive(store.empty + *segment % n_buffers * 8);
        ++*segment;
        barrier_wait(store.full + *segment % n_buffers * 8, *segment / n_buffers & 1);
        if (!is_down) async_proxy_fence(); /* bulk copies need none */
    }
}

template <int N, moe4_activation activation, bool is_down>
static __device__ __forceinline__ void run_tile(const fp8_stream_call &call, const stream_block &block,
                                                const token_tile &tokens, int tile, uint32_t x, uint32_t scales,
                                                ring_place &at)
{
    const gemm_call &gemm = block.call.gemm;
    const int quarter = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int base = call.tile_base[(int64_t)tokens.l * gemm.n_tiles + tile];
    row_pair rows = rows_of_thread(gemm, tokens.l, {tile, quarter});
    rows.unit *= fp8_tile_unit(base);
    scales += threadIdx.x % 4 * 8;
    float total[N / 2];
    multiply_tile<N, is_down>(block, fp8_magnitudes_of(base), total, x, scales, at);
    if (!is_down) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const uint2 bits = load_shared_8(scales + i / 4 * 32);
            total[i] = total[i] * rows.unit * __uint_as_float(i % 2 ? bits.y : bits.x);
        }
        rows.unit = 1.0f;
    }
    store_sums<N, activation>(gemm, tokens, {tile, quarter}, rows, total);
}

template <moe4_activation activation, bool is_down>
static __device__ __forceinline__ void run_tiles(const fp8_stream_call &call, const stream_block &block,
                                                 const row_store &store, int team, ring_place at,
                                                 const piece_line &line)
{
    constexpr int tiles = tiles_of_group<activation>;
    const int n_tiles = block.call.gemm.n_tiles, n_groups = (n_tiles + tiles - 1) / tiles;
    int segment = -1;
    tile_place own = block.share.first;
    ::advance(own, team, n_tiles);
    for (int left = block.share.n_tiles - team; left > 0; left -= STREAM_TEAMS, ::advance(own, STREAM_TEAMS, n_tiles)) {
        const token_tile tokens = block.call.gemm.token_tiles[own.token_tile];
        enter<is_down>(block, store, &segment, own.token_tile - block.share.first.token_tile);
        const int buffer = segment % block.call.n_buffers, width = width_of(tokens);
        const uint32_t x = store.codes_of(buffer), scales = store.scales_of(buffer);
        if (width == 8)
            run_tile<8, activation, is_down>(call, block, tokens, own.tile, x, scales, at);
        else if (width == 16)
            run_tile<16, activation, is_down>(call, block, tokens, own.tile, x, scales, at);
        else
            run_tile<FP8_STREAM_ROWS, activation, is_down>(call, block, tokens, own.tile, x, scales, at);
        if (!is_down && !call.is_bf16)
            line.leave(segment * n_groups + own.tile / tiles - block.share.first.tile / tiles);
    }
    enter<is_down>(block, store, &segment, block.share.n_segments - 1);
}

template <moe4_activation activation, bool is_down>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ fp8_stream_call call)
{
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t x_full[2], x_empty[2], ring[STREAM_TEAMS * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ uint32_t row_maxima[LOADERS / 32];
    __shared__ uint64_t pieces[2 * PIECES];
    const stream_call &stream = call.stream;
    const int n_stages = STREAM_TEAMS * stream.n_stages, n_blocks = (stream.gemm.n_steps + 1) / 2;
    const int rows = (stream.gemm.tile_rows + 7) / 8 * 8;
    const uint32_t x = (shared_address(shared) + 1023) / 1024 * 1024;
    const uint32_t stages = x + stream.n_buffers * n_blocks * rows * FP8_BLOCK;
    const row_store store = {x,
                             stages + n_stages * STREAM_STAGE_BYTES,
                             shared_address(x_full),
                             shared_address(x_empty),
                             shared_address(row_maxima),
                             n_blocks,
                             rows};
    const piece_line line = {shared_address(pieces), shared_address(pieces + PIECES)};
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x < 2) {
            barrier_init(shared_address(&x_full[threadIdx.x]), LOADERS);
            barrier_init(shared_address(&x_empty[threadIdx.x]), TEAM_THREADS);
        }
        if (!is_down && threadIdx.x < PIECES) line.init(threadIdx.x, tiles_of_group<activation>);
        barrier_init_fence();
    }
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), is_filling = warp >= STREAM_WARPS;
    if (warp >= STREAM_THREADS / 32) {
        if (is_down)
            serve_down(call, store);
        else
            serve_gate_up<activation>(call, store, line);
        return;
    }
    if (!stream.gemm.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    const int n_token_tiles = *stream.gemm.n_token_tiles;
    const stream_share share = share_of(stream, n_token_tiles, stream.gemm.n_tiles);
    const stream_block block = {stream, stream.gemm.token_tiles, n_token_tiles, share, x, 0, nullptr};
    const int team = is_filling ? warp - STREAM_WARPS : warp / (TEAM / 32);
    const ring_place at = ring_of_team(stream, team, stages, shared_address(ring));
    if (is_filling) {
        registers_lower<FILLER_REGISTERS>();
        if (threadIdx.x % 32 == 0) fill_ring(block, team, at);
        __syncwarp();
        if (stream.next_weights) prefetch_next(block, team, share_of(stream, n_token_tiles, stream.next_tiles));
    } else {
        registers_raise<TEAM_REGISTERS>();
        run_tiles<activation, is_down>(call, block, store, team, at, line);
    }
}

} // namespace fp8_stream

#endif
