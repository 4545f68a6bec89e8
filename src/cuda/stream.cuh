/* The grouped GEMM for few rows an expert, where reading and decoding the weights is all the work: token tiles of up to
 * 8 rows and mma.sync m16n8k16, which needs no warpgroup to meet and takes tokens from registers.
 *
 *   tiles      all weight tiles of all token tiles in one row, cut into equal runs, one a block; a team of four warps
 *              takes every fourth tile of its block's run
 *   ring       of stages of four steps, one a team, which a warp of its own fills by bulk copies, tile after tile
 *   segment    the tiles of a run that share a token tile; its rows of x lie in shared memory, whole
 *   slots      of rows of x, for two segments, from either end, where there is room for both; the last warp to leave a
 *              segment brings what there is room for then
 *
 * mma.sync adds the same products in the same way as wgmma does (layer_bench compares the bits), so the order of sums
 * is that of gemm.cuh: one chain over ascending k. */
#ifndef MOE4_CUDA_STREAM_CUH
#define MOE4_CUDA_STREAM_CUH

#include "cuda/decode.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"
#include "cuda/stream_epilogue.cuh"

enum : int {
    STREAM_THREADS = (STREAM_WARPS + STREAM_TEAMS) * 32,
    NEXT_BYTES = 128 * 1024 /* that a block brings into the second-level cache for the next GEMM */
};

/* Memory that is soon read, to the second-level cache. */
static __device__ __forceinline__ void prefetch_far(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

/* ---- The block's share ------------------------------------------------------------------------------------------ */

/* A weight tile of one token tile. */
struct tile_place {
    int token_tile, tile;
};

static __device__ __forceinline__ void advance(tile_place &at, int by, int n_tiles)
{
    for (at.tile += by; at.tile >= n_tiles; at.tile -= n_tiles) at.token_tile++;
}

struct stream_share {
    tile_place first;
    int n_tiles, n_segments;
};

static __device__ __forceinline__ stream_share share_of_block(int n_token_tiles, int n_tiles)
{
    const uint32_t n = (uint32_t)n_token_tiles * n_tiles, each = n / gridDim.x, more = n % gridDim.x;
    const uint32_t first = blockIdx.x * each + min(blockIdx.x, more), n_own = each + (blockIdx.x < more);
    const int token_tile = (int)(first / n_tiles), tile = (int)(first % n_tiles);
    return {{token_tile, tile}, (int)n_own, n_own ? (tile + (int)n_own - 1) / n_tiles + 1 : 0};
}

/* ---- x ---------------------------------------------------------------------------------------------------------- */

struct stream_block {
    const stream_call &call;
    const token_tile *tiles;
    int n_token_tiles;
    stream_share share;
    uint32_t x, x_full;  /* shared addresses of the slots and of a barrier for either end */
    int *left;           /* warps that have left an end's segment */
    tile_maxima *maxima; /* of kernels that quantise to MXFP8 */
    int n_slots;         /* of rows of x, where they lie so */
};

static __device__ __forceinline__ int rows_of(const stream_block &block, int segment)
{
    return block.tiles[block.share.first.token_tile + segment].n_rows;
}

/* Whether a segment's x has room beside that of the next one, if there is one. */
static __device__ __forceinline__ bool fits_with_next(const stream_block &block, int segment)
{
    return segment + 1 < block.share.n_segments &&
           rows_of(block, segment) + rows_of(block, segment + 1) <= block.n_slots;
}

/* Where a segment of so many rows lies. */
static __device__ __forceinline__ uint32_t x_of_segment(const stream_block &block, int segment, int n_rows)
{
    return block.x + (segment % 2 ? block.n_slots - n_rows : 0) * stream_pitch(block.call.gemm.n_steps);
}

static __device__ __forceinline__ uint32_t barrier_of(const stream_block &block, int segment)
{
    return block.x_full + segment % 2 * 8;
}

/* One warp starts the copies of a segment's rows. */
static __device__ void load_segment(const stream_block &block, int segment)
{
    const gemm_call &call = block.call.gemm;
    const token_tile tokens = block.tiles[block.share.first.token_tile + segment];
    const uint32_t to = x_of_segment(block, segment, tokens.n_rows), full = barrier_of(block, segment);
    const uint32_t bytes = call.K * 2;
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_arrive_expect(full, tokens.n_rows * bytes);
    __syncwarp();
    if (lane >= tokens.n_rows) return;
    int row = tokens.first_row + lane;
    if (call.row_source) row = call.row_source[row];
    async_proxy_fence(); /* after what the warps read there */
    bulk_copy(to + lane * stream_pitch(call.n_steps), call.x + row * call.ldx, bytes, full);
}

static __device__ __forceinline__ void leave_segment(const stream_block &block, int segment)
{
    if (segment + 1 >= block.share.n_segments) return;
    int *left = &block.left[segment % 2], is_last = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence_block();
        is_last = atomicAdd(left, 1) == STREAM_WARPS - 1;
        if (is_last) *left = 0;
        __threadfence_block();
    }
    if (!__shfl_sync(~0u, is_last, 0)) return;
    if (!fits_with_next(block, segment)) load_segment(block, segment + 1);
    if (fits_with_next(block, segment + 1)) load_segment(block, segment + 2);
}

