/* The GEMM for one token (stream_one.cuh) in fp8: whoever multiplies by rows quantises them.
 *
 *   rows     codes one after another, then scales, one of x, one a block of 128 of v'
 *
 * Sums are those of fp8.cuh to the bit ("wgmma_fp8_k32"). */
#ifndef MOE4_CUDA_FP8_ONE_CUH
#define MOE4_CUDA_FP8_ONE_CUH

#include "cuda/fp8_activation.cuh"
#include "cuda/fp8_row_products.cuh"
#include "cuda/stream_one.cuh"

namespace fp8_one_row
{

using namespace fp8_row_products;

static __host__ __device__ __forceinline__ int32_t row_bytes(const gemm_call &call)
{
    return (n_blocks_of(call) * (FP8_BLOCK + 4) + 127) / 128 * 128;
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
        const fp8_divisor by = fp8_divisor_of_eight(v);
        if (!is_there) continue;
        const uint32_t to = rows + segment * row_bytes(call);
        store_shared_16(to + chunk * 16, fp8_chunk(v.first, v.second, by));
        if (chunk % CHUNKS == 0) store_shared_4(to + scales + chunk / CHUNKS * 4, __float_as_uint(by.scale));
    }
    if ((int)threadIdx.x - lane >= n) wait_for_predecessors();
    async_proxy_fence();
    barrier_sync<threads>(X_ROW);
}

} // namespace fp8_one_row

struct fp8_operands {
    template <int teams> struct state {
        __device__ __forceinline__ void init() {}
    };

    static __host__ __device__ constexpr int fillers(int teams)
    {
        return teams;
    }

    static __host__ __device__ __forceinline__ int32_t x_bytes(const gemm_call &call)
    {
        return fp8_one_row::row_bytes(call);
    }

    /* Rows of all token tiles that a block can meet. */
    static int32_t v_bytes(const one_call &call, int, int32_t n_blocks)
    {
        const gemm_call &gemm = call.stream.gemm;
        const int32_t n = call.route.router.top_k * gemm.n_tiles, most = (n + n_blocks - 1) / n_blocks;
        return std::min(most, (most + gemm.n_tiles - 2) / gemm.n_tiles + 1) * fp8_one_row::row_bytes(gemm);
    }

    /* A thread's part of x, which comes while experts are chosen. */
    struct x_part {
        chunk16 v;
        __device__ __forceinline__ x_part(const gemm_call &call)
            : v(fp8_row_products::load_chunk(call.x, threadIdx.x, call.K))
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

    template <moe4_activation activation, bool is_down>
    static __device__ __forceinline__ void store(const gemm_call &call, const token_tile &tokens, const strip &at,
                                                 row_pair rows, const float (&total)[2], uint32_t row)
    {
        float d[4] = {total[0], 0.0f, total[1], 0.0f};
        if (!is_down) {
            const float scale = __uint_as_float(load_shared_4(row + fp8_row_products::scales_at<1>(call)));
            d[0] = d[0] * rows.unit * scale, d[2] = d[2] * rows.unit * scale;
            rows.unit = 1.0f;
        }
        store_sums<STREAM_ROWS, fp8_activation<activation>>(call, tokens, at, rows, d);
    }

    /* Asked for a tile ahead, since decoding begins with it. */
    static __device__ __forceinline__ int base_of(const one_call &one, const stream_block &block, const tile_place &at,
                                                  int left)
    {
        if (left <= 0) return 0;
        return one.tile_base[(int64_t)block.tiles[at.token_tile].l * block.call.gemm.n_tiles + at.tile];
    }

    template <moe4_activation activation, bool is_down, int teams>
    static __device__ __forceinline__ void run(const one_call &one, const stream_block &block, state<teams> &,
                                               uint32_t stages, uint32_t ring)
    {
        using namespace fp8_one_row;
        const gemm_call &call = block.call.gemm;
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / 4; /* the same number for all lanes */
        ring_place at = ring_of_team(block.call, team, stages, ring);
        tile_place tile = block.share.first;
        advance(tile, team, call.n_tiles);
        int left = block.share.n_tiles - team, base = base_of(one, block, tile, left);
        if (is_down) load_rows<teams * TEAM>(block, block.x);
        for (; left > 0; left -= teams) {
            const token_tile tokens = block.tiles[tile.token_tile];
            const strip own = {tile.tile, warp % 4};
            row_pair rows = rows_of_thread(call, tokens.l, own);
            rows.unit *= fp8_tile_unit(base);
            const int segment = is_down ? tile.token_tile - block.share.first.token_tile : 0, now = base;
            const uint32_t row = __shfl_sync(~0u, block.x + segment * row_bytes(call), 0);
            advance(tile, teams, call.n_tiles);
            base = base_of(one, block, tile, left - teams);
            sums<1> of = {};
            multiply_rows<is_down>(block.call, of, now, row, at);
            store<activation, is_down>(call, tokens, own, rows, of.total, row);
        }
    }

    template <int teams>
    static __device__ __forceinline__ void fill(const stream_block &block, int filler, uint32_t stages, uint32_t ring)
    {
        fill_ring<teams>(block, filler, ring_of_team(block.call, filler, stages, ring));
    }
};

#endif
