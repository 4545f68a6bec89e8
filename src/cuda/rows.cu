/* What moves rows: conversion of x, copies of what the caller wants to see, and the weighted sum over slots. */
#include "cuda/launch.cuh"

namespace
{

__global__ void convert_kernel(const __grid_constant__ convert_call call)
{
    begin_kernel();
    const int64_t t = blockIdx.x;
    if (t >= token_count_of(call.T)) return;
    for (int64_t k = threadIdx.x; k < call.columns; k += blockDim.x) {
        uint16_t value = bf16_bits(load_float(call.x, call.dtype, t * call.ldx + k));
        if (call.weights) value = bf16_bits(bf16_float(value) * call.weights[t]);
        call.out[t * call.columns + k] = value;
    }
}

__global__ void copy_kernel(const __grid_constant__ copy_call call)
{
    begin_kernel();
    const int64_t n_rows = *call.n_rows;
    for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        uint16_t *to = call.to + (call.row_output ? call.row_output[row] : row) * call.columns;
        for (int64_t k = threadIdx.x; k < call.columns; k += blockDim.x) to[k] = call.from[row * call.ld + k];
    }
}

constexpr int RUN = 8; /* columns of a thread */

/* A slot of a token id that no table holds (route.cu): -1 with a NaN weight. */
__device__ bool is_nowhere(const combine_call &call, int64_t slot)
{
    return call.ids && call.ids[slot] == -1 && call.weights[slot] != call.weights[slot];
}

/* sum += weight * z of one slot, for this thread's columns. */
__device__ void add_slot(float (&sum)[RUN], float weight, const uint4 &z)
{
    const uint32_t words[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
    }
}

constexpr int AT_ONCE = 4; /* slots whose rows are under way together */

/* The map and the weights are older than the kernel before this one, so they need not wait for it. */
__global__ void combine_kernel(const __grid_constant__ combine_call call)
{
    launch_dependents();
    const int64_t t = blockIdx.x, column = (blockIdx.y * (int64_t)blockDim.x + threadIdx.x) * RUN;
    const bool is_inside = t < token_count_of(call.T) && column < call.columns;
    float sum[RUN] = {};
    for (int32_t first = 0; first < call.top_k; first += AT_ONCE) {
        int32_t row[AT_ONCE];
        float weight[AT_ONCE];
        uint4 z[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const bool is_slot = is_inside && first + i < call.top_k;
            row[i] = is_slot ? __ldcg(&call.row_map[t * call.top_k + first + i]) : -1;
            weight[i] = is_slot && call.weights ? __ldcg(&call.weights[t * call.top_k + first + i]) : 1.0f;
        }
        if (first == 0) wait_for_predecessors();
        if (!is_inside) return;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (row[i] >= 0) z[i] = __ldcs((const uint4 *)(call.z + row[i] * call.ldz + column));
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (row[i] >= 0)
                add_slot(sum, weight[i], z[i]);
            else if (first + i < call.top_k && is_nowhere(call, t * call.top_k + first + i))
                for (int c = 0; c < RUN; c++) sum[c] = weight[i];
        }
    }
    if (call.dtype == MOE4_DTYPE_BF16 && call.write == MOE4_WRITE_OVERWRITE && call.ldy % RUN == 0 &&
        column + RUN <= call.columns && (uintptr_t)call.y % 16 == 0) {
        uint32_t pairs[RUN / 2];
        for (int i = 0; i < RUN / 2; i++) pairs[i] = bf16_bits(sum[2 * i]) | (uint32_t)bf16_bits(sum[2 * i + 1]) << 16;
        __stcs((uint4 *)((uint16_t *)call.y + t * call.ldy + column), {pairs[0], pairs[1], pairs[2], pairs[3]});
        return;
    }
    for (int i = 0; i < RUN && column + i < call.columns; i++)
        store_output(call.y, call.dtype, call.write, t * call.ldy + column + i, sum[i]);
}

} // namespace

int convert_rows(const convert_call *call, cuda_stream stream)
{
    return launch(convert_kernel, call, call->T.n_tokens, 256, 0, stream);
}

int copy_rows(const copy_call *call, cuda_stream stream)
{
    return launch(copy_kernel, call, 1024, 256, 0, stream);
}

int combine_rows(const combine_call *call, cuda_stream stream)
{
    const int threads = 128;
    const unsigned runs = (unsigned)((call->columns + threads * RUN - 1) / (threads * RUN));
    return launch(combine_kernel, call, dim3(call->T.n_tokens, runs), threads, 0, stream);
}
