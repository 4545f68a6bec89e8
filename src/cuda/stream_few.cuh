/* The streaming GEMM for calls of two to eight tokens, with tiles, teams and rings as in stream.cuh.  All of gate/up's
 * tiles multiply the same rows of x (few_tiles.cuh), and its blocks choose the tokens' experts for themselves, so that
 * weights move as soon as logits are there; some warps go on to what later kernels need of the routing.  Down's blocks
 * know their tiles before gate/up is over.  One token has kernels of its own (stream_one.cuh): what several take is
 * longer. */
#ifndef MOE4_CUDA_STREAM_FEW_CUH
#define MOE4_CUDA_STREAM_FEW_CUH

#include "cuda/few_route.cuh"
#include "cuda/quantize.cuh"

/* Warps that multiply and that fill rings; one that routes. */
static __host__ __device__ constexpr int few_threads(bool is_down)
{
    return STREAM_TEAMS * (TEAM + 32) + (is_down ? 0 : 32);
}

/* Of gate/up, and those that bring x: all that multiply, but for some that choose experts. */
enum : int { GATE_UP_THREADS = few_threads(false), X_THREADS = GATE_UP_THREADS - CHOOSERS };

/* ---- Operands in bf16 ------------------------------------------------------------------------------------------- */

/* How rows of x or of v' come into shared memory, and what teams make of them; fp8_few.cuh has the other kind. */
struct bf16_operands {
    static constexpr bool IS_FP8 = false;

    struct state {
        uint64_t v_full[STREAM_TEAMS]; /* of each so many-th segment of v' */
        tile_maxima maxima;

        __device__ __forceinline__ void init()
        {
            for (uint64_t &each : v_full) barrier_init(shared_address(&each), 1);
        }
    };

    static __device__ __forceinline__ int32_t segment_bytes(const few_call &call)
    {
        return few_rows_bytes(call.stream.gemm.n_steps, call.route.T.n_tokens, 0);
    }

    /* A thread's part of x, from memory: nothing is read ahead. */
    struct x_part {
        __device__ __forceinline__ x_part(const few_call &) {}
    };

    /* The tokens' rows to shared memory, as they are or as what their codes are worth; k past the end as zeros. */
    static __device__ __forceinline__ void store_x(const few_call &one, x_part &, uint32_t to)
    {
        const gemm_call &call = one.stream.gemm;
        const int32_t n_chunks = call.n_steps * 8, n = token_count_of(one.route.T) * n_chunks;
        for (int32_t i = threadIdx.x; i < n; i += X_THREADS) {
            const int32_t row = i / n_chunks, chunk = i - row * n_chunks;
            values v = {};
            if (chunk * 8 < call.K) {
                const uint4 words = *(const uint4 *)(call.x + row * call.ldx + chunk * 8);
                v = {{words.x, words.y, words.z, words.w}};
                if (one.quantizes_x) v = worth_of_codes(quantize(v));
            }
            store_shared_16(to + row * stream_pitch(call.n_steps) + chunk * 16,
                            {v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]});
        }
    }

    /* Zeros behind the rows of v': k past the end is finite. */
    static __device__ __forceinline__ void pad_rows(const few_call &one, uint32_t rows, int n_segments)
    {
        const gemm_call &call = one.stream.gemm;
        const int n_pad = call.n_steps * 8 - call.K / 8;
        for (int i = threadIdx.x; i < n_segments * one.route.T.n_tokens * n_pad; i += STREAM_TEAMS * TEAM)
            store_shared_zeros(rows + i / n_pad * stream_pitch(call.n_steps) + call.K * 2 + i % n_pad * 16);
        barrier_sync<STREAM_TEAMS * TEAM>(X_ROWS);
    }

    /* A warp of each team starts the copies of every so many-th segment. */
    static __device__ __forceinline__ void load_v(const few_call &one, const stream_block &block, uint32_t full)
    {
        const gemm_call &call = one.stream.gemm;
        const int lane = threadIdx.x % 32, team = threadIdx.x / TEAM;
        const uint32_t own = full + team * 8, bytes = call.K * 2;
        wait_for_predecessors();
        if (threadIdx.x % TEAM >= 32) return;
        async_proxy_fence();
        for (int segment = team; segment < block.share.n_segments; segment += STREAM_TEAMS) {
            const token_tile rows = block.tiles[block.share.first.token_tile + segment];
            if (lane == 0) barrier_expect(own, rows.n_rows * bytes);
            __syncwarp();
            if (lane < rows.n_rows)
                bulk_copy(block.x + segment * segment_bytes(one) + lane * stream_pitch(call.n_steps),
                          call.x + (rows.first_row + lane) * call.ldx, bytes, own);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(own);
    }

    /* A team's tiles: every so many-th of the block's. */
    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void run(const few_call &one, const stream_block &block, const few_tiles &tiles,
                                               state &own_state, uint32_t stages, uint32_t ring)
    {
        const gemm_call &call = block.call.gemm;
        const int warp = threadIdx.x / 32, team = threadIdx.x / TEAM, lane = threadIdx.x % 32;
        ring_place at = ring_of_team(block.call, team, stages, ring);
        const uint32_t v_full = shared_address(&own_state.v_full);
        if (is_down) {
            pad_rows(one, block.x, block.share.n_segments);
            load_v(one, block, v_full);
        }
        const uint32_t x =
            block.x + min(lane % 8, one.route.T.n_tokens - 1) * stream_pitch(call.n_steps) + lane / 8 * 16;
        tile_place tile = block.share.first;
        advance(tile, team, call.n_tiles);
        int half = 0;
        for (int left = block.share.n_tiles - team; left > 0; left -= STREAM_TEAMS) {
            const strip own = {tile.tile, warp % 4};
            const row_pair rows = rows_of_thread(call, block.tiles[tile.token_tile].l, own);
            const int segment = is_down ? tile.token_tile - block.share.first.token_tile : 0;
            float d[4];
            if (is_down) barrier_wait(v_full + segment % STREAM_TEAMS * 8, 0);
            multiply_tile(block, d, x + segment * segment_bytes(one), at);
            store_columns<activation>(call, tiles, tile.token_tile, own, rows, d, block.call.quantizes,
                                      own_state.maxima.of[half ^= 1]);
            advance(tile, STREAM_TEAMS, call.n_tiles);
        }
    }
};

