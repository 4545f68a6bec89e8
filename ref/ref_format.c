/* Number formats, decoded and rounded by the formula that defines them. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "ref.h"

/* A binary floating-point format: its sign is the bit above exponent and mantissa. */
typedef struct format {
    int exponent_bits, mantissa_bits, bias;
} format;

static const format e2m1 = {2, 1, 1}, e4m3 = {4, 3, 7}, f16 = {5, 10, 15}, bf16 = {8, 7, 127};

/* The value of a code, its exponent field being an ordinary one even where it is all ones. */
static double format_decode(const format *f, unsigned code)
{
    unsigned mantissa = code & ((1u << f->mantissa_bits) - 1);
    unsigned exponent = code >> f->mantissa_bits & ((1u << f->exponent_bits) - 1);
    unsigned sign = code >> (f->mantissa_bits + f->exponent_bits) & 1;
    double magnitude = exponent
                           ? ldexp(mantissa + ldexp(1, f->mantissa_bits), (int)exponent - f->bias - f->mantissa_bits)
                           : ldexp(mantissa, 1 - f->bias - f->mantissa_bits);
    return sign ? -magnitude : magnitude;
}

/* The multiple of the format's spacing around a finite value that is nearest, ties to even.  May be above the format's
 * largest value. */
static double format_round(const format *f, double value)
{
    int exponent;
    frexp(value, &exponent); /* |value| < 2^exponent */
    int normal = exponent - 1 > 1 - f->bias ? exponent - 1 : 1 - f->bias;
    int spacing = normal - f->mantissa_bits;
    return ldexp(nearbyint(ldexp(value, -spacing)), spacing);
}

/* The code of a value that the format has. */
static unsigned format_encode(const format *f, double value)
{
    unsigned sign = signbit(value) ? 1u << (f->mantissa_bits + f->exponent_bits) : 0;
    int exponent;
    frexp(value, &exponent);
    int field = value == 0 ? 0 : exponent - 1 + f->bias;
    if (field < 1) return sign | (unsigned)ldexp(fabs(value), f->mantissa_bits + f->bias - 1);
    unsigned mantissa = (unsigned)ldexp(fabs(value), f->mantissa_bits + 1 - exponent) - (1u << f->mantissa_bits);
    return sign | (unsigned)field << f->mantissa_bits | mantissa;
}

/* Nearest value of a format without infinities, saturating. */
static unsigned saturating_code(const format *f, double value, double largest)
{
    double rounded = isinf(value) ? value : format_round(f, value);
    return format_encode(f, fabs(rounded) > largest ? copysign(largest, value) : rounded);
}

/* Nearest value of a format that follows IEEE 754: its largest exponent field holds infinities and NaN. */
static double ieee_round(const format *f, double value)
{
    if (!isfinite(value)) return value;
    double rounded = format_round(f, value), limit = ldexp(1, (1 << f->exponent_bits) - 1 - f->bias);
    return fabs(rounded) >= limit ? copysign(INFINITY, value) : rounded;
}

static uint16_t ieee_encode(const format *f, double value)
{
    unsigned sign = signbit(value) ? 0x8000u : 0, infinity = ((1u << f->exponent_bits) - 1) << f->mantissa_bits;
    double rounded = ieee_round(f, value);
    if (isnan(value)) return (uint16_t)(sign | infinity | 1u << (f->mantissa_bits - 1));
    if (isinf(rounded)) return (uint16_t)(sign | infinity);
    return (uint16_t)format_encode(f, rounded);
}

static double ieee_decode(const format *f, uint16_t bits)
{
    unsigned infinity = ((1u << f->exponent_bits) - 1) << f->mantissa_bits, magnitude = bits & 0x7FFFu;
    if (magnitude > infinity) return NAN;
    if (magnitude == infinity) return bits & 0x8000u ? -INFINITY : INFINITY;
    return format_decode(f, bits);
}

double ref_e2m1(unsigned code)
{
    return format_decode(&e2m1, code);
}

double ref_e8m0(unsigned byte)
{
    return byte == 0xFF ? NAN : ldexp(1, (int)byte - 127);
}

double ref_e4m3(unsigned code)
{
    return (code & 0x7F) == 0x7F ? NAN : format_decode(&e4m3, code);
}

double ref_bf16(uint16_t bits)
{
    return ieee_decode(&bf16, bits);
}

double ref_f16(uint16_t bits)
{
    return ieee_decode(&f16, bits);
}

unsigned ref_to_e2m1(double value)
{
    return isnan(value) ? 7u : saturating_code(&e2m1, value, 6);
}

unsigned ref_to_e4m3(double value)
{
    return isnan(value) ? 0x7Fu : saturating_code(&e4m3, value, 448);
}

uint16_t ref_to_bf16(double value)
{
    return ieee_encode(&bf16, value);
}

uint16_t ref_to_f16(double value)
{
    return ieee_encode(&f16, value);
}

double ref_round_bf16(double value)
{
    return ieee_round(&bf16, value);
}

double ref_round_f16(double value)
{
    return ieee_round(&f16, value);
}

double ref_round_f32(double value)
{
    return (float)value;
}

double ref_load(const void *array, moe4_dtype dtype, int64_t index)
{
    const unsigned char *bytes = array;
    union {
        float f32;
        uint16_t bits;
        int16_t i16;
        int32_t i32;
        int64_t i64;
    } element;
    switch (dtype) {
    case MOE4_DTYPE_F32: memcpy(&element, bytes + index * 4, 4); return element.f32;
    case MOE4_DTYPE_F16: memcpy(&element, bytes + index * 2, 2); return ref_f16(element.bits);
    case MOE4_DTYPE_BF16: memcpy(&element, bytes + index * 2, 2); return ref_bf16(element.bits);
    case MOE4_DTYPE_F8_E4M3: return ref_e4m3(bytes[index]);
    case MOE4_DTYPE_E8M0: return ref_e8m0(bytes[index]);
    case MOE4_DTYPE_I8: return (int8_t)bytes[index];
    case MOE4_DTYPE_I16: memcpy(&element, bytes + index * 2, 2); return element.i16;
    case MOE4_DTYPE_I32: memcpy(&element, bytes + index * 4, 4); return element.i32;
    case MOE4_DTYPE_I64: memcpy(&element, bytes + index * 8, 8); return (double)element.i64;
    case MOE4_DTYPE_NONE: break;
    }
    assert(!"ref_load: no such dtype");
    return NAN;
}
