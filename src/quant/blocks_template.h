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
    for (int j = 0; j < BLOCK_BYTES; j++) {
        uint32_t pair;
        memcpy(&pair, code + 2 * j, sizeof pair);
        codes[j] = (uint8_t)(pair | pair >> 12);
    }
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

/* Squared error of a block under a scale, in units of 2^(2*unit-254): the bits are moved to the unit, the candidate is
 * 2^above times that.  The order of summation is fixed. */
static float squared_error(const int32_t *bits, int32_t unit, int32_t above)
{
    float sums[N_CHAINS] = {0}, factor = above < 0 ? 0.5f : (float)(1 << above);
    int32_t shift = (unit - UNIT) * (1 << 23);
    for (int half = 0; half < BLOCK_SIZE; half += N_CHAINS)
        for (int c = 0; c < N_CHAINS; c++) {
            int32_t moved = (bits[half + c] & 0x7FFFFFFF) - shift;
            float y = f32_from_bits((uint32_t)(moved > 0 ? moved : 0));
            /* Adding 1.5 * 2^23 steps rounds to a step; steps are 1/2 below 2, 1 below 4, then 2. */
            float step = y < 2 * factor ? 0.5f * factor : y < 4 * factor ? factor : 2 * factor;
            float code = y + step * 0x1.8p23f - step * 0x1.8p23f;
            float error = y - (code < 6 * factor ? code : 6 * factor);
            sums[c] += error * error;
        }
    for (int n = N_CHAINS / 2; n > 0; n /= 2)
        for (int c = 0; c < n; c++) sums[c] += sums[c + n];
    return sums[0];
}

/* The best of half, once and twice FLOOR's scale.  A coarser one than twice is never better: all of its magnitudes
 * below amax are among those of twice.  A finer one than half loses more on the largest element alone than 31 others
 * can win. */
static int32_t best_scale(const int32_t *bits, int32_t floor)
{
    int32_t best = floor;
    float least = squared_error(bits, floor, 0);
    static const int32_t others[] = {1, -1};
    for (int i = 0; i < 2; i++) {
        float error = squared_error(bits, floor, others[i]);
        if (error < least) {
            least = error;
            best = floor + others[i];
        }
    }
    return best;
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
        if (is_mse) scale = best_scale(bits, scale);
        scales[b] = (uint8_t)scale;
        encode_f32(bits, scale, codes);
    }
}

static void widen(const uint16_t *x, int32_t *bits)
{
    for (int i = 0; i < BLOCK_SIZE; i++) bits[i] = (int32_t)((uint32_t)x[i] << 16);
}

static void from_bf16(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    int32_t carry = block_carry(rule) >> 16, is_mse = rule == MOE4_SCALE_MSE;
    for (int64_t b = 0; b < n_blocks; b++, x += BLOCK_SIZE, codes += BLOCK_BYTES) {
        int32_t bits[BLOCK_SIZE];
        int16_t amax = 0;
        for (int i = 0; i < BLOCK_SIZE; i++) {
            int16_t magnitude = (int16_t)(x[i] & 0x7FFF);
            amax = magnitude > amax ? magnitude : amax;
        }
        int32_t scale = (amax < 0x7F80 ? (amax + carry) >> 7 : 0) - 2;
        if (scale < LOWEST_SCALE + is_mse) {
            widen(x, bits);
            block_quantize_rare(bits, rule, codes, &scales[b]);
            continue;
        }
        if (is_mse) {
            widen(x, bits);
            scale = best_scale(bits, scale);
        }
        scales[b] = (uint8_t)scale;
        encode_bf16(x, scale, codes);
    }
}

const struct block_kernels BLOCK_KERNELS = {from_f32, from_bf16};
