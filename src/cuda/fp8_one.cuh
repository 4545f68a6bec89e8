/* The GEMM for one token (stream_one.cuh) in fp8: whoever multiplies by rows quantises them.
 *
 *   rows     codes one after another, then scales, one of x, one a block of 128 of v'
 *   tiles    a team's own; or, where down has so few that one of two teams would have none, both share each: a block of
 *            128 k has a sum of its own, and only the sum of these has an order, so that a team takes every other stage
 *            and leaves sums in shared memory, where one of the teams adds up a tile's
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"). */
#ifndef MOE4_CUDA_FP8_ONE_CUH
#define MOE4_CUDA_FP8_ONE_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream_one.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_one_row
{

constexpr int CHUNKS = FP8_BLOCK / 16; /* of a block */
constexpr int SUM_LANES = 32;          /* of a tile that have sums: of rows g and g+8 of each quarter */

static __host__ __device__ __forceinline__ int32_t n_blocks_of(const gemm_call &call)
{
    return (call.n_steps + 1) / 2;
}

static __host__ __device__ __forceinline__ int32_t row_bytes(const gemm_call &call)
{
    return (n_blocks_of(call) * (FP8_BLOCK + 4) + 127) / 128 * 128;
}

/* Of a tile. */
static __host__ __device__ __forceinline__ int32_t sum_bytes(const gemm_call &call)
{
    return n_blocks_of(call) * SUM_LANES * 8;
}

static __device__ __forceinline__ int n_stages_of(const gemm_call &call)
{
    return (call.n_steps + STREAM_STEPS - 1) / STREAM_STEPS;
}

/* Whether a block's teams share their tiles. */
static __host__ __device__ constexpr bool shares_tiles(int teams)
{
    return teams == ONE_NARROW_TEAMS;
}

/* ---- Rows ------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ chunk16 load_chunk(const uint16_t *row, int chunk, int K)
{
    if (chunk * 16 >= K) return {};
    const uint4 *from = (const uint4 *)(row + chunk * 16);
    return {__ldcg(from), __ldcg(from + 1)};
}

static __device__ __forceinline__ uint32_t larger(uint32_t most, const chunk16 &v)
{
    return fp8_larger(fp8_larger(most, v.first), v.second);
}

/* down: the rows of v' of all of the block's segments, by so many threads, eight lanes a block of 128.  Once with
 * zeros, so that the code has been fetched when v' is there. */
template <int threads> static __device__ __forceinline__ void load_rows(const stream_block &block, uint32_t rows)
{
    const gemm_call &call = block.call.gemm;
    const int n_chunks = n_blocks_of(call) * CHUNKS, scales = n_blocks_of(call) * FP8_BLOCK;
    const int n = block.share.n_segments * n_chunks, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = (int)threadIdx.x - threads; i - lane < n; i += threads) {
        const bool is_rehearsal = i < 0;
        const int at = is_rehearsal ? i + threads : i, segment = at / n_chunks, chunk = at % n_chunks;
        const bool is_there = at < n;
        const int first_row = is_there ? block.tiles[block.share.first.token_tile + segment].first_row : 0;
        chunk16 v = {};
        if (i >= 0 && i < threads) wait_for_predecessors();
        if (is_there && !is_rehearsal) v = load_chunk(call.x + first_row * call.ldx, chunk, call.K);
        uint32_t most = larger(0, v);
        for (int offset = 1; offset < CHUNKS; offset *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
        const fp8_divisor by = fp8_divisor_of(fp8_largest(most));
        if (!is_there) continue;
        const uint32_t to = rows + segment * row_bytes(call);
        store_shared_16(to + chunk * 16, fp8_chunk(v.first, v.second, by));
        if (chunk % CHUNKS == 0) store_shared_4(to + scales + chunk / CHUNKS * 4, __float_as_uint(by.scale));
    }
    if ((int)threadIdx.x - lane >= n) wait_for_predecessors();
    async_proxy_fence();
    barrier_sync<threads>(X_ROW);
}

/* ---- A tile by one team ------------------------------------------------------------------------------------------ */

/* A lane's sums of rows g and g+8, those of the block of 128 k under way, and its weights of two steps: one is
 * multiplied while the other is decoded. */
struct sums {
    float total[2], d[4];
    uint32_t a[2][8];
};

template <bool is_first> static __device__ __forceinline__ void multiply_step(sums &of, uint32_t (&a)[8], uint32_t b)
{
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    wgmma_fence();
    wgmma_fp8_row<!is_first>(of.d, a, b);
    wgmma_fp8_row<true>(of.d, a + 4, b + 2);
    wgmma_commit();
}

template <bool is_down> static __device__ __forceinline__ void promote(sums &of, uint32_t scale)
{
    const float by = is_down ? __uint_as_float(load_shared_4(scale)) : 1.0f;
    of.total[0] = is_down ? fmaf(of.d[0], by, of.total[0]) : of.total[0] + of.d[0];
    of.total[1] = is_down ? fmaf(of.d[2], by, of.total[1]) : of.total[1] + of.d[2];
}

/* A stage's products, `left` steps being left, or a tile's last ones.  A block of one step is multiplied twice, since x
 * is zero in the second.  `packed` is a step ahead of what is decoded. */
template <bool is_last, bool is_down>
static __device__ __forceinline__ void multiply_next(const stream_call &call, const fp8_magnitudes &magnitudes,
                                                     sums &of, packed_step &packed, uint32_t b, uint32_t scales,
                                                     ring_place &at, int left)
{
#pragma unroll
    for (int i = 0; i < STREAM_STEPS; i++) {
        const bool is_end = is_last && (i + 1 == STREAM_STEPS || (i == 1 && left <= 2));
        if (i % 2)
            multiply_step<false>(of, of.a[1], b + i * 4);
        else
            multiply_step<true>(of, of.a[0], b + i * 4);
        if (!is_end) {
            fp8_decode_step(packed.codes, packed.scales, magnitudes, of.a[(i + 1) % 2]);
            uint32_t next = at.stage + (is_last ? min(i + 2, left - 1) : i + 2) * CUDA_STEP_BYTES;
            if (!is_last && i == 2) { /* all of this stage is read */
                barrier_arrive(at.empty);
                advance(call, at);
                barrier_wait(at.full, at.parity);
            }
            if (!is_last && i >= 2) next = at.stage + (i == 3 && left > STREAM_STEPS + 1 ? CUDA_STEP_BYTES : 0);
            packed = load_step(next);
        }
        wgmma_wait<0>();
        if (i % 2) promote<is_down>(of, scales + i / 2 * 4);
        if (is_end) break;
    }
    if (!is_last) return;
    barrier_arrive(at.empty);
    advance(call, at);
}

/* All of K. */
template <bool is_down>
static __device__ __forceinline__ void multiply_row(const stream_call &call, sums &of, int base, uint32_t row,
                                                    ring_place &at)
{
    const fp8_magnitudes magnitudes = fp8_magnitudes_of(base);
    int left = call.gemm.n_steps;
    uint32_t b = row >> 4 | 1 << 16, scales = row + n_blocks_of(call.gemm) * FP8_BLOCK;
    barrier_wait(at.full, at.parity);
    packed_step packed = load_step(at.stage);
    fp8_decode_step(packed.codes, packed.scales, magnitudes, of.a[0]);
    packed = load_step(at.stage + (left > 1 ? CUDA_STEP_BYTES : 0));
    for (; left > STREAM_STEPS; left -= STREAM_STEPS, b += STREAM_STEPS * 4, scales += STREAM_STEPS / 2 * 4)
        multiply_next<false, is_down>(call, magnitudes, of, packed, b, scales, at, left);
    multiply_next<true, is_down>(call, magnitudes, of, packed, b, scales, at, left);
}

/* ---- A tile by all teams ----------------------------------------------------------------------------------------- */

/* The block's ring, of which a thread takes every `by`-th stage. */
static __device__ __forceinline__ ring_place ring_from(int first, uint32_t stages, uint32_t barriers)
{
    return {stages + first * STREAM_STAGE_BYTES, barriers + first * 16, barriers + first * 16 + 8, first, 0};
}

static __device__ __forceinline__ void advance_by(int by, int n_slots, ring_place &at)
{
    at.slot += by;
    const int wrapped = at.slot >= n_slots, moved = wrapped ? by - n_slots : by;
    at.stage += moved * STREAM_STAGE_BYTES;
    at.full += moved * 16;
    at.empty += moved * 16;
    if (wrapped) at.slot -= n_slots, at.parity ^= 1;
}

/* By one thread, for all teams. */
template <int teams>
static __device__ __forceinline__ void fill_shared(const stream_block &block, uint32_t stages, uint32_t ring)
{
    const gemm_call &call = block.call.gemm;
    const int n_slots = teams * block.call.n_stages;
    ring_place at = ring_from(0, stages, ring);
    tile_place tile = block.share.first;
    for (int i = 0; i < block.share.n_tiles; i++) {
        const int64_t index = (int64_t)block.tiles[tile.token_tile].l * call.n_tiles + tile.tile;
        const uint8_t *from = call.weights + index * call.n_steps * CUDA_STEP_BYTES;
        for (int step = 0; step < call.n_steps; step += STREAM_STEPS, from += STREAM_STAGE_BYTES) {
            const uint32_t bytes = min(call.n_steps - step, (int)STREAM_STEPS) * CUDA_STEP_BYTES;
            barrier_wait(at.empty, at.parity ^ 1);
            barrier_arrive_expect(at.full, bytes);
            bulk_copy(at.stage, from, bytes, at.full);
            advance_by(1, n_slots, at);
        }
        advance(tile, 1, call.n_tiles);
    }
}

/* A stage's two blocks of 128 k, of which n steps are there.  A block of one step is multiplied twice, since x is zero
 * in the second; one that is not there by whatever lies behind x. */
static __device__ __forceinline__ void multiply_stage(const fp8_magnitudes &magnitudes, float (&d)[2][4],
                                                      uint32_t stage, uint32_t b, int n)
{
    uint32_t a[STREAM_STEPS][8];
#pragma unroll
    for (int i = 0; i < STREAM_STEPS; i++) {
        const packed_step packed = load_step(stage + min(i, n - 1) * CUDA_STEP_BYTES);
        fp8_decode_step(packed.codes, packed.scales, magnitudes, a[i]);
#pragma unroll
        for (uint32_t &each : a[i]) asm volatile("" : "+r"(each)); /* decoded by now */
        wgmma_fence();
        if (i % 2)
            wgmma_fp8_row<true>(d[i / 2], a[i], b + i * 4);
        else
            wgmma_fp8_row<false>(d[i / 2], a[i], b + i * 4);
        wgmma_fp8_row<true>(d[i / 2], a[i] + 4, b + i * 4 + 2);
        wgmma_commit();
    }
}

/* A stage of a tile, whose blocks' sums go to shared memory. */
static __device__ __forceinline__ void multiply_shared(const stream_call &call, int base, uint32_t row, int stage,
                                                       uint32_t sums, const ring_place &at)
{
    const int n = min(call.gemm.n_steps - stage * STREAM_STEPS, (int)STREAM_STEPS);
    const uint32_t to = sums + stage * (STREAM_STEPS / 2) * SUM_LANES * 8;
    float d[2][4] = {};
    barrier_wait(at.full, at.parity);
    multiply_stage(fp8_magnitudes_of(base), d, at.stage, (row >> 4 | 1 << 16) + stage * STREAM_STEPS * 4, n);
    barrier_arrive(at.empty);
    wgmma_wait<0>();
    if (threadIdx.x % 4) return;
    store_shared_8(to, __float_as_uint(d[0][0]), __float_as_uint(d[0][2]));
    if (n > 2) store_shared_8(to + SUM_LANES * 8, __float_as_uint(d[1][0]), __float_as_uint(d[1][2]));
}

/* down: the sums of all blocks of a tile in their order. */
static __device__ __forceinline__ void add_blocks(const gemm_call &call, uint32_t sums, uint32_t row, float (&total)[2])
{
    const uint32_t scales = row + n_blocks_of(call) * FP8_BLOCK;
    total[0] = total[1] = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n_blocks_of(call); i++) {
        const uint2 bits = load_shared_8(sums + i * SUM_LANES * 8);
        const float scale = __uint_as_float(load_shared_4(scales + i * 4));
        total[0] = fmaf(__uint_as_float(bits.x), scale, total[0]);
        total[1] = fmaf(__uint_as_float(bits.y), scale, total[1]);
    }
}

} // namespace fp8_one_row

