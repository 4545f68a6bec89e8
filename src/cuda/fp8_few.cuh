/* The GEMM for few tokens (stream_few.cuh) in fp8: whoever multiplies by rows quantises them.
 *
 *   rows     of a token tile, FEW_TOKENS at most: chunks of 16 codes, of all rows one after another, then scales, one a
 *            row of x, one a row and block of 128 of v'
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"). */
#ifndef MOE4_CUDA_FP8_FEW_CUH
#define MOE4_CUDA_FP8_FEW_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream_few.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_few_rows
{

constexpr int CHUNKS = FP8_BLOCK / 16; /* of a block */

static __host__ __device__ __forceinline__ int32_t n_blocks_of(const gemm_call &call)
{
    return (call.n_steps + 1) / 2;
}

/* From the first chunk of a token tile's rows to their scales. */
static __device__ __forceinline__ int32_t scales_at(const gemm_call &call)
{
    return n_blocks_of(call) * FP8_BLOCK * FEW_TOKENS;
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
static __device__ __forceinline__ void load_rows(const stream_block &block, uint32_t rows)
{
    const gemm_call &call = block.call.gemm;
    const token_tile *const there = &block.tiles[block.share.first.token_tile];
    const int n_chunks = n_blocks_of(call) * CHUNKS, lane = threadIdx.x % 32;
    int n = 0;
    for (int segment = 0; segment < block.share.n_segments; segment++) n += there[segment].n_rows * n_chunks;
#pragma unroll 1
    for (int i = (int)threadIdx.x - STREAM_TEAMS * TEAM; i - lane < n; i += STREAM_TEAMS * TEAM) {
        const bool is_rehearsal = i < 0;
        const int at = is_rehearsal ? i + STREAM_TEAMS * TEAM : i, chunk = at % n_chunks;
        const bool is_there = at < n;
        int segment = 0, row = at / n_chunks;
        for (; is_there && row >= there[segment].n_rows; segment++) row -= there[segment].n_rows;
        chunk16 v = {};
        if (i >= 0 && i < STREAM_TEAMS * TEAM) wait_for_predecessors();
        if (is_there && !is_rehearsal)
            v = load_chunk(call.x + (there[segment].first_row + row) * call.ldx, chunk, call.K);
        uint32_t most = larger(0, v);
        for (int offset = 1; offset < CHUNKS; offset *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, offset));
        const fp8_divisor by = fp8_divisor_of(fp8_largest(most));
        if (!is_there) continue;
        const uint32_t to = rows + segment * few_rows_bytes(call.n_steps, FEW_TOKENS, 1);
        store_shared_16(to + (chunk * FEW_TOKENS + row) * 16, fp8_chunk(v.first, v.second, by));
        if (chunk % CHUNKS == 0)
            store_shared_4(to + scales_at(call) + (chunk / CHUNKS * FEW_TOKENS + row) * 4, __float_as_uint(by.scale));
    }
    if ((int)threadIdx.x - lane >= n) wait_for_predecessors();
    async_proxy_fence();
    barrier_sync<STREAM_TEAMS * TEAM>(X_ROWS);
}

/* ---- A team's tile ----------------------------------------------------------------------------------------------- */

/* A lane's sums of rows g and g+8, those of the block of 128 k under way, and its weights of two steps: one is
 * multiplied while the other is decoded.   */
struct sums {
    float total[4], d[4];
    uint32_t a[2][8];
};

template <bool is_first> static __device__ __forceinline__ void multiply_step(sums &of, uint32_t (&a)[8], uint32_t b)
{
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    wgmma_fence();
    wgmma_fp8_row<!is_first>(of.d, a, b);
    wgmma_fp8_row<true>(of.d, a + 4, b + 2 * FEW_TOKENS);
    wgmma_commit();
}

template <bool is_down> static __device__ __forceinline__ void promote(sums &of, uint32_t scale)
{
    uint2 by = {};
    if (is_down) by = load_shared_8(scale);
#pragma unroll
    for (int i = 0; i < 4; i++)
        of.total[i] =
            is_down ? fmaf(of.d[i], __uint_as_float(i % 2 ? by.y : by.x), of.total[i]) : of.total[i] + of.d[i];
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
            multiply_step<false>(of, of.a[1], b + i * 4 * FEW_TOKENS);
        else
            multiply_step<true>(of, of.a[0], b + i * 4 * FEW_TOKENS);
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
        if (i % 2) promote<is_down>(of, scales + i / 2 * 4 * FEW_TOKENS);
        if (is_end) break;
    }
    if (!is_last) return;
    barrier_arrive(at.empty);
    advance(call, at);
}

