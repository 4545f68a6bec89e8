/* The fp8 GEMMs for up to about 17 rows an expert: tiles, teams and rings of stream.cuh, products of fp8.cuh.
 *
 *   rows       of x in e4m3, one a token, as they were quantised while routing ran, or of the intermediate as gate/up
 *              leaves it: four warps of their own bring a segment's into shared memory, whole, in wgmma's swizzle
 *   teams      are warpgroups; in gate/up they take four tiles together, since v' of 128 columns has one scale for each
 *              row, and quantise it in the epilogue
 *   few rows   come in bf16, and the four warps quantise them
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"): a block of 128 k is added up by the tensor core from zero,
 * and blocks are promoted in ascending order. */
#ifndef MOE4_CUDA_FP8_STREAM_CUH
#define MOE4_CUDA_FP8_STREAM_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_stream_epilogue.cuh"
#include "cuda/fp8_stream_rows.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_stream
{

enum : int {
    THREADS = STREAM_THREADS + LOADERS,
    TEAM_THREADS = STREAM_TEAMS * TEAM,
    TEAM_REGISTERS = 96, /* of what 80 a thread leave when the others give some back */
    FILLER_REGISTERS = 40,
    LOADER_REGISTERS = 56
};

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

/* ---- A team's tiles --------------------------------------------------------------------------------------------- */

/* Every fourth tile of the block's run; or one of each four, of which the run then consists, where gate/up quantises
 * the intermediate.  Some at an expert's end are not there. */
struct team_tiles {
    tile_place at;
    int left, team, n_places;
    bool is_grouped;

    __device__ __forceinline__ team_tiles(const stream_block &block, int of_team, bool grouped)
        : at(block.share.first), left(block.share.n_tiles), team(of_team),
          n_places(place_count(block.call.gemm.n_tiles, grouped)), is_grouped(grouped)
    {
        if (!grouped) ::advance(at, team, n_places), left -= team;
    }
    static __device__ __forceinline__ int place_count(int n_tiles, bool grouped)
    {
        return grouped ? (n_tiles + STREAM_TEAMS - 1) / STREAM_TEAMS : n_tiles;
    }
    __device__ __forceinline__ bool is_over() const
    {
        return left <= 0;
    }
    __device__ __forceinline__ int tile() const
    {
        return is_grouped ? at.tile * STREAM_TEAMS + team : at.tile;
    }
    __device__ __forceinline__ void advance()
    {
        const int by = is_grouped ? 1 : (int)STREAM_TEAMS;
        left -= by;
        ::advance(at, by, n_places);
    }
};

/* One lane fills its team's ring with all that the team will multiply. */
static __device__ __forceinline__ void fill_tiles(const stream_block &block, team_tiles own, ring_place at)
{
    const gemm_call &call = block.call.gemm;
    for (; !own.is_over(); own.advance()) {
        if (own.tile() >= call.n_tiles) continue;
        const int l = call.token_tiles[own.at.token_tile].l;
        const uint8_t *from = call.weights + ((int64_t)l * call.n_tiles + own.tile()) * call.n_steps * CUDA_STEP_BYTES;
        for (int step = 0; step < call.n_steps; step += STREAM_STEPS, from += STREAM_STAGE_BYTES) {
            const uint32_t bytes = min(call.n_steps - step, (int)STREAM_STEPS) * CUDA_STEP_BYTES;
            barrier_wait(at.empty, at.parity ^ 1);
            barrier_arrive_expect(at.full, bytes);
            bulk_copy(at.stage, from, bytes, at.full);
            ::advance(block.call, at);
        }
    }
}

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
                                                ring_place &at, uint16_t (*maxima)[STREAM_WARPS])
{
    const gemm_call &gemm = block.call.gemm;
    const int quarter = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), seen = min(tile, gemm.n_tiles - 1);
    const int base = call.tile_base[(int64_t)tokens.l * gemm.n_tiles + seen];
    row_pair rows = rows_of_thread(gemm, tokens.l, {seen, quarter});
    rows.unit *= fp8_tile_unit(base);
    scales += threadIdx.x % 4 * 8;
    float total[N / 2] = {};
    if (tile == seen) multiply_tile<N, is_down>(block, fp8_magnitudes_of(base), total, x, scales, at);
    if (is_down) {
        store_sums<N, activation>(gemm, tokens, {tile, quarter}, rows, total);
    } else if (N == STREAM_ROWS && call.is_bf16) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const uint2 bits = load_shared_8(scales + i / 4 * 32);
            total[i] = total[i] * rows.unit * __uint_as_float(i % 2 ? bits.y : bits.x);
        }
        rows.unit = 1.0f;
        store_sums<N, activation>(gemm, tokens, {tile, quarter}, rows, total);
    } else {
        store_v<N, activation>(call, tokens, {tile, quarter}, rows, total, scales, maxima);
    }
}