struct fp8_operands {
    template <int teams> struct state {
        uint64_t full[2], empty[2]; /* of the sums of a tile that teams share */

        __device__ __forceinline__ void init()
        {
            for (int i = 0; i < 2; i++) {
                barrier_init(shared_address(&full[i]), teams * TEAM);
                barrier_init(shared_address(&empty[i]), TEAM);
            }
        }
    };

    static __host__ __device__ constexpr int fillers(int teams)
    {
        return fp8_one_row::shares_tiles(teams) ? 1 : teams;
    }

    static __host__ __device__ __forceinline__ int32_t x_bytes(const gemm_call &call)
    {
        return fp8_one_row::row_bytes(call);
    }

    /* Rows of all token tiles that a block can meet, and two tiles' sums. */
    static int32_t v_bytes(const one_call &call, int teams, int32_t n_blocks)
    {
        const gemm_call &gemm = call.stream.gemm;
        const int32_t n = call.route.router.top_k * gemm.n_tiles, most = (n + n_blocks - 1) / n_blocks;
        const int32_t n_rows = std::min(most, (most + gemm.n_tiles - 2) / gemm.n_tiles + 1);
        return (fp8_one_row::shares_tiles(teams) ? 2 * fp8_one_row::sum_bytes(gemm) : 0) +
               n_rows * fp8_one_row::row_bytes(gemm);
    }