/* All of K, by rows at this address. */
template <bool is_down>
static __device__ __forceinline__ void multiply_rows(const stream_call &call, sums &of, int base, uint32_t rows,
                                                     ring_place &at)
{
    const fp8_magnitudes magnitudes = fp8_magnitudes_of(base);
    int left = call.gemm.n_steps;
    uint32_t b = rows >> 4 | FEW_TOKENS << 16, scales = rows + scales_at(call.gemm);
    scales += threadIdx.x % 4 * 8;
    barrier_wait(at.full, at.parity);
    packed_step packed = load_step(at.stage);
    fp8_decode_step(packed.codes, packed.scales, magnitudes, of.a[0]);
    packed = load_step(at.stage + (left > 1 ? CUDA_STEP_BYTES : 0));
    for (; left > STREAM_STEPS; left -= STREAM_STEPS) {
        multiply_next<false, is_down>(call, magnitudes, of, packed, b, scales, at, left);
        b += STREAM_STEPS * 4 * FEW_TOKENS, scales += STREAM_STEPS / 2 * 4 * FEW_TOKENS;
    }
    multiply_next<true, is_down>(call, magnitudes, of, packed, b, scales, at, left);
}

/* The largest of all lanes that have a token's part. */
static __device__ __forceinline__ uint32_t largest_of_lanes(uint32_t most)
{
    for (int offset = FEW_TOKENS; offset < 32; offset *= 2) most = max(most, __shfl_xor_sync(~0u, most, offset));
    return most;
}

} // namespace fp8_few_rows

struct fp8_operands {
    static constexpr bool IS_FP8 = true;

    struct state {
        __device__ __forceinline__ void init() {}
    };

    static __device__ __forceinline__ int32_t segment_bytes(const few_call &call)
    {
        return few_rows_bytes(call.stream.gemm.n_steps, FEW_TOKENS, 1);
    }

    /* A thread's part of x, every so many-th chunk of one token, which comes while experts are chosen; what is more
     * than it keeps is read twice. */
    struct x_part {
        static constexpr int KEPT = 4, STEP = X_THREADS / FEW_TOKENS;
        int token, first;
        bool is_there;
        chunk16 v[KEPT];

        __device__ __forceinline__ x_part(const few_call &call)
            : token(threadIdx.x % FEW_TOKENS), first(threadIdx.x / FEW_TOKENS),
              is_there(threadIdx.x < X_THREADS && token < token_count_of(call.route.T))
        {
#pragma unroll
            for (int i = 0; i < KEPT; i++) v[i] = load(call.stream.gemm, first + i * STEP);
        }
        __device__ __forceinline__ chunk16 load(const gemm_call &call, int at) const
        {
            return fp8_few_rows::load_chunk(call.x + token * call.ldx, at, is_there ? call.K : 0);
        }
    };

