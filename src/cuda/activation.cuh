/* Activations in the GEMM's epilogue: v = act(gate, up) in f32, accurate to a few ulp (src/cpu/activation.h has the
 * same functions to the last bit; rounded to bf16 the two hardly ever differ).  What depends on parameters only is
 * computed once where the calls are unrolled. */
#ifndef MOE4_CUDA_ACTIVATION_CUH
#define MOE4_CUDA_ACTIVATION_CUH

#include <math.h>

#include "cpu/activation.h"

/* What models use (SILU is SWIGLU_OAI, launch.cuh).  Kernels of the others have fewer widths, so that there is less to
 * compile. */
template <moe4_activation activation>
constexpr bool is_common = activation == MOE4_ACTIVATION_SWIGLU_OAI || activation == MOE4_ACTIVATION_SITU;

static __device__ __forceinline__ float power_of_2(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

static __device__ __forceinline__ float reciprocal(float x)
{
    float of;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(of) : "f"(x));
    return of;
}

/* min and max that keep a NaN */
static __device__ __forceinline__ float clamp_above(float x, float limit)
{
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(limit));
    return least;
}

static __device__ __forceinline__ float clamp_both(float x, float limit)
{
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(clamp_above(x, limit)), "f"(-limit));
    return most;
}

/* How sigmoid(alpha * g) falls with |g|: sqrt(e^-|alpha * g|) = 2^-(|g| * (high + low)), which is 0 from |g| = most on.
 */
struct sigmoid_slope {
    float high, low, most;
    bool is_mirrored; /* alpha < 0 */
};

static __device__ __forceinline__ sigmoid_slope slope_of(float alpha)
{
    constexpr float half_log2e = 0x1.715476p-1f, half_log2e_low = 0x1.4ae0c0p-27f;
    const float size = fabsf(alpha), high = size * half_log2e;
    return {high, fmaf(size, half_log2e_low, fmaf(size, half_log2e, -high)),
            200.0f * 0x1p-8f * reciprocal(high * 0x1p-8f), alpha < 0.0f};
}

/* What sigmoid(alpha * g) is made of: falls^2 / sum.  With the root of the exponential nothing is lost to flushed
 * subnormals when a factor is multiplied by falls twice. */
struct sigmoid_parts {
    float falls, sum;
};

static __device__ __forceinline__ sigmoid_parts sigmoid_of(const sigmoid_slope &slope, float g)
{
    const float size = fminf(fabsf(g), slope.most), x = size * slope.high;
    const float rest = fmaf(size, slope.low, fmaf(size, slope.high, -x)); /* of the exponent */
    float root = power_of_2(-x);
    root = fmaf(root, rest * -0x1.62e430p-1f, root);
    return {g < 0.0f != slope.is_mirrored ? root : 1.0f, fmaf(root, root, 1.0f)};
}

/* a * sigmoid(alpha * g) */
static __device__ __forceinline__ float times_sigmoid(float a, const sigmoid_slope &slope, float g)
{
    const sigmoid_parts of = sigmoid_of(slope, g);
    return a * of.falls * of.falls * reciprocal(of.sum);
}

/* tanh(y) / y = above / below for |y| <= TANH_MOST, from where on tanh(y) rounds to 1.  A NaN becomes TANH_MOST. */
#define TANH_MOST 9.01f
struct tanh_parts {
    float above, below;
};

static __device__ __forceinline__ tanh_parts tanh_of(float y)
{
    const float w = fminf(y * y, TANH_MOST * TANH_MOST);
    float above = 0x1.cc7e0ep-27f, below = 0x1.a2a020p-21f; /* minimax, off by 2^-25 */
    above = fmaf(above, w, 0x1.5a6cf8p-16f), below = fmaf(below, w, 0x1.58f568p-12f);
    above = fmaf(above, w, 0x1.ca851ap-9f), below = fmaf(below, w, 0x1.a8232ep-6f);
    above = fmaf(above, w, 0x1.12173ap-3f), below = fmaf(below, w, 0x1.de60eap-2f);
    return {fmaf(above, w, 1.0f), fmaf(below, w, 1.0f)};
}

/* alpha * tanh(g / alpha) * sigmoid(g) * beta * tanh(u / beta).  Beyond TANH_MOST a tanh is flat, so that its argument
 * may be clamped there; without beta it is clamped at infinity and divided by it, and u remains, infinite or not. */
static __device__ __forceinline__ float situ(float g, float u, const activation_params &params)
{
    const float per_alpha = fminf(reciprocal(params.alpha), 0x1p127f),
                per_beta = fminf(reciprocal(params.beta), 0x1p127f);
    const sigmoid_parts sigmoid = sigmoid_of(slope_of(1.0f), g);
    g = clamp_both(g, TANH_MOST * params.alpha);
    u = clamp_both(u, TANH_MOST * params.beta);
    const tanh_parts gate = tanh_of(g * per_alpha), up = tanh_of(u * per_beta);
    const float ratio = gate.above * up.above * reciprocal(gate.below * up.below * sigmoid.sum);
    return g * ratio * sigmoid.falls * sigmoid.falls * u;
}

template <moe4_activation activation>
static __device__ __forceinline__ float activate(float g, float u, const activation_params &params)
{
    if constexpr (activation == MOE4_ACTIVATION_RELU2) {
        u = u < 0.0f ? 0.0f : u;
        return u * u;
    }
    if constexpr (activation == MOE4_ACTIVATION_IDENTITY) return u;
    u = clamp_both(u, params.limit);
    if constexpr (activation == MOE4_ACTIVATION_SWIGLU_STEP)
        return clamp_above(times_sigmoid(g, slope_of(1.0f), g), params.limit) * u;

    g = clamp_above(g, params.limit);
    if constexpr (activation == MOE4_ACTIVATION_SILU) return times_sigmoid(g * u, slope_of(1.0f), g);
    if constexpr (activation == MOE4_ACTIVATION_SWIGLU_OAI)
        return times_sigmoid(g * (u + params.beta), slope_of(params.alpha), g);
    if constexpr (activation == MOE4_ACTIVATION_SITU) return situ(g, u, params);
    /* the others are rare, and a cancelling 1 - erf wants the digits */
    double z = (double)params.alpha * g;
    if constexpr (activation == MOE4_ACTIVATION_GEGLU) return (float)(g * normcdf(z) * ((double)u + params.beta));
    double minus_2y = -0x1.9884533d43651p+0 * (z + 0.044715 * z * z * z);
    return (float)(g * ((double)u + params.beta) / (1.0 + exp(minus_2y)));
}

#endif
