/* Products of the fp8 GEMMs for one token and for few: packed weights by rows of codes that lie in shared memory, a
 * chunk of 16 codes of all rows after another, behind them scales.  `rows`: how many there is room for, 1 or 8. */
#ifndef MOE4_CUDA_FP8_ROW_PRODUCTS_CUH
#define MOE4_CUDA_FP8_ROW_PRODUCTS_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_quantize.cuh"
#include "cuda/stream.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8_row_products
{

constexpr int CHUNKS = FP8_BLOCK / 16; /* of a block */

static __host__ __device__ __forceinline__ int32_t n_blocks_of(const gemm_call &call)
{
    return (call.n_steps + 1) / 2;
}

/* From the first chunk to the scales. */
template <int rows> static __device__ __forceinline__ int32_t scales_at(const gemm_call &call)
{
    return n_blocks_of(call) * FP8_BLOCK * rows;
}

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

/* ---- A team's tile ----------------------------------------------------------------------------------------------- */

/* A lane's sums of rows g and g+8, those of the block of 128 k under way, and its weights of two steps: one is
 * multiplied while the other is decoded. */
template <int rows> struct sums {
    float total[rows == 1 ? 2 : 4], d[4];
    uint32_t a[2][8];
};

template <bool is_first, int rows>
static __device__ __forceinline__ void multiply_step(sums<rows> &of, uint32_t (&a)[8], uint32_t b)
{
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    wgmma_fence();
    wgmma_fp8_row<!is_first>(of.d, a, b);
    wgmma_fp8_row<true>(of.d, a + 4, b + 2 * rows);
    wgmma_commit();
}

/* One row has its sums in every other of the products' columns. */
template <bool is_down, int rows> static __device__ __forceinline__ void promote(sums<rows> &of, uint32_t scale)
{
    uint2 by = {};
    if (is_down) by = rows == 1 ? make_uint2(load_shared_4(scale), 0) : load_shared_8(scale);
#pragma unroll
    for (int i = 0; i < (rows == 1 ? 2 : 4); i++) {
        const float d = of.d[rows == 1 ? 2 * i : i];
        const uint32_t own = rows > 1 && i % 2 ? by.y : by.x;
        of.total[i] = is_down ? fmaf(d, __uint_as_float(own), of.total[i]) : of.total[i] + d;
    }
}

/* A stage's products, `left` steps being left, or a tile's last ones.  A block of one step is multiplied twice, since x
 * is zero in the second.  `packed` is a step ahead of what is decoded. */
template <bool is_last, bool is_down, int rows>
static __device__ __forceinline__ void multiply_next(const stream_call &call, const fp8_magnitudes &magnitudes,
                                                     sums<rows> &of, packed_step &packed, uint32_t b, uint32_t scales,
                                                     ring_place &at, int left)
{
#pragma unroll
    for (int i = 0; i < STREAM_STEPS; i++) {
        const bool is_end = is_last && (i + 1 == STREAM_STEPS || (i == 1 && left <= 2));
        if (i % 2)
            multiply_step<false>(of, of.a[1], b + i * 4 * rows);
        else
            multiply_step<true>(of, of.a[0], b + i * 4 * rows);
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
        if (i % 2) promote<is_down>(of, scales + i / 2 * 4 * rows);
        if (is_end) break;
    }
    if (!is_last) return;
    barrier_arrive(at.empty);
    advance(call, at);
}

/* All of K, by rows at this address. */
template <bool is_down, int rows>
static __device__ __forceinline__ void multiply_rows(const stream_call &call, sums<rows> &of, int base, uint32_t first,
                                                     ring_place &at)
{
    const fp8_magnitudes magnitudes = fp8_magnitudes_of(base);
    int left = call.gemm.n_steps;
    uint32_t b = first >> 4 | rows << 16, scales = first + scales_at<rows>(call.gemm);
    if (rows > 1) scales += threadIdx.x % 4 * 8;
    barrier_wait(at.full, at.parity);
    packed_step packed = load_step(at.stage);
    fp8_decode_step(packed.codes, packed.scales, magnitudes, of.a[0]);
    packed = load_step(at.stage + (left > 1 ? CUDA_STEP_BYTES : 0));
    for (; left > STREAM_STEPS; left -= STREAM_STEPS) {
        multiply_next<false, is_down>(call, magnitudes, of, packed, b, scales, at, left);
        b += STREAM_STEPS * 4 * rows, scales += STREAM_STEPS / 2 * 4 * rows;
    }
    multiply_next<true, is_down>(call, magnitudes, of, packed, b, scales, at, left);
}

} // namespace fp8_row_products

#endif