/* ---- The kernel ------------------------------------------------------------------------------------------------- */

/* gate/up: the tokens' experts, which are chosen by as many warps, the last ones of the block. */
template <class Operands>
static __device__ __forceinline__ void route_and_bring_x(const few_call &call, uint32_t x, few_choice &choice,
                                                         few_tiles &tiles, typename Operands::x_part &part)
{
    constexpr int all = GATE_UP_THREADS, last = all / 32 - 1;
    if (threadIdx.x < X_THREADS) {
        Operands::store_x(call, part, x);
        barrier_sync<all>(TILES_AND_X);
        return;
    }
    const int32_t t = last - threadIdx.x / 32;
    place_token(call, choice, tiles, t, t < token_count_of(call.route.T) ? choose_locals(call, choice, t) : -1);
    if (threadIdx.x < STREAM_TEAMS * TEAM) {
        barrier_arrive_at<CHOOSERS>(TILES);
        barrier_sync<all>(TILES_AND_X);
    } else {
        barrier_arrive_at<all>(TILES_AND_X);
        barrier_sync<CHOOSERS>(TILES);
        async_proxy_fence(); /* keys lay where weights will */
    }
}

template <class Operands>
static __device__ __forceinline__ void begin_gate_up(const few_call &call, uint32_t x, few_choice &choice,
                                                     few_tiles &tiles)
{
    await_logits(call, choice);
    make_keys(call, choice, token_count_of(call.route.T));
    typename Operands::x_part part(call);
    __syncthreads();
    route_and_bring_x<Operands>(call, x, choice, tiles, part);
    if (threadIdx.x / 32 != GATE_UP_THREADS / 32 - 1) return;
    store_routing(call, choice);
    __threadfence(); /* down's blocks may come up while this kernel runs */
    __syncwarp();
    launch_dependents();
}

/* down: the tiles of all blocks, as gate/up left them, for all who meet then. */
static __device__ void begin_down(const few_call &call, few_tiles &tiles)
{
    launch_dependents();
    const int32_t at = threadIdx.x;
    if (at < most_tiles(call.route)) {
        const int32_t *from = (const int32_t *)&call.stream.gemm.token_tiles[at];
        const int32_t n_rows = __ldcg(from + 2);
        tiles.of[at] = {__ldcg(from), __ldcg(from + 1), n_rows};
        tiles.columns[at] = tiles.counts[at] = (uint32_t)(0x11111111ull >> 4 * (8 - n_rows));
    }
    if (at == 0) tiles.n = __ldcg(call.stream.gemm.n_token_tiles);
}

template <class Operands, moe4_activation activation, bool is_down>
__global__ void __launch_bounds__(few_threads(is_down), 1) few_kernel(const __grid_constant__ few_call call)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t ring[STREAM_TEAMS * STREAM_STAGES * 2]; /* full, empty of every stage */
    __shared__ __align__(16) typename Operands::state state;
    __shared__ few_tiles tiles;
    __shared__ few_choice choice;
    const stream_call &stream = call.stream;
    const int n_stages = STREAM_TEAMS * stream.n_stages, x_at = n_stages * STREAM_STAGE_BYTES;
    const uint32_t stages = shared_address(shared), x = stages + x_at;
    if (is_down) begin_down(call, tiles);
    if (threadIdx.x < n_stages) {
        barrier_init(shared_address(&ring[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&ring[2 * threadIdx.x + 1]), TEAM);
        if (threadIdx.x == 0) state.init();
        barrier_init_fence();
    }
    if (is_down) {
        __syncthreads();
    } else {
        if (threadIdx.x == 0)
            place_choice(call, choice, shared, shared + x_at + Operands::segment_bytes(call) + STREAM_SLACK);
        __syncthreads();
        begin_gate_up<Operands>(call, x, choice, tiles);
    }
    const stream_share share = share_of_block(__shfl_sync(~0u, tiles.n, 0), stream.gemm.n_tiles);
    const stream_block block = {stream, tiles.of, tiles.n, share, x, 0, nullptr, nullptr};
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), filler = warp - STREAM_WARPS;
    if (filler < 0)
        Operands::template run<activation, is_down>(call, block, tiles, state, stages, shared_address(ring));
    else if (filler < STREAM_TEAMS && threadIdx.x % 32 == 0)
        fill_ring(block, filler, ring_of_team(stream, filler, stages, shared_address(ring)));
}

#endif