/* Leaves segments until the warp is in this one and its x is there. */
static __device__ __forceinline__ void enter_segment(const stream_block &block, int *segment, int wanted)
{
    while (*segment < wanted) {
        if (*segment >= 0) leave_segment(block, *segment);
        ++*segment;
        barrier_wait(barrier_of(block, *segment), *segment / 2 & 1);
    }
}

/* ---- A team's ring ---------------------------------------------------------------------------------------------- */

struct ring_place {
    uint32_t stage, full, empty; /* shared addresses */
    int slot, parity;
};

static __device__ __forceinline__ ring_place ring_of_team(const stream_call &call, int team, uint32_t stages,
                                                          uint32_t barriers)
{
    const int first = team * call.n_stages;
    return {stages + first * STREAM_STAGE_BYTES, barriers + first * 16, barriers + first * 16 + 8, 0, 0};
}

static __device__ __forceinline__ void advance(const stream_call &call, ring_place &at)
{
    const int wrapped = ++at.slot == call.n_stages, by = wrapped ? 1 - call.n_stages : 1;
    at.stage += by * STREAM_STAGE_BYTES;
    at.full += by * 16;
    at.empty += by * 16;
    if (wrapped) at.slot = 0, at.parity ^= 1;
}

/* One lane fills its team's ring with all that the team, one of `teams`, will multiply. */
template <int teams = STREAM_TEAMS>
static __device__ __forceinline__ void fill_ring(const stream_block &block, int team, ring_place at)
{
    const gemm_call &call = block.call.gemm;
    tile_place tile = block.share.first;
    advance(tile, team, call.n_tiles);
    for (int left = block.share.n_tiles - team; left > 0; left -= teams) {
        const int l = block.tiles[tile.token_tile].l;
        const uint8_t *from = call.weights + ((int64_t)l * call.n_tiles + tile.tile) * call.n_steps * CUDA_STEP_BYTES;
        for (int step = 0; step < call.n_steps; step += STREAM_STEPS, from += STREAM_STAGE_BYTES) {
            const uint32_t bytes = min(call.n_steps - step, (int)STREAM_STEPS) * CUDA_STEP_BYTES;
            barrier_wait(at.empty, at.parity ^ 1);
            barrier_arrive_expect(at.full, bytes);
            bulk_copy(at.stage, from, bytes, at.full);
            advance(block.call, at);
        }
        advance(tile, teams, call.n_tiles);
    }
}

/* A warp brings its team's first weights of the next GEMM into the second-level cache: that one cannot start before
 * this one ends, the memory can. */
