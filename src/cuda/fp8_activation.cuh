/* SwiGLU as the fp8 GEMMs compute it: a sigmoid of five instructions for activate's fourteen, which keep what fp8 does
 * not hold. */
#ifndef MOE4_CUDA_FP8_ACTIVATION_CUH
#define MOE4_CUDA_FP8_ACTIVATION_CUH

#include "cuda/activation.cuh"

/* Stands for MOE4_ACTIVATION_SWIGLU_OAI in all fp8 kernels, so that their bits are equal. */
constexpr moe4_activation FP8_SWIGLU = (moe4_activation)N_ACTIVATIONS;

template <moe4_activation activation>
constexpr moe4_activation fp8_activation = activation == MOE4_ACTIVATION_SWIGLU_OAI ? FP8_SWIGLU : activation;

template <> constexpr bool is_common<FP8_SWIGLU> = true;

/* The exponent is rounded twice, as if g were off by less than an ulp; the sum that g comes from is off by more.  Where
 * the exponential overflows, or the sigmoid would be subnormal, the result is 0: nothing beside the other 127 columns
 * under its scale. */
template <> __device__ __forceinline__ float activate<FP8_SWIGLU>(float g, float u, const activation_params &params)
{
    g = clamp_above(g, params.limit);
    u = clamp_both(u, params.limit);
    const float rest = power_of_2(g * (params.alpha * -0x1.715476p+0f)); /* e^-(alpha * g) */
    return g * (u + params.beta) * reciprocal(1.0f + rest);
}

#endif
