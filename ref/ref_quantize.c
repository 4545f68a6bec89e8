/* The quantisers: MXFP8, fp8 and int8 for activations, MXFP4 for weights. */
#include <assert.h>
#include <math.h>

#include "ref_internal.h"

/* Largest magnitude of x [n], NaN if any element is not finite. */
static double largest_magnitude(const double *x, int64_t n)
{
    double amax = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) return NAN;
        if (fabs(x[i]) > amax) amax = fabs(x[i]);
    }
    return amax;
}

/* The byte of 2^exponent, or of 2^-127 below that.  What is finite in f32 never needs more than 0xFE. */
static unsigned scale_byte(int exponent)
{
    return exponent < -127 ? 0 : (unsigned)(exponent + 127);
}

/* The byte of the smallest power of two >= s. */
static unsigned scale_byte_above(double s)
{
    int exponent;
    double fraction = frexp(s, &exponent); /* s = fraction * 2^exponent, fraction 0.5 for a power of two */
    if (s == 0) return 0;
    return scale_byte(fraction == 0.5 ? exponent - 1 : exponent);
}

/* amax / 448 as quantisers compute it: times the f32 reciprocal, rounded to f32. */
unsigned ref_mxfp8_scale(double amax)
{
    return isfinite(amax) ? scale_byte_above(ref_round_f32(amax * ref_round_f32(1.0 / 448))) : 0xFF;
}

/* A block under byte 0 is all zero, whatever its elements were. */
unsigned ref_mxfp8_code(double x, unsigned scale)
{
    return scale == 0 ? 0 : ref_to_e4m3(ldexp(x, 127 - (int)scale));
}

float ref_fp8_scale(double amax)
{
    return isfinite(amax) ? (float)(amax / 448) : NAN;
}

unsigned ref_fp8_code(double x, float scale)
{
    return scale == 0 ? 0 : ref_to_e4m3(ref_round_f32(x / scale));
}

void ref_quantize_mxfp8(const double *x, int64_t n, uint8_t *codes, uint8_t *scales)
{
    for (int64_t i = 0; i < n; i++) {
        if (i % REF_MX_BLOCK == 0)
            scales[i / REF_MX_BLOCK] = (uint8_t)ref_mxfp8_scale(largest_magnitude(x + i, REF_MX_BLOCK));
        unsigned scale = scales[i / REF_MX_BLOCK];
        codes[i] = scale == 0xFF ? 0 : (uint8_t)ref_mxfp8_code(x[i], scale);
    }
}

void ref_quantize_fp8(const double *x, int64_t n, uint8_t *codes, float *scale)
{
    *scale = ref_fp8_scale(largest_magnitude(x, n));
    for (int64_t i = 0; i < n; i++) codes[i] = isnan(*scale) ? 0 : (uint8_t)ref_fp8_code(x[i], *scale);
}

float ref_int8_scale(double amax)
{
    return isfinite(amax) ? (float)(amax / 127) : NAN;
}

/* Saturates, which under the scale of its own block nothing does. */
int ref_int8_code(double x, float scale)
{
    return scale == 0 ? 0 : (int)nearbyint(fmax(-127, fmin(127, ref_round_f32(x / scale))));
}

void ref_quantize_int8(const double *x, int64_t n, int8_t *codes, float *scales)
{
    for (int64_t i = 0; i < n; i++) {
        if (i % REF_MX_BLOCK == 0) scales[i / REF_MX_BLOCK] = ref_int8_scale(largest_magnitude(x + i, REF_MX_BLOCK));
        float scale = scales[i / REF_MX_BLOCK];
        codes[i] = isnan(scale) ? 0 : (int8_t)ref_int8_code(x[i], scale);
    }
}

/* The byte of 2^125, beyond which no rule goes: 6 * 2^125 is the largest code in the range of f32. */
enum { LARGEST_MXFP4_SCALE = 252 };

/* The scale byte of least squared error, of all that a rule may choose. */
static unsigned mxfp4_best_scale(const double *x)
{
    unsigned best = 0;
    double least = INFINITY;
    for (unsigned scale = 0; scale <= LARGEST_MXFP4_SCALE; scale++) {
        double sum = 0;
        for (int k = 0; k < REF_MX_BLOCK; k++) {
            double error = x[k] - ref_e2m1(ref_to_e2m1(ldexp(x[k], 127 - (int)scale))) * ref_e8m0(scale);
            sum += error * error;
        }
        if (sum < least) {
            least = sum;
            best = scale;
        }
    }
    return best;
}

