/* The activations' arithmetic, compiled once for each instruction set: activation_ISA.c defines ACTIVATION_KERNELS, the
 * name of its table, and includes this file.
 *
 * Every function is one straight loop that compilers turn into vector code: no branches, no calls, no fma (see
 * activation.h for why).  Clamps are written as compares that keep a NaN. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/convert.h"
#include "cpu/activation.h"

/* e^x = scale * (1 + rest), |rest| < 0.42 */
struct exp_parts {
    double scale, rest;
};

/* x = n*ln2 + r, n integer, |r| <= ln2/2: scale = 2^n, rest = e^r - 1.
 *
 * Relative errors: 2.3e-10 in rest, by the polynomial (minimax for (e^r-1)/r); 1e-13 in the whole by r, for which one
 * double of ln2 is enough.  Below -709 scale is 0 and above 710 it is +inf; a NaN makes rest NaN. */
static inline struct exp_parts exp_split(double x)
{
    static const double log2e = 0x1.71547652b82fep+0, ln2 = 0x1.62e42fefa39efp-1;
    static const double to_integer = 0x1.8p52; /* adding it leaves n in the low bits */
    x = x < -709.0 ? -709.0 : x;
    x = x > 710.0 ? 710.0 : x;
    double shifted = x * log2e + to_integer;
    double n = shifted - to_integer;
    double r = x - n * ln2;

    double p = 0x1.a019ea848e865p-13;
    p = p * r + 0x1.6d7491e491b8dp-10;
    p = p * r + 0x1.1111a682296b6p-7;
    p = p * r + 0x1.5554ada58e164p-5;
    p = p * r + 0x1.555554c5f598bp-3;
    p = p * r + 0x1.0000002818fcep-1;
    p = p * r + 0x1.000000002253dp+0;

    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52; /* the exponent field: 0 for n = -1023, infinity for n = 1024 */
    struct exp_parts result = {.rest = r * p};
    memcpy(&result.scale, &bits, sizeof bits);
    return result;
}

static inline double exp_of(double x)
{
    struct exp_parts e = exp_split(x);
    return e.scale * (1.0 + e.rest);
}

/* tanh(y) = numerator / denominator, without cancellation for small y: with m = e^(-2|y|) - 1, in (-1, 0], it is
 * -m / (2 + m) with y's sign. */
struct tanh_parts {
    double numerator, denominator;
};

static inline struct tanh_parts tanh_split(double y)
{
    struct exp_parts e = exp_split(-2.0 * fabs(y));
    double m = e.scale * e.rest + (e.scale - 1.0);
    return (struct tanh_parts){copysign(-m, y), 2.0 + m};
}

/* The normal distribution's CDF.  With t = |z| and s = 1/(1 + t/4) its lower tail is e^(-t^2/2) * s * polynomial(s),
 * relative error 2.6e-11 for t up to 38, where the exponential underflows. */
static inline double normal_cdf(double z)
{
    double t = fabs(z);
    double s = 4.0 / (4.0 + t);
    double p = 0x1.a1c0ef3514329p-8;
    p = p * s - 0x1.53a9e808e1516p-5;
    p = p * s + 0x1.bbbd8c471e7dcp-4;
    p = p * s - 0x1.1ea1be8f86433p-3;
    p = p * s + 0x1.845fcba867a87p-4;
    p = p * s - 0x1.a7434b06f4da3p-5;
    p = p * s + 0x1.5e677808d2382p-6;
    p = p * s + 0x1.615fe10cb79dcp-6;
    p = p * s + 0x1.5fc30b0638d0ap-5;
    p = p * s + 0x1.04e210173fbd8p-4;
    p = p * s + 0x1.4bc2319bfea27p-4;
    p = p * s + 0x1.7f00b0adb5199p-4;
    p = p * s + 0x1.98840c9f9cf75p-4;
    p = p * s + 0x1.988454fbee207p-4;
    double tail = exp_of(-0.5 * t * t) * s * p;
    return z < 0.0 ? tail : 1.0 - tail;
}

static inline float clamp_above(float x, float limit)
{
    return x > limit ? limit : x;
}

static inline float clamp_both(float x, float limit)
{
    x = x < -limit ? -limit : x;
    return x > limit ? limit : x;
}

/* To f32, with one NaN for all: which one survives an operation is the compiler's choice. */
static inline float result_of(double v)
{
    float rounded = (float)v;
    return rounded != rounded ? NAN : rounded;
}

/* g * sigmoid(alpha*g) * (u + beta) */
static void swiglu(const float *restrict gate, const float *restrict up, int64_t n,
                   const struct activation_params *params, float *restrict v)
{
    const double alpha = params->alpha, beta = params->beta;
    const float limit = params->limit;
    for (int64_t i = 0; i < n; i++) {
        double g = clamp_above(gate[i], limit), u = clamp_both(up[i], limit);
        v[i] = result_of(g * (u + beta) / (1.0 + exp_of(-alpha * g)));
    }
}