    /* A thread's part of x, which comes while experts are chosen. */
    struct x_part {
        chunk16 v;
        __device__ __forceinline__ x_part(const gemm_call &call)
            : v(fp8_one_row::load_chunk(call.x, threadIdx.x, call.K))
        {
        }
    };

    template <int threads>
    static __device__ __forceinline__ void store_x(const one_call &one, const x_part &part, uint32_t to)
    {
        using namespace fp8_one_row;
        __shared__ uint32_t maxima[threads / 32];
        const gemm_call &call = one.stream.gemm;
        const int lane = threadIdx.x % 32, n_chunks = n_blocks_of(call) * CHUNKS;
        uint32_t most = larger(0, part.v);
        for (int chunk = threadIdx.x + threads; chunk < n_chunks; chunk += threads)
            most = larger(most, load_chunk(call.x, chunk, call.K));
        most = __reduce_max_sync(~0u, fp8_largest(most));
        if (lane == 0) maxima[threadIdx.x / 32] = most;
        barrier_sync<threads>(X_ROW);
        const fp8_divisor by = fp8_divisor_of(__reduce_max_sync(~0u, maxima[lane % (threads / 32)]));
        for (int chunk = threadIdx.x; chunk < n_chunks; chunk += threads) {
            const chunk16 v = chunk < threads ? part.v : load_chunk(call.x, chunk, call.K);
            store_shared_16(to + chunk * 16, fp8_chunk(v.first, v.second, by));
        }
        if (threadIdx.x == 0) store_shared_4(to + n_blocks_of(call) * FP8_BLOCK, __float_as_uint(by.scale));
        async_proxy_fence();
    }

