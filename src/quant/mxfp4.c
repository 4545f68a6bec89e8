/* f32 <-> MXFP4, in integer arithmetic on the bits throughout: neither the host's rounding mode nor its treatment of
 * subnormals changes anything, and the compiler vectorises the loops. */
#include <string.h>

#include "base/mxfp4.h"
#include "moe4/quant.h"

enum { N_MAGNITUDES = 8, N_MIDPOINTS = N_MAGNITUDES - 1, UNIT_SCALE = 127 };
enum { MAGNITUDE = 0x7FFFFFFF, INFINITY_BITS = 0x7F800000, QUIET_NAN_BITS = 0x7FC00000 };
enum { MANTISSA_BITS = 23, HIDDEN_BIT = 1 << MANTISSA_BITS, LARGEST_EXPONENT = 254 };

/* Magnitudes of codes 0..7 as f32 bits: 0 0.5 1 1.5 2 3 4 6. */
static const int32_t magnitudes[N_MAGNITUDES] = {
    0x00000000, 0x3F000000, 0x3F800000, 0x3FC00000, 0x40000000, 0x40400000, 0x40800000, 0x40C00000,
};

/* Halfway between codes i and i+1, as f32 bits.  The midpoint itself goes to the even one. */
static const struct midpoint {
    int32_t bits, goes_up;
} midpoints[N_MIDPOINTS] = {
    {0x3E800000, 0}, /* 0.25 -> 0 */
    {0x3F400000, 1}, /* 0.75 -> 1 */
    {0x3FA00000, 0}, /* 1.25 -> 1 */
    {0x3FE00000, 1}, /* 1.75 -> 2 */
    {0x40200000, 0}, /* 2.5  -> 2 */
    {0x40600000, 1}, /* 3.5  -> 4 */
    {0x40A00000, 0}, /* 5    -> 4 */
};

/* bits * 2^(scale-127) for one of the numbers above: exact, since they have three significant bits at most; infinity
 * beyond the range. */
static int32_t scaled(int32_t bits, int32_t scale)
{
    int32_t exponent = (bits >> MANTISSA_BITS) + scale - UNIT_SCALE, mantissa = bits & (HIDDEN_BIT - 1);
    if (!bits) return 0;
    if (exponent > LARGEST_EXPONENT) return INFINITY_BITS;
    return exponent > 0 ? exponent << MANTISSA_BITS | mantissa : (HIDDEN_BIT | mantissa) >> (1 - exponent);
}

/* What is added to amax's bits so that their exponent field becomes the scale's exponent + 2.  EVEN carries from a
 * mantissa of 1.75 up, CEIL from just above 1.5 = 6/4: amax/6 <= 2^s is the same as amax <= 1.5 * 2^(s+2). */
static int32_t carry_of(moe4_scale_rule rule)
{
    switch (rule) {
    case MOE4_SCALE_FLOOR: return 0;
    case MOE4_SCALE_CEIL: return 0x3FFFFF;
    default: return 0x200000;
    }
}

static void quantize_block(const float *x, int32_t carry, uint8_t *codes, uint8_t *scale)
{
    int32_t bits[BLOCK_SIZE], code[BLOCK_SIZE], limits[N_MIDPOINTS], amax = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        amax = magnitude > amax ? magnitude : amax;
    }
    if (amax == 0 || amax >= INFINITY_BITS) {
        *scale = amax ? SCALE_NAN : 0;
        memset(codes, 0, BLOCK_BYTES);
        return;
    }
    int32_t exponent = ((amax + carry) >> MANTISSA_BITS) - 2;
    *scale = (uint8_t)(exponent > 0 ? exponent : 0);
    for (int i = 0; i < N_MIDPOINTS; i++) limits[i] = scaled(midpoints[i].bits, *scale) - midpoints[i].goes_up;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE, above = 0;
        for (int m = 0; m < N_MIDPOINTS; m++) above += magnitude > limits[m];
        code[i] = above | (int32_t)((uint32_t)bits[i] >> 28 & 8);
    }
    for (int j = 0; j < BLOCK_BYTES; j++) codes[j] = (uint8_t)(code[2 * j] | code[2 * j + 1] << 4);
}

void moe4_mxfp4_quantize(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    int32_t carry = carry_of(rule);
    for (int64_t b = 0; b < n_blocks; b++)
        quantize_block(x + b * BLOCK_SIZE, carry, codes + b * BLOCK_BYTES, scales + b);
}

void moe4_mxfp4_dequantize(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, float *x)
{
    for (int64_t b = 0; b < n_blocks; b++) {
        uint32_t values[2 * N_MAGNITUDES], bits[BLOCK_SIZE];
        for (int i = 0; i < N_MAGNITUDES; i++) {
            values[i] = (uint32_t)(scales[b] == SCALE_NAN ? QUIET_NAN_BITS : scaled(magnitudes[i], scales[b]));
            values[i + N_MAGNITUDES] = values[i] | 0x80000000u;
        }
        for (int j = 0; j < BLOCK_BYTES; j++) {
            uint8_t byte = codes[b * BLOCK_BYTES + j];
            bits[2 * j] = values[byte & 15];
            bits[2 * j + 1] = values[byte >> 4];
        }
        memcpy(x + b * BLOCK_SIZE, bits, sizeof bits);
    }
}