static __device__ __forceinline__ void prefetch_next(const stream_block &block, int team, const stream_share &share)
{
    const stream_call &call = block.call;
    const int n = min(share.n_tiles, (int)STREAM_TEAMS);
    if (team >= n) return;
    tile_place at = share.first;
    advance(at, team, call.next_tiles);
    const int l = block.tiles[at.token_tile].l;
    const uint32_t all = min((uint32_t)NEXT_BYTES / n, (uint32_t)call.next_steps * CUDA_STEP_BYTES);
    const uint32_t each = (all / 32 + 127) / 128 * 128, begin = each * (threadIdx.x % 32);
    const uint8_t *from =
        call.next_weights + ((int64_t)l * call.next_tiles + at.tile) * call.next_steps * CUDA_STEP_BYTES;
    if (begin < all) prefetch_bulk(from + begin, min(each, all - begin) / 16 * 16);
}

/* ---- Sums ------------------------------------------------------------------------------------------------------- */

/* A lane's weights of a step, as they are packed. */
struct packed_step {
    uint4 codes;
    uint32_t scales;
};

/* Volatile: else the compiler moves a load that is a step ahead down to its use. */
static __device__ __forceinline__ packed_step load_step(uint32_t step)
{
    const int thread = threadIdx.x % TEAM;
    packed_step p;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.codes.x), "=r"(p.codes.y), "=r"(p.codes.z), "=r"(p.codes.w)
                 : "r"(step + CUDA_STEP_SCALES + thread * 16));
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(p.scales) : "r"(step + thread / 4 * 4));
    return p;
}

/* Operand B's registers of a step, 32 k each, from the lane's row and chunk of x in shared memory. */
struct token_step {
    uint4 halves[2];
};

static __device__ __forceinline__ token_step load_tokens(uint32_t x)
{
    return {{load_matrices(x), load_matrices(x + 64)}};
}

/* d += 16 of a step's 64 k.  The product before runs meanwhile. */
template <int quarter>
static __device__ __forceinline__ void multiply_quarter(float (&d)[4], const packed_step &packed,
                                                        const token_step &tokens)
{
    const uint32_t words[4] = {packed.codes.x, packed.codes.y, packed.codes.z, packed.codes.w};
    const uint4 &b = tokens.halves[quarter / 2];
    uint32_t a[4];
    decode_word<quarter / 2>(words[quarter], factors_of(packed.scales), a);
    mma(d, a, quarter % 2 ? b.z : b.x, quarter % 2 ? b.w : b.y);
}

/* What a warp multiplies: the step it has at hand and the one that it loads meanwhile. */
struct step_pair {
    packed_step packed[2];
    token_step tokens[2];
};

/* A stage's products, or the first `n` steps' of a tile's last stage, behind which garbage is loaded that nobody uses.
 * No branch divides the steps of a whole one, so that decoding runs beneath products. */
template <bool is_last>
static __device__ __forceinline__ void multiply_stage(const stream_call &call, float (&d)[4], step_pair &pair,
                                                      uint32_t x, ring_place &at, int n)
{
#pragma unroll
    for (int i = 0; i < STREAM_STEPS; i++) {
        uint32_t next = at.stage + (i + 1) * CUDA_STEP_BYTES;
        if (!is_last && i + 1 == STREAM_STEPS) { /* all of this stage is read */
            barrier_arrive(at.empty);
            advance(call, at);
            barrier_wait(at.full, at.parity);
            next = at.stage;
        }
        const packed_step &packed = pair.packed[i % 2];
        const token_step &tokens = pair.tokens[i % 2];
        if (!is_last || i + 1 < STREAM_STEPS) {
            pair.packed[(i + 1) % 2] = load_step(next);
            pair.tokens[(i + 1) % 2] = load_tokens(x + (i + 1) * 128);
        }
        multiply_quarter<0>(d, packed, tokens);
        multiply_quarter<1>(d, packed, tokens);
        multiply_quarter<2>(d, packed, tokens);
        multiply_quarter<3>(d, packed, tokens);
        if (is_last && i + 1 == n) break;
    }
    if (!is_last) return;
    barrier_arrive(at.empty);
    advance(call, at);
}

