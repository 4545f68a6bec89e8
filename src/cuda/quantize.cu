/* MXFP8 activations (base/mxfp8.h has the rules).  The GEMMs see what the codes are worth, as bf16. */
#include <algorithm>

#include "base/dims.h"
#include "base/checked.h"
#include "cuda/launch.cuh"
#include "cuda/mxfp8.cuh"

namespace
{

/* A lane's part of a block: eight elements as pairs of bf16, lower k first; the block's other lanes are its neighbours.
 */
enum { LANE_ELEMENTS = 8, LANES = BLOCK_SIZE / LANE_ELEMENTS };

struct values {
    uint32_t pairs[4];
};

struct codes {
    uint32_t pairs[4], scale; /* two codes each */
};

__device__ uint32_t bf16_pair(float low, float high)
{
    return bf16_bits(low) | (uint32_t)bf16_bits(high) << 16;
}

/* Nearest codes of a pair of finite values. */
__device__ uint32_t code_pair(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return e4m3_code(low) | e4m3_code(high) << 8;
#endif
}

__device__ float2 value_pair(uint32_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    float2 value;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(value.x), "=f"(value.y)
        : "r"(halves));
    return value;
#else
    return {e4m3_value(pair & 0xFF), e4m3_value(pair >> 8)};
#endif
}

/* Of a block of bf16; all its lanes take part.  One with a NaN or an infinity gets scale NaN and codes 0. */
__device__ codes quantize(const values &x)
{
    uint32_t most = 0;
    for (int i = 0; i < 4; i++) most = __vmaxu2(most, x.pairs[i] & 0x7FFF7FFFu);
    const uint32_t peers = ((1u << LANES) - 1) << threadIdx.x % 32 / LANES * LANES;
    for (int lane = 1; lane < LANES; lane *= 2) most = __vmaxu2(most, __shfl_xor_sync(peers, most, lane));
    const uint32_t amax = max(most & 0xFFFFu, most >> 16);
    if (amax >= 0x7F80u) return {{0, 0, 0, 0}, NAN_SCALE};
    codes q = {{}, scale_of(bf16_float((uint16_t)amax))};
    const float inverse = inverse_of(q.scale);
    for (int i = 0; i < 4; i++)
        q.pairs[i] =
            code_pair(bf16_float((uint16_t)x.pairs[i]) * inverse, __uint_as_float(x.pairs[i] & 0xFFFF0000u) * inverse);
    return q;
}

__device__ values load_values(const quantize_call &call, int64_t row, int64_t k)
{
    const int64_t at = row * call.ldx + k;
    const uint16_t *x = (const uint16_t *)call.x + at;
    values v;
    if (call.dtype == MOE4_DTYPE_BF16 && (uintptr_t)x % 16 == 0) {
        const uint4 words = *(const uint4 *)x;
        v = {{words.x, words.y, words.z, words.w}};
    } else {
        for (int i = 0; i < 4; i++)
            v.pairs[i] =
                bf16_pair(load_float(call.x, call.dtype, at + 2 * i), load_float(call.x, call.dtype, at + 2 * i + 1));
    }
    if (!call.weights) return v;
    const float weight = call.weights[row];
    for (uint32_t &pair : v.pairs)
        pair = bf16_pair(bf16_float((uint16_t)pair) * weight, __uint_as_float(pair & 0xFFFF0000u) * weight);
    return v;
}

/* The caller's codes. */
__device__ codes load_codes(const quantize_call &call, int64_t row, int64_t k)
{
    const uint8_t *x = (const uint8_t *)call.x + row * call.ldx + k;
    codes q;
    for (int i = 0; i < 4; i++) q.pairs[i] = x[2 * i] | x[2 * i + 1] << 8;
    q.scale = call.x_scale[row * call.ldx_scale + k / BLOCK_SIZE];
    return q;
}

__device__ void store_worth(uint16_t *out, const codes &q)
{
    const float scale = e8m0_value(q.scale);
    uint32_t pairs[4];
    for (int i = 0; i < 4; i++) {
        const float2 value = value_pair(q.pairs[i]);
        pairs[i] = bf16_pair(value.x * scale, value.y * scale);
    }
    *(uint4 *)out = {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ void store_codes(const quantize_call &call, int64_t row, int64_t k, const codes &q)
{
    const int64_t seen = call.row_output ? call.row_output[row] : row;
    if (call.scales && k % BLOCK_SIZE == 0) call.scales[(seen * call.columns + k) / BLOCK_SIZE] = (uint8_t)q.scale;
    if (!call.codes) return;
    uint8_t *to = call.codes + seen * call.columns + k;
    for (int i = 0; i < 4; i++) to[2 * i] = (uint8_t)q.pairs[i], to[2 * i + 1] = (uint8_t)(q.pairs[i] >> 8);
}

/* A block of threads a row at a time. */
__global__ void quantize_kernel(const __grid_constant__ quantize_call call)
{
    begin_kernel();
    const int64_t n_rows = call.n_rows ? *call.n_rows : token_count_of(call.T);
    for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        for (int64_t k = threadIdx.x * LANE_ELEMENTS; k < call.columns; k += blockDim.x * LANE_ELEMENTS) {
            const codes q =
                call.dtype == MOE4_DTYPE_F8_E4M3 ? load_codes(call, row, k) : quantize(load_values(call, row, k));
            store_worth(call.out + row * call.columns + k, q);
            if (call.codes || call.scales) store_codes(call, row, k, q);
        }
    }
}

} // namespace

/* As few threads as take a row in the same number of rounds. */
int quantize_rows(const quantize_call *call, cuda_stream stream)
{
    const int64_t lanes = call->columns / LANE_ELEMENTS, rounds = ceil_div(lanes, 512);
    const int threads = (int)(ceil_div(ceil_div(lanes, rounds), 32) * 32);
    return launch(quantize_kernel, call, (unsigned)std::min<int64_t>(call->max_rows, 4096), threads, 0, stream);
}