    static __device__ __forceinline__ void store_x(const few_call &one, x_part &part, uint32_t to)
    {
        using namespace fp8_few_rows;
        constexpr int warps = X_THREADS / 32, KEPT = x_part::KEPT, STEP = x_part::STEP;
        __shared__ uint32_t maxima[warps][FEW_TOKENS];
        const gemm_call &call = one.stream.gemm;
        const int lane = threadIdx.x % 32, n_chunks = n_blocks_of(call) * CHUNKS;
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < KEPT; i++) most = larger(most, part.v[i]);
        for (int chunk = part.first + KEPT * STEP; chunk < n_chunks; chunk += STEP)
            most = larger(most, part.load(call, chunk));
        most = largest_of_lanes(fp8_largest(most));
        if (lane < FEW_TOKENS) maxima[threadIdx.x / 32][lane] = most;
        barrier_sync<X_THREADS>(X_ROWS);
        most = 0;
        for (int warp = lane / FEW_TOKENS; warp < warps; warp += 32 / FEW_TOKENS)
            most = max(most, maxima[warp][part.token]);
        const fp8_divisor by = fp8_divisor_of(largest_of_lanes(most));
#pragma unroll 1 /* short: code that has not run before comes as slowly as weights do */
        for (int chunk = part.first, i = 0; part.is_there && chunk < n_chunks; chunk += STEP, i++) {
            const chunk16 v = i < KEPT ? part.v[0] : part.load(call, chunk);
            store_shared_16(to + (chunk * FEW_TOKENS + part.token) * 16, fp8_chunk(v.first, v.second, by));
#pragma unroll
            for (int kept = 1; kept < KEPT; kept++) part.v[kept - 1] = part.v[kept];
        }
        if (threadIdx.x < FEW_TOKENS) store_shared_4(to + scales_at(call) + threadIdx.x * 4, __float_as_uint(by.scale));
        async_proxy_fence();
    }

    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void store(const gemm_call &call, const few_tiles &tiles, int tile,
                                                 const strip &at, row_pair rows, const float (&total)[4], uint32_t x)
    {
        tile_maxima none;
        float d[4] = {total[0], total[1], total[2], total[3]};
        if (!is_down) {
            uint32_t scales = x + fp8_few_rows::scales_at(call);
            scales += threadIdx.x % 4 * 8;
            const uint2 by = load_shared_8(scales);
#pragma unroll
            for (int i = 0; i < 4; i++) d[i] = d[i] * rows.unit * __uint_as_float(i % 2 ? by.y : by.x);
            rows.unit = 1.0f;
        }
        store_columns<fp8_activation<activation>>(call, tiles, tile, at, rows, d, false, none.of[0]);
    }

    /* Asked for a tile ahead, since decoding begins with it. */
    static __device__ __forceinline__ int base_of(const few_call &one, const stream_block &block, const tile_place &at,
                                                  int left)
    {
        if (left <= 0) return 0;
        return one.tile_base[(int64_t)block.tiles[at.token_tile].l * block.call.gemm.n_tiles + at.tile];
    }

    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void run(const few_call &one, const stream_block &block, const few_tiles &tiles,
                                               state &, uint32_t stages, uint32_t ring)
    {
        using namespace fp8_few_rows;
        const gemm_call &call = block.call.gemm;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / 4; /* the same number for all lanes */
        ring_place at = ring_of_team(block.call, team, stages, ring);
        tile_place tile = block.share.first;
        advance(tile, team, call.n_tiles);
        int left = block.share.n_tiles - team, base = base_of(one, block, tile, left);
        if (is_down) load_rows(block, block.x);
        for (; left > 0; left -= STREAM_TEAMS) {
            const strip own = {tile.tile, warp % 4};
            const int place = tile.token_tile, now = base;
            row_pair rows = rows_of_thread(call, block.tiles[place].l, own);
            rows.unit *= fp8_tile_unit(base);
            const int segment = is_down ? place - block.share.first.token_tile : 0;
            const uint32_t x = __shfl_sync(~0u, block.x + segment * few_rows_bytes(call.n_steps, FEW_TOKENS, 1), 0);
            advance(tile, STREAM_TEAMS, call.n_tiles);
            base = base_of(one, block, tile, left - STREAM_TEAMS);
            sums of = {};
            multiply_rows<is_down>(block.call, of, now, x, at);
            store<activation, is_down>(call, tiles, place, own, rows, of.total, x);
        }
    }
};

#endif
