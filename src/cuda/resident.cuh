/* The grouped GEMM for about 6 to 20 rows an expert.  Decoding still is most of the work there, but token tiles are too
 * wide for stream.cuh's products: wgmma takes them from shared memory, where a tile's x lies whole, in wgmma's swizzle,
 * for as many weight tiles as a block multiplies with it.  So nothing but weights flows while products run.
 *
 *   tiles     all weight tiles of all token tiles in one row, cut into equal runs, one a block; a team, which is a
 *             warpgroup, takes every fourth tile of its block's run
 *   ring      of stages of three or four steps, one a team, which a warp of its own fills by bulk copies
 *   segment   the tiles of a run that share a token tile; four warps bring its x, part by part
 *
 * The order of sums is that of gemm.cuh. */
#ifndef MOE4_CUDA_RESIDENT_CUH
#define MOE4_CUDA_RESIDENT_CUH

#include "cuda/stream.cuh"
#include "cuda/wgmma.cuh"

enum : int {
    RESIDENT_CONSUMERS = RESIDENT_TEAMS * TEAM,
    RESIDENT_THREADS = RESIDENT_CONSUMERS + 2 * TEAM, /* a warp a ring, four for x */
    RESIDENT_FILLER_REGISTERS = 32,
    RESIDENT_CONSUMER_REGISTERS = 104
};

/* ---- A team's ring ---------------------------------------------------------------------------------------------- */

