/* The streaming GEMM for calls of one token, with tiles, teams and rings as in stream.cuh.  All of gate/up's tiles
 * multiply the same row of x, and its blocks choose the token's experts for themselves, so that weights move as soon as
 * logits are there; one block's warp goes on to what later kernels need of the routing.  Down's blocks know their tiles
 * before gate/up is over. */
#ifndef MOE4_CUDA_STREAM_ONE_CUH
#define MOE4_CUDA_STREAM_ONE_CUH

#include "cuda/quantize.cuh"
#include "cuda/route.cuh"
#include "cuda/stream.cuh"
#include "cuda/stream_one.h"

/* Warps that multiply and that fill rings; one that routes. */
template <class Operands> static constexpr int one_threads(bool is_down, int teams)
{
    return teams * TEAM + Operands::fillers(teams) * 32 + (is_down ? 0 : 32);
}

/* Barriers of a block besides its teams', which have 1 to 4, and 0. */
enum : int { X_ROW = 5, TILES, TILES_AND_X };

/* As if gate/up had more threads than it has: its registers then leave room for a narrow block of down beside it. */
enum : int { ONE_GATE_UP_BOUND = 1024 };

/* A token tile for each local expert of the token. */
struct one_tiles {
    token_tile of[ONE_TOP_K];
    int32_t n;
};

/* How many there may be. */
static __device__ __forceinline__ int32_t most_tiles(const route_logits_call &call)
{
    return min(call.router.top_k, call.group.L);
}

/* ---- Routing ---------------------------------------------------------------------------------------------------- */

/* Shared memory for it. */
struct one_choice {
    double scores[ONE_TOP_K];
    int32_t ids[ONE_TOP_K];
    int32_t *keys, *locals; /* by expert */
    int64_t *groups;
};

static __host__ __device__ __forceinline__ int32_t one_choice_bytes(const device_router &router)
{
    return router.n_experts * 8 + router.n_group * 8;
}

/* What needs no logits.  They and x, which may still be written, come as far as the second-level cache. */
static __device__ void await_logits(const one_call &call, const one_choice &choice)
{
    const route_logits_call &route = call.route;
    for (int32_t e = threadIdx.x; e < route.router.n_experts; e += blockDim.x) {
        choice.locals[e] = route.out.local_of[e];
        if (route.router.bias && !call.topk.ids) prefetch(&route.router.bias[e]);
    }
    const int32_t at = blockIdx.x * 128;
    const int32_t logit_bytes = call.topk.ids ? 0 : route.dtype == MOE4_DTYPE_F32 ? 4 : 2;
    if (threadIdx.x == 0 && at < route.router.n_experts * logit_bytes) prefetch_far((const char *)route.logits + at);
    if (threadIdx.x == 32 && at < call.stream.gemm.K * 2) prefetch_far((const char *)call.stream.gemm.x + at);
    wait_for_predecessors();
}

/* By one warp, from the keys or the caller's ids; none if there is no token.  A lane's *row is that of its slot.  Ids
 * that the caller gives may come more than once: each is a token tile. */
static __device__ void choose_tiles(const one_call &call, one_choice &choice, one_tiles &tiles, int32_t *row)
{
    const route_logits_call &route = call.route;
    const int32_t A = route.router.top_k, lane = threadIdx.x % 32;
    if (!call.topk.ids)
        choose_experts(route.router, choice.keys, choice.groups, choice.ids);
    else if (lane < A)
        choice.ids[lane] = id_of_slot(call.topk, lane);
    __syncwarp();
    const int32_t id = lane < A && token_count_of(route.T) ? choice.ids[lane] : -1;
    const int32_t l = id >= 0 && id < route.router.n_experts ? choice.locals[id] : -1;
    int32_t rank = 0;
    for (int32_t a = 0; a < A; a++) {
        const int32_t other = __shfl_sync(~0u, l, a);
        rank += other >= 0 && (other < l || (other == l && a < lane));
    }
    if (l >= 0) tiles.of[rank] = {l, rank, 1};
    const uint32_t all = __ballot_sync(~0u, l >= 0);
    if (lane == 0) tiles.n = __popc(all);
    *row = l >= 0 ? rank : -1;
}

