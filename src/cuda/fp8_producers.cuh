/* The producer warpgroup of the fp8 GEMMs (fp8.cuh): who fills the ring, and who quantises the intermediate. */
#ifndef MOE4_CUDA_FP8_PRODUCERS_CUH
#define MOE4_CUDA_FP8_PRODUCERS_CUH

#include "cuda/fp8_quantize.cuh"
#include "cuda/fp8_ring.cuh"

namespace fp8
{

/* ---- Producers --------------------------------------------------------------------------------------------------- */

/* Each role is one thread, or two warps, with a loop of its own: one warp for all of them takes longer to start a
 * stage's copies than the tensor cores to multiply it. */

static __device__ __forceinline__ const uint8_t *weight_tile(const fp8_call &call, int l, int tile)
{
    tile = tile < call.n_tiles ? tile : call.n_tiles - 1; /* a warpgroup without a tile repeats the last, unseen */
    return call.weights + ((int64_t)l * call.n_tiles + tile) * call.n_steps * CUDA_STEP_BYTES;
}

/* The weights of a pass.  Where K ends with half a block the last step comes twice: rows are padded with zeros, so any
 * weights will do there. */
template <kind k, class W>
static __device__ __forceinline__ void fill_weights(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                                    const uint8_t *first, const uint8_t *second)
{
    static_assert(G == 2, "a tile each");
    constexpr int tile_bytes = W::blocks * BLOCK_BYTES_W;
    for (int left = call.n_steps * CUDA_STEP_BYTES; left > 0; left -= tile_bytes, at.advance()) {
        const uint32_t full = ring.full + at.stage * 8, to = ring.stages + at.stage * STAGE_BYTES + W::layout::weights;
        const int bytes = min(left, tile_bytes), repeated = bytes % BLOCK_BYTES_W;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        barrier_arrive_expect(full, G * (bytes + repeated));
        bulk_copy(to, first, bytes, full);
        bulk_copy(to + tile_bytes, second, bytes, full);
        first += tile_bytes, second += tile_bytes;
        if (repeated == 0) continue;
        bulk_copy(to + bytes, first + (bytes - repeated - tile_bytes), CUDA_STEP_BYTES, full);
        bulk_copy(to + tile_bytes + bytes, second + (bytes - repeated - tile_bytes), CUDA_STEP_BYTES, full);
    }
}

/* Its rows. */
template <kind k, class W>
static __device__ __forceinline__ void fill_x(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                              const token_tile &tokens)
{
    const uint8_t *x = call.x.codes + (int64_t)tokens.first_row * FP8_BLOCK;
    const int64_t block_bytes = call.x.rows * FP8_BLOCK;
    const uint32_t bytes = tokens.n_rows * FP8_BLOCK;
    for (int left = block_count(call); left > 0; left -= W::blocks, at.advance()) {
        const uint32_t full = ring.full + at.stage * 8, to = ring.stages + at.stage * STAGE_BYTES;
        const bool is_whole = left >= W::blocks;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        barrier_arrive_expect(full, is_whole ? W::blocks * bytes : bytes);
        bulk_copy(to, x, bytes, full);
        x += block_bytes;
        if (W::blocks == 1 || !is_whole) continue;
        bulk_copy(to + W::x_bytes, x, bytes, full);
        x += block_bytes;
    }
}

/* Their scales, by two warps. */
template <kind k, class W>
static __device__ __forceinline__ void fill_scales(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                                   const token_tile &tokens)
{
    const int thread = threadIdx.x % ROLE_THREADS;
    const float *scales = call.x.scales + tokens.first_row + thread;
    for (int left = block_count(call); left > 0; left -= W::blocks, at.advance()) {
        const uint32_t to = ring.stages + at.stage * STAGE_BYTES + W::layout::scales + thread * 4;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
#pragma unroll
        for (int b = 0; b < W::blocks; b++) {
            if (b > 0 && b >= left) break;
            for (int row = thread; row < tokens.n_rows; row += ROLE_THREADS)
                copy4(to + (b * W::rows + row - thread) * 4, scales + row - thread);
            scales += call.x.rows;
        }
        copies_arrive(ring.full + at.stage * 8);
    }
}

enum role { WEIGHTS, ROWS, SCALES };

template <kind k, role which, class W>
static __device__ __forceinline__ void fill_pass(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                                 const token_tile &tokens, int first_tile)
{
    if (which == WEIGHTS)
        fill_weights<k, W>(call, ring, at, weight_tile(call, tokens.l, first_tile),
                           weight_tile(call, tokens.l, first_tile + 1));
    if (which == ROWS) fill_x<k, W>(call, ring, at, tokens);
    if (which == SCALES) fill_scales<k, W>(call, ring, at, tokens);
}

template <kind k, role which, int n_passes>
static __device__ __forceinline__ void produce(const fp8_call &call, const gemm_ring &ring)
{
    ring_position<k> at;
    item_list<n_passes> items(call);
    gemm_item next = items.load(call);
    while (!items.is_over()) {
        const gemm_item item = next;
        items.advance();
        next = items.load(call); /* long before it is wanted */
        for (int pass = 0; pass < n_passes && has_pass<n_passes>(call, item, pass); pass++) {
            const int first_tile = (item.group * n_passes + pass) * G;
            if (item.tokens.n_rows <= NARROW)
                fill_pass<k, which, width<NARROW>>(call, ring, at, item.tokens, first_tile);
            else
                fill_pass<k, which, width<MAX_TOKENS>>(call, ring, at, item.tokens, first_tile);
        }
    }
}

/* ---- Quantisers -------------------------------------------------------------------------------------------------- */

/* Eight threads a row, sixteen columns each; their maxima meet in shared memory (a shuffle anywhere in the kernel makes
 * the compiler give up uniform registers in the consumers' loops). */
static __device__ __forceinline__ void quantise_item(const fp8_call &call, const gemm_ring &ring, const gemm_item &item,
                                                     uint32_t &maxima)
{
    const int thread = threadIdx.x % ROLE_THREADS, chunk = thread % 8, first_column = item.group * FP8_BLOCK + chunk * 16;
    const int64_t first_row = item.group * call.v.rows + item.tokens.first_row;
    for (int round = 0; round < item.tokens.n_rows; round += ROLE_THREADS / 8, maxima ^= MAXIMA_BYTES) {
        const int row = round + thread / 8;
        const bool is_there = row < item.tokens.n_rows && first_column < call.columns;
        const uint32_t from = ring.v + (is_there ? row : 0) * V_PITCH + chunk * 32, own = maxima + thread / 8 * 32;
        uint4 first = load_shared_16(from), second = load_shared_16(from + 16);
        if (!is_there) first = second = make_uint4(0, 0, 0, 0);
        store_shared_4(own + chunk * 4, max(fp8_largest(first), fp8_largest(second)));
        barrier_sync<ROLE_THREADS>(1);
        if (row >= item.tokens.n_rows) continue;
        const fp8_divisor by = fp8_divisor_of(max(fp8_largest_of(load_shared_16(own)), fp8_largest_of(load_shared_16(own + 16))) >> 16);
        *(uint4 *)(call.v.codes + (first_row + row) * FP8_BLOCK + fp8_chunk_offset(row, chunk)) =
            fp8_chunk(first, second, by);
        if (chunk == 0) call.v.scales[first_row + row] = by.scale;
    }
}

template <int n_passes>
static __device__ __forceinline__ void quantise(const fp8_call &call, const gemm_ring &ring)
{
    uint32_t parity = 0, maxima = ring.maxima;
    for (item_list<n_passes> items(call); !items.is_over(); items.advance(), parity ^= 1) {
        const gemm_item item = items.load(call);
        barrier_wait(ring.v_full, parity);
        quantise_item(call, ring, item, maxima);
        barrier_arrive(ring.v_empty);
    }
}

} // namespace fp8

#endif
