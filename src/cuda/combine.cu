/* moe4_combine: the weighted sum over a token's routed rows, in the arithmetic of rows.cu, from rows that lie as the
 * caller has them. */
#include "cuda/launch.cuh"

namespace
{

/* scale * sum + addend of one element.  A row that does not exist makes NaN. */
__device__ float combine_element(const deferred_call &call, int64_t t, int64_t column)
{
    float sum = 0.0f;
    for (int32_t a = 0; a < call.top_k; a++) {
        const int64_t slot = t * call.top_k + a, row = call.row_map[slot];
        if (row == -1) continue;
        if (row < 0 || row >= call.n_rows) {
            if (column == 0) report_fault(call.faults, FAULT_ROW_MAP, t, (int32_t)row);
            sum = __builtin_nanf("");
        } else {
            sum = fmaf(call.weights[slot], bf16_float(call.z[row * call.columns + column]), sum);
        }
    }
    if (call.scale != 1.0f) sum *= call.scale;
    if (call.addend) sum += load_float(call.addend, call.addend_dtype, t * call.ld_addend + column);
    return sum;
}

__global__ void combine_kernel(const __grid_constant__ deferred_call call)
{
    begin_kernel();
    const int64_t t = blockIdx.x;
    if (t == 0 && threadIdx.x == 0) check_token_count(call.T, call.faults);
    if (t >= token_count_of(call.T)) return;
    for (int64_t column = threadIdx.x; column < call.columns; column += blockDim.x)
        store_output(call.y, call.dtype, call.write, t * call.ldy + column, combine_element(call, t, column));
}

} // namespace

int combine_deferred_rows(const deferred_call *call, cuda_stream stream)
{
    return launch(combine_kernel, call, call->T.n_tokens, 256, 0, stream);
}
