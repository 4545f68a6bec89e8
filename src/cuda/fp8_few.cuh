/* The GEMM for few tokens (stream_few.cuh) in fp8: whoever multiplies by rows quantises them.
 *
 *   rows     of a token tile, FEW_TOKENS at most: chunks of 16 codes, of all rows one after another, then scales, one a
 *            row of x, one a row and block of 128 of v'
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"). */
#ifndef MOE4_CUDA_FP8_FEW_CUH
#define MOE4_CUDA_FP8_FEW_CUH

#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_row_products.cuh"
#include "cuda/stream_few.cuh"

namespace fp8_few_rows
{

using namespace fp8_row_products;

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
        const fp8_divisor by = fp8_divisor_of_eight(v);
        if (!is_there) continue;
        const uint32_t to = rows + segment * few_rows_bytes(call.n_steps, FEW_TOKENS, 1);
        store_shared_16(to + (chunk * FEW_TOKENS + row) * 16, fp8_chunk(v.first, v.second, by));
        if (chunk % CHUNKS == 0)
            store_shared_4(to + scales_at<FEW_TOKENS>(call) + (chunk / CHUNKS * FEW_TOKENS + row) * 4,
                           __float_as_uint(by.scale));
    }
    if ((int)threadIdx.x - lane >= n) wait_for_predecessors();
    async_proxy_fence();
    barrier_sync<STREAM_TEAMS * TEAM>(X_ROWS);
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
            return fp8_row_products::load_chunk(call.x + token * call.ldx, at, is_there ? call.K : 0);
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
        if (threadIdx.x < FEW_TOKENS)
            store_shared_4(to + scales_at<FEW_TOKENS>(call) + threadIdx.x * 4, __float_as_uint(by.scale));
        async_proxy_fence();
    }

    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void store(const gemm_call &call, const few_tiles &tiles, int tile,
                                                 const strip &at, row_pair rows, const float (&total)[4], uint32_t x)
    {
        tile_maxima none;
        float d[4] = {total[0], total[1], total[2], total[3]};
        if (!is_down) {
            uint32_t scales = x + fp8_row_products::scales_at<FEW_TOKENS>(call);
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
            sums<FEW_TOKENS> of = {};
            multiply_rows<is_down>(block.call, of, now, x, at);
            store<activation, is_down>(call, tiles, place, own, rows, of.total, x);
        }
    }
};

#endif