    template <int teams> static __device__ __forceinline__ void pad_rows(const gemm_call &, uint32_t) {}

    /* A tile's scales and what else belongs to it. */
    struct weight_tile {
        row_pair rows;
        int base;
        __device__ __forceinline__ weight_tile(const one_call &one, int l, const strip &at)
            : rows(rows_of_thread(one.stream.gemm, l, at)),
              base(one.tile_base[(int64_t)l * one.stream.gemm.n_tiles + at.tile])
        {
            rows.unit *= fp8_tile_unit(base);
        }
    };

    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void store(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                 row_pair rows, const float (&total)[2], uint32_t row)
    {
        float d[4] = {total[0], 0.0f, total[1], 0.0f};
        if (!is_down) {
            const float scale = __uint_as_float(load_shared_4(row + fp8_one_row::n_blocks_of(call) * FP8_BLOCK));
            d[0] = d[0] * rows.unit * scale, d[2] = d[2] * rows.unit * scale;
            rows.unit = 1.0f;
        }
        store_sums<STREAM_ROWS, activation>(call, tokens, at, rows, d);
    }

    template <moe4_activation activation, bool is_down, int teams>
    static __device__ __forceinline__ void run_own(const one_call &one, const stream_block &block, ring_place at)
    {
        using namespace fp8_one_row;
        const gemm_call &call = block.call.gemm;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        tile_place tile = block.share.first;
        if (is_down) load_rows<teams * TEAM>(block, block.x);
        advance(tile, warp / 4, call.n_tiles);
        for (int left = block.share.n_tiles - warp / 4; left > 0; left -= teams) {
            const token_tile tokens = block.tiles[tile.token_tile];
            const strip own = {tile.tile, warp % 4};
            const weight_tile weights(one, tokens.l, own);
            const int segment = is_down ? tile.token_tile - block.share.first.token_tile : 0;
            const uint32_t row = block.x + segment * row_bytes(call);
            sums of = {};
            multiply_row<is_down>(block.call, of, weights.base, row, at);
            store<activation, is_down>(call, tokens, own, weights.rows, of.total, row);
            advance(tile, teams, call.n_tiles);
        }
    }

