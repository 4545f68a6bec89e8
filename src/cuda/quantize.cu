/* MXFP8 activations (base/mxfp8.h has the rules): a warp a block of 32, a lane an element.  The GEMMs then see what the
 * codes are worth, as bf16. */
#include "base/dims.h"
#include "cuda/e4m3.cuh"
#include "cuda/launch.cuh"

namespace
{

constexpr uint8_t NAN_SCALE = 0xFF;

__device__ uint32_t scale_of(float amax)
{
    uint32_t bits = __float_as_uint(amax * (1.0f / 448.0f)), exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    if (exponent == 0) return mantissa > 0x400000u;
    exponent += mantissa != 0;
    return exponent > 0xFE ? 0xFE : exponent;
}

__device__ float inverse_of(uint32_t scale)
{
    if (scale == 0) return 0.0f;
    return __uint_as_float(scale == 0xFE ? 0x00400000u : (254u - scale) << 23);
}

__device__ float e8m0_value(uint32_t scale)
{
    if (scale == NAN_SCALE) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(scale ? scale << 23 : 1u << 22);
}

struct element {
    uint32_t code, scale;
};

/* The lane's element of a block of bf16.  A block with a NaN or an infinity gets scale NaN and codes 0. */
__device__ element quantize(uint16_t x)
{
    uint32_t amax = __reduce_max_sync(~0u, x & 0x7FFFu);
    if (amax >= 0x7F80u) return {0, NAN_SCALE};
    uint32_t scale = scale_of(bf16_float((uint16_t)amax));
    return {e4m3_code(bf16_float(x) * inverse_of(scale)), scale};
}

__device__ uint16_t worth(const element &e)
{
    return bf16_bits(e4m3_value(e.code) * e8m0_value(e.scale));
}

__device__ element load_element(const quantize_call &call, int64_t row, int64_t k)
{
    if (call.dtype == MOE4_DTYPE_F8_E4M3) {
        uint32_t code = ((const uint8_t *)call.x)[row * call.ldx + k];
        return {code, call.x_scale[row * call.ldx_scale + k / BLOCK_SIZE]};
    }
    uint16_t x = bf16_bits(load_float(call.x, call.dtype, row * call.ldx + k));
    if (call.weights) x = bf16_bits(bf16_float(x) * call.weights[row]);
    return quantize(x);
}

__global__ void quantize_kernel(const __grid_constant__ quantize_call call)
{
    begin_kernel();
    const int64_t n_rows = call.n_rows ? *call.n_rows : token_count_of(call.T);
    for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const int64_t seen = call.row_output ? call.row_output[row] : row;
        for (int64_t k = threadIdx.x; k < call.columns; k += blockDim.x) {
            element e = load_element(call, row, k);
            call.out[row * call.columns + k] = worth(e);
            if (call.codes) call.codes[seen * call.columns + k] = (uint8_t)e.code;
            if (call.scales && k % BLOCK_SIZE == 0)
                call.scales[seen * (call.columns / BLOCK_SIZE) + k / BLOCK_SIZE] = (uint8_t)e.scale;
        }
    }
}

} // namespace

int quantize_rows(const quantize_call *call, cuda_stream stream)
{
    return launch(quantize_kernel, call, 4096, 256, 0, stream);
}
