/* MXFP8 activations (base/mxfp8.h has the rules).  The GEMMs see what the codes are worth, as bf16. */
#include <algorithm>

#include "base/checked.h"
#include "cuda/launch.cuh"
#include "cuda/quantize.cuh"

namespace
{

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
            v.pairs[i] = bf16_pair_of(load_float(call.x, call.dtype, at + 2 * i),
                                      load_float(call.x, call.dtype, at + 2 * i + 1));
    }
    if (!call.weights) return v;
    const float weight = call.weights[row];
    for (uint32_t &pair : v.pairs)
        pair = bf16_pair_of(bf16_float((uint16_t)pair) * weight, __uint_as_float(pair & 0xFFFF0000u) * weight);
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
    const values v = worth_of_codes(q);
    *(uint4 *)out = {v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]};
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