/* What routing and grouping leave in memory. */
static __device__ void store_routing(const one_call &call, one_choice &choice, const one_tiles &tiles, int32_t row)
{
    const route_logits_call &route = call.route;
    const int32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        check_token_count(route.T, route.out.faults);
        *route.group.n_tiles = *route.group.n_rows = tiles.n;
        if (route.group.n_rows_copy) *route.group.n_rows_copy = tiles.n;
    }
    if (lane < most_tiles(route)) route.group.tiles[lane] = lane < tiles.n ? tiles.of[lane] : token_tile{};
    if (token_count_of(route.T) == 0) return;
    if (!call.topk.ids)
        finish_token(route, 0, logits_of_token(route, 0), choice.ids, choice.scores, true);
    else if (lane < route.router.top_k)
        route_slot(call.topk, route.out, lane);
    if (lane < route.router.top_k) route.group.row_map[lane] = row;
}

/* ---- Operands in bf16 ------------------------------------------------------------------------------------------- */

/* How a row of x or of v' comes into shared memory, and what teams make of it; fp8_one.cuh has the other kind. */
struct bf16_operands {
    static __host__ __device__ constexpr int fillers(int teams)
    {
        return teams;
    }

    template <int teams> struct state {
        uint64_t x_full[teams];
        tile_maxima maxima;

        __device__ __forceinline__ void init()
        {
            for (uint64_t &each : x_full) barrier_init(shared_address(&each), 1);
        }
    };

    /* Bytes for the row of x, or for v' one a team. */
    static __host__ __device__ __forceinline__ int32_t x_bytes(const gemm_call &call)
    {
        return call.n_steps * 128;
    }
    static int32_t v_bytes(const one_call &call, int teams, int32_t)
    {
        return teams * x_bytes(call.stream.gemm);
    }

    /* A thread's part of the token's row, from memory: nothing is read ahead. */
    struct x_part {
        __device__ __forceinline__ x_part(const gemm_call &) {}
    };

    /* The token's row to shared memory, as it is or as what its codes are worth; k past the end as zeros. */
    template <int threads>
    static __device__ __forceinline__ void store_x(const one_call &one, const x_part &, uint32_t to)
    {
        const gemm_call &call = one.stream.gemm;
        for (int32_t chunk = threadIdx.x; chunk < call.n_steps * 8; chunk += threads) {
            values v = {};
            if (chunk * 8 < call.K) {
                const uint4 words = *(const uint4 *)(call.x + chunk * 8);
                v = {{words.x, words.y, words.z, words.w}};
                if (one.quantizes_x) v = worth_of_codes(quantize(v));
            }
            store_shared_16(to + chunk * 16, {v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]});
        }
    }

    /* Zeros behind the teams' rows of v': k past the end is finite. */
    template <int teams> static __device__ __forceinline__ void pad_rows(const gemm_call &call, uint32_t rows)
    {
        const int n_pad = call.n_steps * 8 - call.K / 8;
        for (int i = threadIdx.x; i < teams * n_pad; i += blockDim.x)
            store_shared_zeros(rows + (i / n_pad + 1) * call.n_steps * 128 - (i % n_pad + 1) * 16);
    }

    /* A team's row of v', once those before it are read. */
    static __device__ __forceinline__ void load_v(uint32_t to, const gemm_call &call, int row, uint32_t full,
                                                  int n_loaded)
    {
        if (n_loaded == 0)
            wait_for_predecessors();
        else
            barrier_sync<TEAM>(threadIdx.x / TEAM + 1);
        if (threadIdx.x % TEAM == 0) {
            async_proxy_fence();
            barrier_arrive_expect(full, call.K * 2);
            bulk_copy(to, call.x + row * call.ldx, call.K * 2, full);
        }
        barrier_wait(full, n_loaded & 1);
    }

    template <int teams>
    static __device__ __forceinline__ void fill(const stream_block &block, int team, uint32_t stages, uint32_t ring)
    {
        fill_ring<teams>(block, team, ring_of_team(block.call, team, stages, ring));
    }

    /* A team's tiles: every so many-th of the block's. */
    template <moe4_activation activation, bool is_down, int teams>
    static __device__ __forceinline__ void run(const one_call &, const stream_block &block, state<teams> &own_state,
                                               uint32_t stages, uint32_t ring)
    {
        const gemm_call &call = block.call.gemm;
        const int warp = threadIdx.x / 32, team = threadIdx.x / TEAM;
        ring_place at = ring_of_team(block.call, team, stages, ring);
        const uint32_t x = block.x + (is_down ? team * x_bytes(call) : 0);
        const uint32_t x_full = shared_address(&own_state.x_full[team]);
        tile_place tile = block.share.first;
        advance(tile, team, call.n_tiles);
        int loaded = -1, n_loaded = 0, half = 0;
        for (int left = block.share.n_tiles - team; left > 0; left -= teams) {
            const token_tile tokens = block.tiles[tile.token_tile];
            const strip own = {tile.tile, warp % 4};
            const row_pair rows = rows_of_thread(call, tokens.l, own);
            float d[4];
            if (is_down && loaded != tile.token_tile) {
                load_v(x, call, tokens.first_row, x_full, n_loaded++);
                loaded = tile.token_tile;
            }
            multiply_tile(block, d, x + threadIdx.x % 32 / 8 * 16, at);
            if (block.call.quantizes)
                store_quantized<activation>(call, tokens, own, rows, d, own_state.maxima.of[half ^= 1]);
            else
                store_sums<STREAM_ROWS, activation>(call, tokens, own, rows, d);
            advance(tile, teams, call.n_tiles);
        }
        if (is_down && n_loaded == 0) wait_for_predecessors();
    }
};

