/* The other half of gate/up's epilogue in fp8_stream.cuh: v' of 128 columns has one scale for each row.  Teams leave
 * their tiles' columns as bf16, and the warps that bring in the rows of x quantise them, all four together, since teams
 * are no faster than the slowest of their warps.  Where another block has tiles of the 128 columns, too, whichever is
 * done last does it. */
#ifndef MOE4_CUDA_FP8_STREAM_PIECES_CUH
#define MOE4_CUDA_FP8_STREAM_PIECES_CUH

#include "cuda/fp8_stream_rows.cuh"

namespace fp8_stream
{

enum : int { PIECES = 4 /* that may be under way */ };

/* Tiles whose columns of v' have one scale a row: their group. */
template <moe4_activation activation>
constexpr int tiles_of_group = FP8_BLOCK / CUDA_GATED_COLUMNS / columns_of_lane(activation);

/* The tiles of a block's run that belong to one group. */
struct group_piece {
    int index, token_tile, group;
    int n_tiles, n_all; /* here, and of the group */
};

template <int tiles>
static __device__ __forceinline__ group_piece piece_at(int index, const tile_place &at, int left, int n_tiles)
{
    const int first = at.tile / tiles * tiles, end = min(first + tiles, n_tiles);
    return {index, at.token_tile, at.tile / tiles, min(end - at.tile, left), end - first};
}

/* How pieces go from teams to loaders: two barriers for each that is under way. */
struct piece_line {
    uint32_t stored, taken;

    /* `tiles`: of a whole group. */
    __device__ __forceinline__ void init(int i, int tiles) const
    {
        barrier_init(stored + i * 8, tiles * TEAM);
        barrier_init(taken + i * 8, LOADERS);
    }
    /* By a team that has stored a tile's v'. */
    __device__ __forceinline__ void leave(int index) const
    {
        if (index >= PIECES) barrier_wait(taken + index % PIECES * 8, index / PIECES - 1 & 1);
        barrier_arrive(stored + index % PIECES * 8);
    }
    /* By the loaders, as is what follows; the first stands in for the tiles that are not there. */
    __device__ __forceinline__ void await(const group_piece &piece, int tiles) const
    {
        const uint32_t barrier = stored + piece.index % PIECES * 8;
        if (threadIdx.x % LOADERS == 0 && piece.n_tiles < tiles)
            barrier_arrive(barrier, (tiles - piece.n_tiles) * TEAM);
        barrier_await(barrier, piece.index / PIECES & 1);
    }
    __device__ __forceinline__ void take(int index) const
    {
        barrier_arrive(taken + index % PIECES * 8);
    }
};

/* Adds the piece's tiles to those of its group that are there; whether it is all of them now.  `answer`: a word of
 * shared memory. */
static __device__ __forceinline__ bool completes_group(int32_t *count, const group_piece &piece, uint32_t answer)
{
    if (threadIdx.x % LOADERS == 0) {
        __threadfence();
        store_shared_4(answer, atomicAdd(count, piece.n_tiles) == piece.n_all - piece.n_tiles);
        __threadfence();
    }
    barrier_sync<LOADERS>(1);
    const bool is_last = load_shared_4(answer);
    barrier_sync<LOADERS>(1);
    return is_last;
}

/* 128 columns of the token tile's rows, eight lanes a row. */
static __device__ __forceinline__ void quantise_columns(const fp8_stream_call &call, const token_tile &tokens,
                                                        int group)
{
    constexpr int chunks = FP8_BLOCK / 16;
    const gemm_call &gemm = call.stream.gemm;
    const int chunk = threadIdx.x % chunks, column = group * FP8_BLOCK + chunk * 16;
    const int64_t first_row = group * call.v.rows + tokens.first_row;
    for (int first = threadIdx.x % LOADERS / 32 * 4; first < tokens.n_rows; first += LOADERS / chunks) {
        const int row = first + threadIdx.x % 32 / chunks;
        const bool is_there = row < tokens.n_rows;
        chunk16 v = {};
        if (is_there && column < gemm.columns) {
            const uint4 *from = (const uint4 *)(gemm.out + (tokens.first_row + row) * gemm.ldout + column);
            v = {__ldcg(from), __ldcg(from + 1)};
        }
        const fp8_divisor by = fp8_divisor_of_eight(v);
        if (!is_there) continue;
        if (chunk == 0) call.v.scales[first_row + row] = by.scale;
        *(uint4 *)(call.v.codes + (first_row + row) * FP8_BLOCK + fp8_chunk_offset(row, chunk)) =
            fp8_chunk(v.first, v.second, by);
    }
}

/* Tiles are counted where the group's first scale will be, which is 0 before. */
static __device__ __forceinline__ void finish_piece(const fp8_stream_call &call, const piece_line &line,
                                                    const group_piece &piece, int tiles, uint32_t answer)
{
    const token_tile tokens = call.stream.gemm.token_tiles[piece.token_tile];
    int32_t *count = (int32_t *)(call.v.scales + piece.group * call.v.rows + tokens.first_row);
    line.await(piece, tiles);
    if (piece.n_tiles == piece.n_all || completes_group(count, piece, answer))
        quantise_columns(call, tokens, piece.group);
    line.take(piece.index);
}

/* Brings the block's segments in and finishes its pieces.  When a segment's last piece is due, the rows that take its
 * room go first. */
template <moe4_activation activation>
static __device__ __forceinline__ void load_and_finish(const fp8_stream_call &call, const row_store &store,
                                                       const piece_line &line, const stream_share &share, bool is_dry)
{
    constexpr int tiles = tiles_of_group<activation>;
    const stream_call &stream = call.stream;
    tile_place at = share.first;
    int n_loaded = 0, index = 0;
    for (int left = share.n_tiles; left > 0; index++) {
        const group_piece piece = piece_at<tiles>(index, at, left, stream.gemm.n_tiles);
        ::advance(at, piece.n_tiles, stream.gemm.n_tiles);
        left -= piece.n_tiles;
        const int wanted = min(at.token_tile - share.first.token_tile + stream.n_buffers, share.n_segments);
        for (; n_loaded < wanted; n_loaded++) {
            const token_tile tokens =
                is_dry ? token_tile{0, 0, 1} : stream.gemm.token_tiles[share.first.token_tile + n_loaded];
            load_segment<false>(call, store, n_loaded, tokens, is_dry);
        }
        if (is_dry) return;
        if (!call.is_bf16) finish_piece(call, line, piece, tiles, store.maxima);
    }
}

/* What the warps that load do in gate/up.  While routing runs they go through it without any rows, so that the code is
 * in the caches when there are some: from DRAM it takes 3 us. */
template <moe4_activation activation>
static __device__ __forceinline__ void serve_gate_up(const fp8_stream_call &call, const row_store &store,
                                                     const piece_line &line)
{
    const stream_call &stream = call.stream;
    for (int pass = 0; pass < 2; pass++) {
        const bool is_dry = pass == 0;
        if (!is_dry) {
            wait_for_predecessors();
            launch_dependents();
            __syncthreads();
        }
        const int n_token_tiles = is_dry ? (int)gridDim.x : *stream.gemm.n_token_tiles;
        load_and_finish<activation>(call, store, line, share_of(stream, n_token_tiles, stream.gemm.n_tiles), is_dry);
    }
}

} // namespace fp8_stream

#endif