/* alpha*tanh(g/alpha) * sigmoid(g) * u */
static void situ_linear(const float *restrict gate, const float *restrict up, int64_t n,
                        const struct activation_params *params, float *restrict v)
{
    const double alpha = params->alpha, per_alpha = 1.0 / alpha;
    const float limit = params->limit;
    for (int64_t i = 0; i < n; i++) {
        double g = clamp_above(gate[i], limit), u = clamp_both(up[i], limit);
        struct tanh_parts tg = tanh_split(g * per_alpha);
        v[i] = result_of(alpha * tg.numerator * u / (tg.denominator * (1.0 + exp_of(-g))));
    }
}

/* alpha*tanh(g/alpha) * sigmoid(g) * beta*tanh(u/beta) */
static void situ(const float *restrict gate, const float *restrict up, int64_t n,
                 const struct activation_params *params, float *restrict v)
{
    if (params->beta == INFINITY) {
        situ_linear(gate, up, n, params, v);
        return;
    }
    const double alpha = params->alpha, per_alpha = 1.0 / alpha, per_beta = 1.0 / params->beta;
    const double alpha_beta = alpha * params->beta;
    const float limit = params->limit;
    for (int64_t i = 0; i < n; i++) {
        double g = clamp_above(gate[i], limit), u = clamp_both(up[i], limit);
        struct tanh_parts tg = tanh_split(g * per_alpha), tu = tanh_split(u * per_beta);
        v[i] = result_of(alpha_beta * tg.numerator * tu.numerator /
                         (tg.denominator * tu.denominator * (1.0 + exp_of(-g))));
    }
}

/* g * Phi(alpha*g) * (u + beta) */
static void geglu(const float *restrict gate, const float *restrict up, int64_t n,
                  const struct activation_params *params, float *restrict v)
{
    const double alpha = params->alpha, beta = params->beta;
    const float limit = params->limit;
    for (int64_t i = 0; i < n; i++) {
        double g = clamp_above(gate[i], limit), u = clamp_both(up[i], limit);
        v[i] = result_of(g * normal_cdf(alpha * g) * (u + beta));
    }
}

/* The same with Phi(x) ~ (1 + tanh(y))/2 = sigmoid(2y), y = sqrt(2/pi) * (x + 0.044715 x^3). */
static void geglu_tanh(const float *restrict gate, const float *restrict up, int64_t n,
                       const struct activation_params *params, float *restrict v)
{
    static const double minus_2_sqrt_2_per_pi = -0x1.9884533d43651p+0;
    const double alpha = params->alpha, beta = params->beta;
    const float limit = params->limit;
    for (int64_t i = 0; i < n; i++) {
        double g = clamp_above(gate[i], limit), u = clamp_both(up[i], limit);
        double x = alpha * g, minus_2y = minus_2_sqrt_2_per_pi * (x + 0.044715 * x * x * x);
        v[i] = result_of(g * (u + beta) / (1.0 + exp_of(minus_2y)));
    }
}

/* min(g*sigmoid(g), limit) * clamp(u, -limit, limit) */
static void swiglu_step(const float *restrict gate, const float *restrict up, int64_t n,
                        const struct activation_params *params, float *restrict v)
{
    const float limit = params->limit;
    const double gate_limit = limit;
    for (int64_t i = 0; i < n; i++) {
        double g = gate[i], u = clamp_both(up[i], limit);
        double silu = g / (1.0 + exp_of(-g));
        v[i] = result_of((silu > gate_limit ? gate_limit : silu) * u);
    }
}

static void relu2(const float *restrict gate, const float *restrict up, int64_t n,
                  const struct activation_params *params, float *restrict v)
{
    (void)gate, (void)params;
    for (int64_t i = 0; i < n; i++) {
        float u = up[i] < 0.0f ? 0.0f : up[i];
        v[i] = result_of((double)u * u);
    }
}

static void identity(const float *restrict gate, const float *restrict up, int64_t n,
                     const struct activation_params *params, float *restrict v)
{
    (void)gate, (void)params;
    for (int64_t i = 0; i < n; i++) v[i] = result_of(up[i]);
}

static void round_bf16(const float *restrict v, int64_t n, uint16_t *restrict rounded)
{
    for (int64_t i = 0; i < n; i++) rounded[i] = bf16_from_f32(v[i]);
}

const struct activation_kernels ACTIVATION_KERNELS = {
    .run =
        {
            [MOE4_ACTIVATION_SILU] = swiglu, /* alpha 1, beta -0 */
            [MOE4_ACTIVATION_SWIGLU_OAI] = swiglu,
            [MOE4_ACTIVATION_SITU] = situ,
            [MOE4_ACTIVATION_GEGLU] = geglu,
            [MOE4_ACTIVATION_GEGLU_TANH] = geglu_tanh,
            [MOE4_ACTIVATION_SWIGLU_STEP] = swiglu_step,
            [MOE4_ACTIVATION_RELU2] = relu2,
            [MOE4_ACTIVATION_IDENTITY] = identity,
        },
    .round = round_bf16,
};