    /* down. */
    template <int teams>
    static __device__ __forceinline__ void run_shared(const one_call &one, const stream_block &block,
                                                      state<teams> &state, ring_place at)
    {
        using namespace fp8_one_row;
        const gemm_call &call = block.call.gemm;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / 4;
        const int n_stages = n_stages_of(call), n_slots = teams * block.call.n_stages;
        const uint32_t rows = block.x + 2 * sum_bytes(call), in_sums = threadIdx.x % TEAM / 4 * 8;
        tile_place tile = block.share.first;
        load_rows<teams * TEAM>(block, rows);
        for (int i = 0, stage = team; i < block.share.n_tiles; i++, stage -= n_stages) {
            const uint32_t full = shared_address(&state.full[i % 2]), empty = shared_address(&state.empty[i % 2]);
            const uint32_t parity = i / 2 & 1, own_sums = block.x + i % 2 * sum_bytes(call) + in_sums;
            const token_tile tokens = block.tiles[tile.token_tile];
            const strip own = {tile.tile, warp % 4};
            const weight_tile weights(one, tokens.l, own);
            const uint32_t row = rows + (tile.token_tile - block.share.first.token_tile) * row_bytes(call);
            barrier_wait(empty, parity ^ 1);
            for (; stage < n_stages; stage += teams) {
                multiply_shared(block.call, weights.base, row, stage, own_sums, at);
                advance_by(teams, n_slots, at);
            }
            barrier_arrive(full);
            advance(tile, 1, call.n_tiles);
            if (i % teams != team) continue;
            float total[2];
            barrier_wait(full, parity);
            add_blocks(call, own_sums, row, total);
            barrier_arrive(empty);
            store<MOE4_ACTIVATION_IDENTITY, true>(call, tokens, own, weights.rows, total, row);
        }
    }

    template <moe4_activation activation, bool is_down, int teams>
    static __device__ __forceinline__ void run(const one_call &one, const stream_block &block, state<teams> &state,
                                               uint32_t stages, uint32_t ring)
    {
        if constexpr (is_down && fp8_one_row::shares_tiles(teams))
            run_shared<teams>(one, block, state, fp8_one_row::ring_from(threadIdx.x / TEAM, stages, ring));
        else
            run_own<activation, is_down, teams>(one, block, ring_of_team(block.call, threadIdx.x / TEAM, stages, ring));
    }

    template <int teams>
    static __device__ __forceinline__ void fill(const stream_block &block, int filler, uint32_t stages, uint32_t ring)
    {
        if (fp8_one_row::shares_tiles(teams))
            fp8_one_row::fill_shared<teams>(block, stages, ring);
        else
            fill_ring<teams>(block, filler, ring_of_team(block.call, filler, stages, ring));
    }
};

#endif