struct resident_ring {
    uint32_t stages, barriers; /* shared addresses; full and empty of each stage */
    int n_stages, stage, parity;
    __device__ __forceinline__ void advance()
    {
        if (++stage == n_stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ uint32_t full() const
    {
        return barriers + stage * 16;
    }
    __device__ __forceinline__ uint32_t empty() const
    {
        return barriers + stage * 16 + 8;
    }
};

/* One lane fills its team's ring with all that the team will multiply. */
template <int steps>
static __device__ __forceinline__ void fill_resident(const gemm_call &call, const stream_share &share, int team,
                                                     resident_ring at)
{
    constexpr int stage_bytes = steps * CUDA_STEP_BYTES;
    tile_place tile = share.first;
    advance(tile, team, call.n_tiles);
    for (int left = share.n_tiles - team; left > 0; left -= RESIDENT_TEAMS) {
        const int l = call.token_tiles[tile.token_tile].l;
        const uint8_t *from = call.weights + ((int64_t)l * call.n_tiles + tile.tile) * call.n_steps * CUDA_STEP_BYTES;
        for (int step = 0; step < call.n_steps; step += steps, from += stage_bytes) {
            const uint32_t bytes = min(call.n_steps - step, steps) * CUDA_STEP_BYTES;
            barrier_wait(at.empty(), at.parity ^ 1);
            barrier_arrive_expect(at.full(), bytes);
            bulk_copy(at.stages + at.stage * stage_bytes, from, bytes, at.full());
            at.advance();
        }
        advance(tile, RESIDENT_TEAMS, call.n_tiles);
    }
}

/* ---- x ---------------------------------------------------------------------------------------------------------- */

/* Where a segment's x lies: a part a stage, of rows of 128 bytes a step, with barriers of its own.  So products begin
 * when the first part is there, and a part is refilled as soon as all teams have passed it for the last time. */
struct resident_x {
    uint32_t parts, part_bytes, barriers; /* shared addresses; full and empty of each part */
};

/* Four warps bring all segments' x, 16 rows of a step at a time; zeros where K is over.  What lies in rows past the
 * tile's end only reaches columns that nobody stores. */
template <int steps>
static __device__ __forceinline__ void fill_x(const gemm_call &call, const stream_share &share, const resident_x &x)
{
    constexpr int passes = (RESIDENT_ROWS + TEAM / 8 - 1) / (TEAM / 8);
    const int first_row = threadIdx.x % TEAM / 8, chunk = threadIdx.x % 8;
    if (call.tiles_are_old) wait_for_predecessors();
    for (int s = 0; s < share.n_segments; s++) {
        const token_tile tokens = call.token_tiles[share.first.token_tile + s];
        const int n_passes = (tokens.n_rows - first_row + TEAM / 8 - 1) / (TEAM / 8);
        const uint16_t *from[passes];
#pragma unroll
        for (int p = 0; p < passes; p++) {
            int row = tokens.first_row + first_row + TEAM / 8 * p;
            if (p < n_passes && call.row_source) row = call.row_source[row];
            from[p] = call.x + row * call.ldx + chunk * 8;
        }
        const uint32_t step_bytes = (tokens.n_rows + 7) / 8 * 1024;
        uint32_t to = x.parts + first_row * 128 + ((chunk ^ first_row % 8) << 4), full = x.barriers;
        for (int step = 0; step < call.n_steps; step += steps, to += x.part_bytes, full += 16) {
            barrier_wait(full + 8, s % 2 ^ 1);
#pragma unroll
            for (int i = 0; i < steps; i++) {
                const uint32_t valid = (step + i) * CUDA_STEP_K + chunk * 8 < call.K ? 16 : 0;
#pragma unroll
                for (int p = 0; p < passes; p++)
                    copy16_if(p < n_passes, to + i * step_bytes + TEAM / 8 * 128 * p,
                              from[p] + (valid ? (step + i) * CUDA_STEP_K : 0), valid);
            }
            copies_arrive(full);
        }
    }
    copy_wait_all(); /* shared memory must outlive the copies */
}

/* ---- Sums ------------------------------------------------------------------------------------------------------- */

/* What a tile does about its segment's x: waits for it, the first of its team there, and gives it back, the last. */
struct x_use {
    int parity;
    bool is_first, is_last;
};

/* All of K, decoding a step while the one before is multiplied. */
template <int N, int steps>
static __device__ __forceinline__ void multiply_resident(const gemm_call &call, resident_ring &at, const resident_x &x,
                                                         const x_use &use, float (&d)[N / 2])
{
    constexpr int stage_bytes = steps * CUDA_STEP_BYTES, sets = steps % 2 ? steps : 2;
    const int n_stages = (call.n_steps + steps - 1) / steps;
    packed_step packed;
    uint32_t a[sets][16];
    uint64_t b = wgmma_operand(x.parts);
    uint32_t x_full = x.barriers;
#pragma unroll
    for (float &each : d) each = 0.0f;
    barrier_wait(at.full(), at.parity);
    packed = load_step(at.stages + at.stage * stage_bytes);
    decode_step(packed.codes, packed.scales, a[0]);
    for (int n = 0; n < n_stages; n++, b += x.part_bytes / 16, x_full += 16) {
        const uint32_t stage = at.stages + at.stage * stage_bytes, empty = at.empty();
        if (use.is_first) {
            barrier_wait(x_full, use.parity);
            async_proxy_fence();
        }
#pragma unroll
        for (int i = 0; i < steps; i++) {
            if (i + 1 < steps) packed = load_step(stage + (i + 1) * CUDA_STEP_BYTES);
            multiply_step<N>(d, a[i % sets], b + i * (N * 128 / 16));
            if (i + 1 == steps) at.advance();
            if (i + 1 == steps && n + 1 < n_stages) {
                barrier_wait(at.full(), at.parity);
                packed = load_step(at.stages + at.stage * stage_bytes);
            }
            if (i + 1 < steps || n + 1 < n_stages) decode_step(packed.codes, packed.scales, a[(i + 1) % sets]);
            wgmma_wait<0>();
        }
        barrier_arrive(empty);
        if (use.is_last) barrier_arrive(x_full + 8);
    }
}

template <int N, int steps, moe4_activation activation>
static __device__ __forceinline__ void run_tile(const gemm_call &call, const token_tile &tokens, int tile,
                                                resident_ring &at, const resident_x &x, const x_use &use)
{
    const strip own = {tile, (int)threadIdx.x / 32 % 4};
    const row_pair rows = rows_of_thread(call, tokens.l, own);
    float d[N / 2];
    multiply_resident<N, steps>(call, at, x, use, d);
    store_sums<N, activation>(call, tokens, own, rows, d);
}

/* A team without a tile in a segment gives its x back as it comes. */
template <int steps>
static __device__ __forceinline__ void pass_x(const gemm_call &call, const resident_x &x, int parity)
{
    uint32_t full = x.barriers;
    for (int step = 0; step < call.n_steps; step += steps, full += 16) {
        barrier_wait(full, parity);
        barrier_arrive(full + 8);
    }
}

/* ---- A team's tiles --------------------------------------------------------------------------------------------- */

template <int steps, moe4_activation activation>
static __device__ __forceinline__ void run_segments(const gemm_call &call, const stream_share &share, int team,
                                                    resident_ring at, const resident_x &x)
{
    tile_place tile = share.first;
    advance(tile, team, call.n_tiles);
    if (call.tiles_are_old) wait_for_predecessors();
    int left = share.n_tiles - team;
    for (int s = 0; s < share.n_segments; s++) {
        const token_tile tokens = call.token_tiles[share.first.token_tile + s];
        const bool is_followed = s + 1 < share.n_segments;
        x_use use = {s % 2, true, false};
        for (; left > 0 && tile.token_tile == share.first.token_tile + s;
             left -= RESIDENT_TEAMS, advance(tile, RESIDENT_TEAMS, call.n_tiles)) {
            use.is_last = is_followed && (left <= RESIDENT_TEAMS || tile.tile + RESIDENT_TEAMS >= call.n_tiles);
            if (tokens.n_rows <= 8)
                run_tile<8, steps, activation>(call, tokens, tile.tile, at, x, use);
            else if (tokens.n_rows <= 16)
                run_tile<16, steps, activation>(call, tokens, tile.tile, at, x, use);
            else
                run_tile<RESIDENT_ROWS, steps, activation>(call, tokens, tile.tile, at, x, use);
            use.is_first = false;
        }
        if (use.is_first && is_followed) pass_x<steps>(call, x, use.parity);
    }
}

/* Steps that a tile's last stage lacks meet zeros of x, but must be numbers: clear what no copy has reached yet. */
static __device__ __forceinline__ void clear_rings(uint32_t stages, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += RESIDENT_THREADS * 16) store_shared_zeros(stages + i);
    async_proxy_fence();
}

template <int steps, moe4_activation activation>
__global__ void __launch_bounds__(RESIDENT_THREADS, 1) resident_kernel(const __grid_constant__ gemm_call call)
{
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t barriers[RESIDENT_TEAMS * RESIDENT_STAGES * 2], x_barriers[RESIDENT_PARTS * 2];
    const int n_stages = resident_stages(call.n_steps, call.tile_rows), team_bytes = n_stages * steps * CUDA_STEP_BYTES;
    const uint32_t rows = (call.tile_rows + 7) / 8 * 8;
    const resident_x x = {(shared_address(shared) + 1023) / 1024 * 1024, rows * steps * 128,
                          __shfl_sync(~0u, shared_address(x_barriers), 0)}; /* so that it is kept, not computed again */
    const uint32_t stages = x.parts + resident_x_bytes(call.n_steps, rows);
    if (threadIdx.x < RESIDENT_TEAMS * n_stages) {
        barrier_init(shared_address(&barriers[2 * threadIdx.x]), 1);
        barrier_init(shared_address(&barriers[2 * threadIdx.x + 1]), TEAM);
        barrier_init_fence();
    } else if (threadIdx.x >= RESIDENT_CONSUMERS && threadIdx.x < RESIDENT_CONSUMERS + RESIDENT_PARTS) {
        const uint32_t full = x.barriers + (threadIdx.x - RESIDENT_CONSUMERS) * 16;
        barrier_init(full, TEAM);
        barrier_init(full + 8, RESIDENT_CONSUMERS);
        barrier_init_fence();
    }
    if (call.n_steps % steps) clear_rings(stages, RESIDENT_TEAMS * team_bytes);
    if (!call.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    const stream_share share = share_of_block(*call.n_token_tiles, call.n_tiles);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* so that the compiler sees that warps branch whole */
    const bool is_filling = warp >= RESIDENT_CONSUMERS / 32;
    const int team = is_filling ? warp - RESIDENT_CONSUMERS / 32 : warp / (TEAM / 32);
    const uint32_t own_barriers = shared_address(barriers) + team * n_stages * 16;
    const resident_ring at = {stages + team * team_bytes, own_barriers, n_stages, 0, 0};
    if (is_filling) {
        registers_lower<RESIDENT_FILLER_REGISTERS>();
        if (team >= RESIDENT_TEAMS)
            fill_x<steps>(call, share, x);
        else if (threadIdx.x % 32 == 0)
            fill_resident<steps>(call, share, team, at);
    } else {
        registers_raise<RESIDENT_CONSUMER_REGISTERS>();
        run_segments<steps, activation>(call, share, team, at, x);
    }
}

#endif