/* ---- The kernel ------------------------------------------------------------------------------------------------- */

/* gate/up: the block's tiles and x. */
template <class Operands, int teams>
static __device__ void begin_gate_up(const one_call &call, uint32_t x, one_choice &choice, one_tiles &tiles)
{
    constexpr int fillers = Operands::fillers(teams), chooser = teams * 4 + fillers;
    const route_logits_call &route = call.route;
    const int warp = threadIdx.x / 32;
    await_logits(call, choice);
    for (int32_t e = threadIdx.x; e < route.router.n_experts && !call.topk.ids; e += blockDim.x)
        choice.keys[e] = key_of_expert(route.router, logits_of_token(route, 0), e);
    const typename Operands::x_part part(call.stream.gemm);
    __syncthreads();
    if (warp < teams * 4) {
        Operands::template store_x<teams * TEAM>(call, part, x);
        barrier_sync<teams * TEAM + 32>(TILES_AND_X);
        return;
    }
    int32_t row = 0;
    if (warp == chooser) {
        choose_tiles(call, choice, tiles, &row);
        barrier_arrive_at<teams * TEAM + 32>(TILES_AND_X);
    }
    barrier_sync<(fillers + 1) * 32>(TILES); /* weights move before x is there */
    if (warp != chooser) return;
    if (blockIdx.x == 0) store_routing(call, choice, tiles, row);
    __threadfence(); /* down's blocks may come up while this kernel runs */
    __syncwarp();
    launch_dependents();
}

/* down: the tiles of all blocks, as gate/up's first one left them. */
static __device__ void begin_down(const one_call &call, one_tiles &tiles)
{
    launch_dependents();
    const int32_t at = threadIdx.x;
    if (at < most_tiles(call.route)) {
        const int32_t *from = (const int32_t *)&call.stream.gemm.token_tiles[at];
        tiles.of[at] = {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)};
    }
    if (at == 0) tiles.n = __ldcg(call.stream.gemm.n_token_tiles);
    __syncthreads();
}

template <class Operands, moe4_activation activation, bool is_down, int teams>
__global__ void __launch_bounds__(is_down ? one_threads<Operands>(true, teams) : ONE_GATE_UP_BOUND,
                                  teams == ONE_NARROW_TEAMS ? 3 : 1) one_kernel(const __grid_constant__ one_call call)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t ring[teams * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ __align__(16) typename Operands::template state<teams> state;
    __shared__ one_tiles tiles;
    __shared__ one_choice choice;
    const stream_call &stream = call.stream;
    const int n_stages = teams * stream.n_stages, x_at = n_stages * STREAM_STAGE_BYTES;
    const uint32_t stages = shared_address(shared), x = stages + x_at;
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x == 0) state.init();
        barrier_init_fence();
    }
    if (is_down) {
        Operands::template pad_rows<teams>(stream.gemm, x);
        begin_down(call, tiles);
    } else {
        if (threadIdx.x == 0) {
            choice.groups = (int64_t *)(shared + x_at + Operands::x_bytes(stream.gemm) + STREAM_SLACK);
            choice.keys = (int32_t *)(choice.groups + call.route.router.n_group);
            choice.locals = choice.keys + call.route.router.n_experts;
        }
        __syncthreads();
        begin_gate_up<Operands, teams>(call, x, choice, tiles);
    }
    const stream_share share = share_of_block(__shfl_sync(~0u, tiles.n, 0), stream.gemm.n_tiles);
    const stream_block block = {stream, tiles.of, tiles.n, share, x, 0, nullptr, nullptr};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), filler = warp - teams * 4;
    if (filler < 0) {
        Operands::template run<activation, is_down, teams>(call, block, state, stages, shared_address(ring));
    } else if (filler < Operands::fillers(teams) && threadIdx.x % 32 == 0) {
        Operands::template fill<teams>(block, filler, stages, shared_address(ring));
    }
}

#endif
