/* Activations in the GEMM's epilogue: v = act(gate, up) in f32, accurate to about 2 ulp (src/cpu/activation.h has the
 * same functions to the last bit; rounded to bf16 the two hardly ever differ). */
#ifndef MOE4_CUDA_ACTIVATION_CUH
#define MOE4_CUDA_ACTIVATION_CUH

#include <math.h>

#include "cpu/activation.h"

/* e^(x + rest) for x <= 0, |rest| tiny: the exponent of a product may carry its rounding error along. */
static __device__ __forceinline__ float exp_negative(float x, float rest)
{
    x = x < -104.0f ? -104.0f : x; /* where it rounds to 0 */
    float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p23f), n = shifted - 0x1.8p23f;
    float r = fmaf(n, -0x1.62e400p-1f, x); /* exact: n has 8 bits, the constant 15 */
    r = fmaf(n, -0x1.7f7d1cp-20f, r) + rest;
    float p = 0x1.a5f9e0p-10f; /* minimax for (e^r - 1 - r) / r^2 on |r| < 0.35 */
    p = fmaf(p, r, 0x1.126380p-7f);
    p = fmaf(p, r, 0x1.5558a6p-5f);
    p = fmaf(p, r, 0x1.55541ap-3f);
    p = fmaf(p, r, 0x1.fffffep-2f);
    float e = fmaf(r * r, p, r) + 1.0f;
    int32_t exponent = __float_as_int(shifted) - __float_as_int(0x1.8p23f), half = exponent >> 1;
    e *= __int_as_float((half + 127) << 23); /* 2^n in two factors, since n may be out of a float's exponents */
    return e * __int_as_float((exponent - half + 127) << 23);
}

/* a / b to within an ulp, 1 <= b <= 2. */
static __device__ __forceinline__ float divide(float a, float b)
{
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    float q = a * reciprocal;
    float corrected = fmaf(fmaf(-q, b, a), reciprocal, q);
    return fabsf(q) < INFINITY ? corrected : q; /* not NaN out of infinity */
}

/* a * sigmoid(alpha * g) */
static __device__ __forceinline__ float times_sigmoid(float a, float alpha, float g)
{
    float z = alpha * g, rest = fmaf(alpha, g, -z); /* z + rest is exact */
    if (!(fabsf(rest) < 1.0f)) rest = 0.0f;         /* z overflowed */
    float e = exp_negative(-fabsf(z), z < 0.0f ? rest : -rest);
    return divide(z < 0.0f ? a * e : a, 1.0f + e);
}

static __device__ __forceinline__ float clamp_above(float x, float limit)
{
    return x > limit ? limit : x;
}

static __device__ __forceinline__ float clamp_both(float x, float limit)
{
    x = x < -limit ? -limit : x;
    return x > limit ? limit : x;
}

template <moe4_activation activation>
static __device__ __forceinline__ float activate(float g, float u, const activation_params &params)
{
    if constexpr (activation == MOE4_ACTIVATION_SWIGLU_STEP) {
        u = clamp_both(u, params.limit);
        return clamp_above(times_sigmoid(g, 1.0f, g), params.limit) * u;
    }
    if constexpr (activation == MOE4_ACTIVATION_RELU2) {
        u = u < 0.0f ? 0.0f : u;
        return u * u;
    }
    if constexpr (activation == MOE4_ACTIVATION_IDENTITY) return u;

    g = clamp_above(g, params.limit);
    u = clamp_both(u, params.limit);
    if constexpr (activation == MOE4_ACTIVATION_SILU || activation == MOE4_ACTIVATION_SWIGLU_OAI)
        return times_sigmoid(g * (u + params.beta), params.alpha, g);
    if constexpr (activation == MOE4_ACTIVATION_SITU) {
        float up = params.beta == INFINITY ? u : params.beta * tanhf(u / params.beta);
        return times_sigmoid(params.alpha * tanhf(g / params.alpha) * up, 1.0f, g);
    }
    /* the others are rare, and a cancelling 1 - erf wants the digits */
    double z = (double)params.alpha * g;
    if constexpr (activation == MOE4_ACTIVATION_GEGLU) return (float)(g * normcdf(z) * ((double)u + params.beta));
    double minus_2y = -0x1.9884533d43651p+0 * (z + 0.044715 * z * z * z);
    return (float)(g * ((double)u + params.beta) / (1.0 + exp(minus_2y)));
}

#endif
