/* The loops of blocks.h.  Included by one file an instruction set, which names the table BLOCK_KERNELS.
 *
 * Elements stay bits: exponents are moved by the scale's in integer arithmetic, and what is then compared with
 * constants is the element over the scale.  This is exact as long as no limit between two codes is subnormal, for scale
 * bytes from LOWEST_SCALE up.  bf16 elements are 16 bits wide all the way. */
#include <string.h>

#include "base/convert.h"
#include "base/dims.h"
#include "base/mxfp4.h"
#include "quant/blocks.h"

enum { LOWEST_SCALE = 3, UNIT = 127, N_CHAINS = 16 };

static void pack16(const int16_t *code, uint8_t *codes)
{
    uint32_t pairs[BLOCK_BYTES];
    memcpy(pairs, code, sizeof pairs);
    for (int j = 0; j < BLOCK_BYTES; j++) codes[j] = (uint8_t)(pairs[j] | pairs[j] >> 12);
}

static void encode_bf16(const uint16_t *x, int32_t scale, uint8_t *codes)
{
    int16_t code[BLOCK_SIZE], shift = (int16_t)((scale - UNIT) * 128);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int16_t y = (int16_t)((x[i] & 0x7FFF) - shift); /* the limits are .25 .75 1.25 1.75 2.5 3.5 5 */
        int16_t low = (int16_t)((y > 0x3E80) + (y >= 0x3F40) + (y > 0x3FA0) + (y >= 0x3FE0));
        int16_t high = (int16_t)((y > 0x4020) + (y >= 0x4060) + (y > 0x40A0));
        code[i] = (int16_t)(low + high + (x[i] >> 12 & 8));
    }
    pack16(code, codes);
}

static void encode_f32(const int32_t *bits, int32_t scale, uint8_t *codes)
{
    int16_t code[BLOCK_SIZE];
    int32_t shift = (scale - UNIT) * (1 << 23);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t y = (bits[i] & 0x7FFFFFFF) - shift;
        int32_t low = (y > 0x3E800000) + (y >= 0x3F400000) + (y > 0x3FA00000) + (y >= 0x3FE00000);
        int32_t high = (y > 0x40200000) + (y >= 0x40600000) + (y > 0x40A00000);
        code[i] = (int16_t)(low + high + (bits[i] >> 28 & 8));
    }
    pack16(code, codes);
}

/* The square of what is lost of y, a magnitude over the unit, when the scale is `factor` times that. */
static float lost(float y, float factor)
{
    /* Adding 1.5 * 2^23 steps rounds to a step; steps are 1/2 below 2, 1 below 4, then 2. */
    float step = y < 2 * factor ? 0.5f * factor : y < 4 * factor ? factor : 2 * factor;
    float code = y + step * 0x1.8p23f - step * 0x1.8p23f;
    float error = y - (code < 6 * factor ? code : 6 * factor);
    return error * error;
}

/* Squared errors of a block under twice, once and half a scale, in units of 2^(2*scale-254): the bits are moved to the
 * scale.  The order of summation is fixed. */
static void squared_errors(const int32_t *bits, int32_t scale, float *twice, float *once, float *half)
{
    float sums[3][N_CHAINS] = {{0}};
    int32_t shift = (scale - UNIT) * (1 << 23);
    for (int i = 0; i < BLOCK_SIZE; i += N_CHAINS)
        for (int c = 0; c < N_CHAINS; c++) {
            int32_t moved = (bits[i + c] & 0x7FFFFFFF) - shift;
            float y = f32_from_bits((uint32_t)(moved > 0 ? moved : 0));
            sums[0][c] += lost(y, 2.0f);
            sums[1][c] += lost(y, 1.0f);
            sums[2][c] += lost(y, 0.5f);
        }
    for (int n = N_CHAINS / 2; n > 0; n /= 2)
        for (int c = 0; c < n; c++)
            for (int s = 0; s < 3; s++) sums[s][c] += sums[s][c + n];
    *twice = sums[0][0];
    *once = sums[1][0];
    *half = sums[2][0];
}

/* The best of half, once and twice FLOOR's scale.  A coarser one than twice is never better: all of its magnitudes
 * below amax are among those of twice.  A finer one than half loses more on the largest element alone than 31 others
 * can win.  There is none above HIGHEST_SCALE. */
static int32_t best_scale(const int32_t *bits, int32_t floor)
{
    float twice, once, half;
    squared_errors(bits, floor, &twice, &once, &half);
    if (floor == HIGHEST_SCALE) twice = once;
    int32_t best = twice < once ? floor + 1 : floor;
    return half < (twice < once ? twice : once) ? floor - 1 : best;
}

static void from_f32(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    int32_t carry = block_carry(rule), is_mse = rule == MOE4_SCALE_MSE;
    for (int64_t b = 0; b < n_blocks; b++, codes += BLOCK_BYTES) {
        int32_t bits[BLOCK_SIZE], amax = 0;
        memcpy(bits, x + b * BLOCK_SIZE, sizeof bits);
        for (int i = 0; i < BLOCK_SIZE; i++) {
            int32_t magnitude = bits[i] & 0x7FFFFFFF;
            amax = magnitude > amax ? magnitude : amax;
        }
        int32_t scale = (amax < 0x7F800000 ? (amax + carry) >> 23 : 0) - 2;
        if (scale < LOWEST_SCALE + is_mse) {
            block_quantize_rare(bits, rule, codes, &scales[b]);
            continue;
        }
        if (scale > HIGHEST_SCALE) scale = HIGHEST_SCALE;
        if (is_mse) scale = best_scale(bits, scale);
        scales[b] = (uint8_t)scale;
        encode_f32(bits, scale, codes);
    }
}

static void widen(const uint16_t *x, int32_t *bits)
{
    for (int i = 0; i < BLOCK_SIZE; i++) bits[i] = (int32_t)((uint32_t)x[i] << 16);
}

static int16_t largest_bf16(const uint16_t *x)
{
    int16_t amax = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int16_t magnitude = (int16_t)(x[i] & 0x7FFF);
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

static void from_bf16(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    enum { AT_ONCE = 16 };
    int32_t carry = block_carry(rule) >> 16, is_mse = rule == MOE4_SCALE_MSE;
    for (int64_t first = 0; first < n_blocks; first += AT_ONCE) {
        int32_t n = n_blocks - first < AT_ONCE ? (int32_t)(n_blocks - first) : AT_ONCE, chosen[AT_ONCE];
        for (int32_t b = 0; b < n; b++) {
            int32_t amax = largest_bf16(x + b * BLOCK_SIZE);
            chosen[b] = (amax < 0x7F80 ? (amax + carry) >> 7 : 0) - 2;
            if (chosen[b] > HIGHEST_SCALE) chosen[b] = HIGHEST_SCALE;
        }
        for (int32_t b = 0; b < n; b++, x += BLOCK_SIZE, codes += BLOCK_BYTES, scales++) {
            int32_t bits[BLOCK_SIZE], scale = chosen[b];
            if (scale < LOWEST_SCALE + is_mse) {
                widen(x, bits);
                block_quantize_rare(bits, rule, codes, scales);
                continue;
            }
            if (is_mse) {
                widen(x, bits);
                scale = best_scale(bits, scale);
            }
            *scales = (uint8_t)scale;
            encode_bf16(x, scale, codes);
        }
    }
}

const struct block_kernels BLOCK_KERNELS = {from_f32, from_bf16};