/* All of K, loading a step ahead. */
static __device__ __forceinline__ void multiply_tile(const stream_block &block, float (&d)[4], uint32_t x,
                                                     ring_place &at)
{
    step_pair pair;
    d[0] = d[1] = d[2] = d[3] = 0.0f;
    pair.tokens[0] = load_tokens(x);
    barrier_wait(at.full, at.parity);
    pair.packed[0] = load_step(at.stage);
    int left = block.call.gemm.n_steps;
    for (; left > STREAM_STEPS; left -= STREAM_STEPS, x += STREAM_STEPS * 128)
        multiply_stage<false>(block.call, d, pair, x, at, STREAM_STEPS);
    multiply_stage<true>(block.call, d, pair, x, at, left);
}

/* ---- A team's tiles --------------------------------------------------------------------------------------------- */

template <moe4_activation activation>
static __device__ __forceinline__ void run_tiles(const stream_block &block, ring_place at)
{
    const gemm_call &call = block.call.gemm;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = threadIdx.x / TEAM;
    if (call.tiles_are_old) wait_for_predecessors();
    if (warp == 0 && block.share.n_segments > 0) load_segment(block, 0);
    if (warp == 1 && fits_with_next(block, 0)) load_segment(block, 1);
    tile_place tile = block.share.first;
    advance(tile, team, call.n_tiles);
    int segment = -1, half = 0;
    for (int left = block.share.n_tiles - team; left > 0; left -= STREAM_TEAMS) {
        const token_tile tokens = block.tiles[tile.token_tile];
        const strip own = {tile.tile, warp % 4};
        const row_pair rows = rows_of_thread(call, tokens.l, own);
        float d[4];
        enter_segment(block, &segment, tile.token_tile - block.share.first.token_tile);
        const int row = min(lane % 8, tokens.n_rows - 1); /* no other segment's, which may lie behind */
        const uint32_t x = x_of_segment(block, segment, tokens.n_rows) + row * stream_pitch(call.n_steps);
        multiply_tile(block, d, x + lane / 8 * 16, at);
        if (block.call.quantizes)
            store_quantized<activation>(call, tokens, own, rows, d, block.maxima->of[half ^= 1]);
        else
            store_sums<STREAM_ROWS, activation>(call, tokens, own, rows, d);
        advance(tile, STREAM_TEAMS, call.n_tiles);
    }
    enter_segment(block, &segment, block.share.n_segments - 1);
}

template <moe4_activation activation>
__global__ void __launch_bounds__(STREAM_THREADS, 1) stream_kernel(const __grid_constant__ stream_call call)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t x_full[2], ring[STREAM_TEAMS * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ int left[2];
    __shared__ tile_maxima maxima;
    const int n_stages = STREAM_TEAMS * call.n_stages, n_slots = stream_slots(call.gemm.n_steps);
    const uint32_t stages = shared_address(shared), x = stages + n_stages * STREAM_STAGE_BYTES;
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x < 2) barrier_init(shared_address(&x_full[threadIdx.x]), 1), left[threadIdx.x] = 0;
        barrier_init_fence();
    }
    const int pitch = stream_pitch(call.gemm.n_steps), row_bytes = call.gemm.K * 2;
    const int n_pad = (call.gemm.n_steps * CUDA_STEP_K * 2 - row_bytes) / 16;
    for (int i = threadIdx.x; i < n_slots * n_pad; i += STREAM_THREADS) /* k past the end: finite */
        store_shared_zeros(x + i / n_pad * pitch + row_bytes + i % n_pad * 16);
    if (!call.gemm.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    const int n_token_tiles = *call.gemm.n_token_tiles;
    const stream_block block = {
        call,   call.gemm.token_tiles,  n_token_tiles, share_of_block(n_token_tiles, call.gemm.n_tiles),
        x,      shared_address(x_full), left,          &maxima,
        n_slots};
    const int warp = threadIdx.x / 32, is_filling = warp >= STREAM_WARPS;
    const int team = is_filling ? warp - STREAM_WARPS : threadIdx.x / TEAM;
    const ring_place at = ring_of_team(call, team, stages, shared_address(ring));
    if (is_filling) {
        if (threadIdx.x % 32 == 0) fill_ring(block, team, at);
        __syncwarp();
        if (call.next_weights) prefetch_next(block, team, share_of_block(n_token_tiles, call.next_tiles));
    } else {
        run_tiles<activation>(block, at);
    }
}

#endif