template <moe4_activation activation, bool is_down>
static __device__ __forceinline__ void run_tiles(const fp8_stream_call &call, const stream_block &block,
                                                 const row_store &store, team_tiles own, ring_place at,
                                                 group_maxima *maxima)
{
    int segment = -1, half = 0;
    for (; !own.is_over(); own.advance()) {
        const token_tile tokens = block.call.gemm.token_tiles[own.at.token_tile];
        enter<is_down>(block, store, &segment, own.at.token_tile - block.share.first.token_tile);
        const int buffer = segment % block.call.n_buffers, width = width_of(tokens), tile = own.tile();
        const uint32_t x = store.codes_of(buffer), scales = store.scales_of(buffer);
        half ^= 1;
        if (width == 8)
            run_tile<8, activation, is_down>(call, block, tokens, tile, x, scales, at, maxima->of[half]);
        else if (width == 16)
            run_tile<16, activation, is_down>(call, block, tokens, tile, x, scales, at, maxima->of[half]);
        else
            run_tile<FP8_STREAM_ROWS, activation, is_down>(call, block, tokens, tile, x, scales, at, maxima->of[half]);
    }
    enter<is_down>(block, store, &segment, block.share.n_segments - 1);
}

template <moe4_activation activation, bool is_down>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ fp8_stream_call call)
{
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t x_full[2], x_empty[2], ring[STREAM_TEAMS * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ __align__(16) group_maxima maxima;
    __shared__ uint32_t row_maxima[LOADERS / 32];
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
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x < 2) {
            barrier_init(shared_address(&x_full[threadIdx.x]), LOADERS);
            barrier_init(shared_address(&x_empty[threadIdx.x]), TEAM_THREADS);
        }
        barrier_init_fence();
    }
    if (!stream.gemm.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    const int n_token_tiles = *stream.gemm.n_token_tiles;
    const bool is_grouped = !is_down && !call.is_bf16;
    const int n_places = team_tiles::place_count(stream.gemm.n_tiles, is_grouped);
    const stream_share share = share_of(stream, n_token_tiles, n_places);
    const stream_block block = {stream, stream.gemm.token_tiles, n_token_tiles, share, x, 0, nullptr};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), is_filling = warp >= STREAM_WARPS;
    const int team = is_filling ? warp - STREAM_WARPS : warp / (TEAM / 32);
    if (warp >= STREAM_THREADS / 32) {
        registers_lower<LOADER_REGISTERS>();
        load_segments<is_down>(call, block, store);
        return;
    }
    const team_tiles own(block, team, is_grouped);
    const ring_place at = ring_of_team(stream, team, stages, shared_address(ring));
    if (is_filling) {
        registers_lower<FILLER_REGISTERS>();
        if (threadIdx.x % 32 == 0) fill_tiles(block, own, at);
        __syncwarp();
        if (stream.next_weights) prefetch_next(block, team, share_of(stream, n_token_tiles, stream.next_tiles));
    } else {
        registers_raise<TEAM_REGISTERS>();
        run_tiles<activation, is_down>(call, block, store, own, at, &maxima);
    }
}

} // namespace fp8_stream

#endif