/* The scale byte of an MXFP4 block whose largest magnitude is amax, finite and not 0, by rule alone. */
static unsigned mxfp4_scale(const double *x, double amax, moe4_scale_rule rule)
{
    int exponent;
    double fraction = frexp(amax, &exponent); /* amax = 2*fraction * 2^(exponent-1) */
    switch (rule) {
    case MOE4_SCALE_EVEN: return scale_byte(exponent - 1 - 2 + (2 * fraction >= 1.75)); /* 1.75 rounds up to 2 */
    case MOE4_SCALE_FLOOR: return scale_byte(exponent - 1 - 2);
    case MOE4_SCALE_CEIL: return scale_byte_above(amax / 6);
    case MOE4_SCALE_MSE: return mxfp4_best_scale(x);
    }
    assert(!"mxfp4_scale: no such rule");
    return 0xFF;
}

void ref_quantize_mxfp4(const double *x, int64_t n, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    for (int64_t i = 0; i < n; i += REF_MX_BLOCK) {
        double amax = largest_magnitude(x + i, REF_MX_BLOCK);
        unsigned scale = isnan(amax) ? 0xFF : amax == 0 ? 0 : mxfp4_scale(x + i, amax, rule);
        if (scale > LARGEST_MXFP4_SCALE && scale != 0xFF) scale = LARGEST_MXFP4_SCALE;
        scales[i / REF_MX_BLOCK] = (uint8_t)scale;
        for (int64_t k = i; k < i + REF_MX_BLOCK; k += 2) {
            int empty = amax == 0 || isnan(amax);
            unsigned low = empty ? 0 : ref_to_e2m1(ldexp(x[k], 127 - (int)scale));
            unsigned high = empty ? 0 : ref_to_e2m1(ldexp(x[k + 1], 127 - (int)scale));
            codes[k / 2] = (uint8_t)(low | high << 4);
        }
    }
}

void ref_dequantize_mxfp8(const uint8_t *codes, const uint8_t *scales, int64_t n, double *x)
{
    for (int64_t i = 0; i < n; i++) x[i] = ref_e4m3(codes[i]) * ref_e8m0(scales[i / REF_MX_BLOCK]);
}

void ref_dequantize_fp8(const uint8_t *codes, float scale, int64_t n, double *x)
{
    for (int64_t i = 0; i < n; i++) x[i] = ref_e4m3(codes[i]) * scale;
}

void ref_round_fp8(double *x, int64_t n)
{
    const float scale = ref_fp8_scale(largest_magnitude(x, n));
    for (int64_t i = 0; i < n; i++) x[i] = (isnan(scale) ? 0 : ref_e4m3(ref_fp8_code(x[i], scale))) * scale;
}

void ref_dequantize_int8(const int8_t *codes, const float *scales, int64_t n, double *x)
{
    for (int64_t i = 0; i < n; i++) x[i] = codes[i] * (double)scales[i / REF_MX_BLOCK];
}

void ref_round_int8(double *x, int64_t n)
{
    int8_t codes[REF_MX_BLOCK];
    float scale;
    for (int64_t i = 0; i < n; i += REF_MX_BLOCK) {
        ref_quantize_int8(x + i, REF_MX_BLOCK, codes, &scale);
        ref_dequantize_int8(codes, &scale, REF_MX_BLOCK, x + i);
    }
}

static void requantize_group(ref_mode mode, double *x, int64_t n)
{
    uint8_t codes[REF_FP8_GROUP], scales[REF_FP8_GROUP / REF_MX_BLOCK];
    float scale;
    if (mode == REF_MODE_MXFP8) {
        ref_quantize_mxfp8(x, n, codes, scales);
        ref_dequantize_mxfp8(codes, scales, n, x);
    } else if (mode == REF_MODE_INT8) {
        ref_round_int8(x, n);
    } else {
        ref_quantize_fp8(x, n, codes, &scale);
        ref_dequantize_fp8(codes, scale, n, x);
    }
}

void ref_requantize(ref_mode mode, double *x, int64_t n)
{
    if (mode == REF_MODE_BF16 || mode == REF_MODE_UNROUNDED) return;
    for (int64_t first = 0; first < n; first += REF_FP8_GROUP)
        requantize_group(mode, x + first, n - first < REF_FP8_GROUP ? n - first : REF_FP8_GROUP);
}
