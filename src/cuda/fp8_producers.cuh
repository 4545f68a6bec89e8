/* The producer warpgroup of the fp8 GEMMs (fp8.cuh): who fills the ring, and who quantises the intermediate. */
#ifndef MOE4_CUDA_FP8_PRODUCERS_CUH
#define MOE4_CUDA_FP8_PRODUCERS_CUH

#include "cuda/fp8_intermediate.cuh"
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
    int left = call.n_steps * CUDA_STEP_BYTES;
    for (; left >= W::tile_bytes; left -= W::tile_bytes, at.advance()) {
        const uint32_t full = ring.full + at.stage * 8, to = ring.stages + at.stage * STAGE_BYTES + W::weights;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        barrier_arrive_expect(full, G * W::tile_bytes);
        bulk_copy(to, first, W::tile_bytes, full);
        bulk_copy(to + W::tile_bytes, second, W::tile_bytes, full);
        first += W::tile_bytes, second += W::tile_bytes;
    }
    if (left == 0) return;
    const uint32_t full = ring.full + at.stage * 8, to = ring.stages + at.stage * STAGE_BYTES + W::weights;
    const int repeated = left % BLOCK_BYTES_W;
    barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
    barrier_arrive_expect(full, G * (left + repeated));
    bulk_copy(to, first, left, full);
    bulk_copy(to + W::tile_bytes, second, left, full);
    if (repeated) {
        bulk_copy(to + left, first + left - repeated, repeated, full);
        bulk_copy(to + W::tile_bytes + left, second + left - repeated, repeated, full);
    }
    at.advance();
}

/* Its rows. */
template <kind k, class W>
static __device__ __forceinline__ void fill_x(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                              const token_tile &tokens)
{
    const uint8_t *x = call.x.codes + (int64_t)tokens.first_row * FP8_BLOCK;
    const int64_t block_bytes = call.x.rows * FP8_BLOCK;
    const uint32_t bytes = tokens.n_rows * FP8_BLOCK;
    for (int left = block_count(call); left > 0; left -= W::stage_blocks, at.advance()) {
        const uint32_t full = ring.full + at.stage * 8, to = ring.stages + at.stage * STAGE_BYTES;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        barrier_arrive_expect(full, min(left, (int)W::stage_blocks) * bytes);
#pragma unroll
        for (int b = 0; b < W::stage_blocks; b++, x += block_bytes)
            if (b < left) bulk_copy(to + b * W::x_bytes, x, bytes, full);
    }
}

/* Their scales, by two warps. */
template <kind k, class W>
static __device__ __forceinline__ void fill_scales(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                                   const token_tile &tokens)
{
    const int thread = threadIdx.x % ROLE_THREADS;
    const float *scales = call.x.scales + tokens.first_row + thread;
    for (int left = block_count(call); left > 0; left -= W::stage_blocks, at.advance()) {
        const uint32_t to = ring.stages + at.stage * STAGE_BYTES + W::scales + thread * 4;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
#pragma unroll
        for (int b = 0; b < W::stage_blocks; b++) {
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
    claimer claims(which == WEIGHTS ? call.claims : nullptr);
    while (!items.is_over()) {
        const gemm_item item = next;
        items.advance(ring);
        next = items.load(call); /* long before it is wanted */
        for (int pass = 0; pass < n_passes && has_pass<n_passes>(call, item, pass); pass++) {
            const int first_tile = (item.group * n_passes + pass) * G;
            if (item.tokens.n_rows <= NARROW)
                fill_pass<k, which, width<NARROW>>(call, ring, at, item.tokens, first_tile);
            else
                fill_pass<k, which, width<FP8_MAX_ROWS>>(call, ring, at, item.tokens, first_tile);
        }
        if (which == WEIGHTS) claims.publish(ring);
    }
}

/* ---- Quantisers -------------------------------------------------------------------------------------------------- */

template <int n_passes> static __device__ __forceinline__ void quantise(const fp8_call &call, const gemm_ring &ring)
{
    uint32_t parity = 0;
    for (item_list<n_passes> items(call); !items.is_over(); items.advance(ring), parity ^= 1) {
        const gemm_item item = items.load(call);
        barrier_wait(ring.v_full, parity);
        quantise_group(call.v, call.columns, ring.v, item.tokens, item.group);
        barrier_arrive(ring.v_empty);
    }
}

} // namespace fp8

#endif
