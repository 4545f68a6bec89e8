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

enum { LOWEST_SCALE = 3, UNIT = 127, N_CHAINS = 16, FIRST_BIT = 0x3F80 - 2 * 64 /* of bf16: 1 is code 2 */ };

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
        /* From 1 up the codes are the magnitudes of one bit of mantissa, in a row: y rounds to one of them, or to 6
         * from above it.  Below, the limits are .25 and .75. */
        int16_t y = (int16_t)((x[i] & 0x7FFF) - shift);
        int16_t rounded = (int16_t)((int16_t)(y + (0x1F - FIRST_BIT) + (y >> 6 & 1)) >> 6);
        int16_t low = (int16_t)((y > 0x3E80) + (y >= 0x3F40)), high = rounded < 7 ? rounded : 7;
        code[i] = (int16_t)((low > high ? low : high) | (x[i] >> 12 & 8));
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

/* The square of what is lost of y, a magnitude over the unit, under another scale, whose code of 6 is `most`. exponent:
 * y's bits without its mantissa, or those of that scale if they are more. */
static float lost(float y, int32_t exponent, float most)
{
    /* Adding 1.5 * 2^23 steps rounds to a step, half of y's power of two, or of the scale. */
    float steps = f32_from_bits((uint32_t)(exponent + (22 << 23 | 0x400000)));
    float code = y + steps - steps;
    float error = y - (code < most ? code : most);
    return error * error;
}

/* Halves, quarters and so on are added; lengths that compilers see. */
static inline float chains_sum(float *sums)
{
    for (int c = 0; c < 8; c++) sums[c] += sums[c + 8];
    for (int c = 0; c < 4; c++) sums[c] += sums[c + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Squared errors of a block under twice, once and half a scale, in units of 2^(2*scale-254): the bits are moved to the
 * scale.  The order of summation is fixed. */
static inline void squared_errors(const int32_t *bits, int32_t scale, float *twice, float *once, float *half)
{
    enum { HALF = 126 << 23, ONCE = 127 << 23, TWICE = 128 << 23 }; /* f32 bits */
    float sums[3][N_CHAINS] = {{0}};
    int32_t shift = (scale - UNIT) * (1 << 23);
    for (int i = 0; i < BLOCK_SIZE; i += N_CHAINS)
        for (int c = 0; c < N_CHAINS; c++) {
            int32_t moved = (bits[i + c] & 0x7FFFFFFF) - shift;
            moved = moved > 0 ? moved : 0;
            int32_t exponent = moved & 0x7F800000;
            float y = f32_from_bits((uint32_t)moved);
            sums[0][c] += lost(y, exponent > TWICE ? exponent : TWICE, 12.0f);
            sums[1][c] += lost(y, exponent > ONCE ? exponent : ONCE, 6.0f);
            sums[2][c] += lost(y, exponent > HALF ? exponent : HALF, 3.0f);
        }
    *twice = chains_sum(sums[0]);
    *once = chains_sum(sums[1]);
    *half = chains_sum(sums[2]);
}

/* The best of half, once and twice FLOOR's scale.  A coarser one than twice is never better: all of its magnitudes
 * below amax are among those of twice.  A finer one than half loses more on the largest element alone than 31 others
 * can win.  There is none above HIGHEST_SCALE. */
__attribute__((noinline)) static int32_t best_scale(const int32_t *bits, int32_t floor)
{
    float twice, once, half;
    squared_errors(bits, floor, &twice, &once, &half);
    /* Without a branch, which nobody could predict. */
    int32_t is_twice = (twice < once) & (floor < HIGHEST_SCALE);
    int32_t is_half = (half < once) & ((half < twice) | !is_twice);
    return floor + is_twice - is_half * (1 + is_twice);
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

/* ---- Loss -------------------------------------------------------------------------------------------------------- */

/* Sums of up to LOSS_BLOCKS blocks, lane by lane, in units of the largest of their scales. */
struct lanes {
    float squared[BLOCK_BYTES], error[BLOCK_BYTES];
    int16_t saturated[BLOCK_SIZE];
};

/* The magnitudes that codes stand for, as bf16. */
static inline void magnitudes_of(const uint8_t *codes, uint16_t *magnitude)
{
    uint32_t pairs[BLOCK_BYTES];
    int16_t code[BLOCK_SIZE];
    for (int j = 0; j < BLOCK_BYTES; j++) pairs[j] = (codes[j] | (uint32_t)codes[j] << 12) & 0x00070007;
    memcpy(code, pairs, sizeof code);
    for (int i = 0; i < BLOCK_SIZE; i++) /* 0, 0x3F00, 0x3F80, 0x3FC0, 0x4000 ... 0x40C0 */
        magnitude[i] = (uint16_t)(code[i] > 0 ? code[i] * 0x40 + (code[i] > 1 ? 0x3F00 : 0x3EC0) : 0);
}

/* Adds the squares of 16 pairs of magnitudes and of what their codes lack, times `weight`. */
static inline void lanes_add(struct lanes *lanes, const float *even, const float *odd, const uint16_t *magnitude,
                             float weight)
{
    uint32_t pairs[BLOCK_BYTES];
    memcpy(pairs, magnitude, sizeof pairs);
    for (int j = 0; j < BLOCK_BYTES; j++) {
        float first = even[j] - f32_from_bits(pairs[j] << 16), second = odd[j] - f32_from_bits(pairs[j] & 0xFFFF0000);
        lanes->error[j] += (first * first + second * second) * weight;
        lanes->squared[j] += (even[j] * even[j] + odd[j] * odd[j]) * weight;
    }
}

static inline void add_bf16(struct lanes *lanes, const uint16_t *x, const uint8_t *codes, int32_t scale, float weight)
{
    int16_t shift = (int16_t)((scale - UNIT) * 128);
    uint16_t y[BLOCK_SIZE], magnitude[BLOCK_SIZE];
    uint32_t pairs[BLOCK_BYTES];
    float even[BLOCK_BYTES], odd[BLOCK_BYTES];
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int16_t moved = (int16_t)((x[i] & 0x7FFF) - shift);
        y[i] = (uint16_t)(moved > NOTHING >> 16 ? moved : 0);
        lanes->saturated[i] = (int16_t)(lanes->saturated[i] + (moved > 0x40C0));
    }
    memcpy(pairs, y, sizeof pairs);
    for (int j = 0; j < BLOCK_BYTES; j++) {
        even[j] = f32_from_bits(pairs[j] << 16);
        odd[j] = f32_from_bits(pairs[j] & 0xFFFF0000);
    }
    magnitudes_of(codes, magnitude);
    lanes_add(lanes, even, odd, magnitude, weight);
}

static inline void add_f32(struct lanes *lanes, const float *x, const uint8_t *codes, int32_t scale, float weight)
{
    int32_t shift = (scale - UNIT) * (1 << 23), bits[BLOCK_SIZE];
    uint16_t magnitude[BLOCK_SIZE];
    float even[BLOCK_BYTES], odd[BLOCK_BYTES];
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t moved = (bits[i] & 0x7FFFFFFF) - shift;
        bits[i] = moved > NOTHING ? moved : 0;
        lanes->saturated[i] = (int16_t)(lanes->saturated[i] + (moved > 0x40C00000));
    }
    for (int j = 0; j < BLOCK_BYTES; j++) {
        even[j] = f32_from_bits((uint32_t)bits[2 * j]);
        odd[j] = f32_from_bits((uint32_t)bits[2 * j + 1]);
    }
    magnitudes_of(codes, magnitude);
    lanes_add(lanes, even, odd, magnitude, weight);
}

/* The sums of all lanes, in a fixed order, to the loss. */
static void lanes_close(struct lanes *lanes, int32_t scale, moe4_mxfp4_loss *loss)
{
    int32_t saturated = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) saturated += lanes->saturated[i];
    double unit = block_unit(scale);
    loss->squared += unit * unit * (double)chains_sum(lanes->squared);
    loss->squared_error += unit * unit * (double)chains_sum(lanes->error);
    loss->n_saturated += saturated;
}

/* 2^(2 * (scale - largest)); 0 where that is below the range. */
static float weight_of(int32_t scale, int32_t largest)
{
    int32_t exponent = UNIT - 2 * (largest - scale);
    return f32_from_bits((uint32_t)(exponent > 0 ? exponent : 0) << 23);
}

/* The blocks that are measured here, and their weights in units of the largest scale, which is returned. */
struct measured {
    int32_t n, block[LOSS_BLOCKS], scale[LOSS_BLOCKS];
    float weight[LOSS_BLOCKS];
};

static int32_t measured_choose(const uint8_t *scales, int32_t n_blocks, struct measured *chosen)
{
    int32_t largest = 0;
    chosen->n = 0;
    for (int32_t b = 0; b < n_blocks; b++) {
        if (scales[b] < LOWEST_MEASURED || scales[b] == SCALE_NAN) continue;
        chosen->block[chosen->n] = b;
        chosen->scale[chosen->n++] = scales[b];
        largest = scales[b] > largest ? scales[b] : largest;
    }
    for (int32_t i = 0; i < chosen->n; i++) chosen->weight[i] = weight_of(chosen->scale[i], largest);
    return largest;
}

static void measure_f32(const float *x, const uint8_t *codes, const uint8_t *scales, int32_t n_blocks,
                        moe4_mxfp4_loss *loss)
{
    struct lanes lanes = {{0}, {0}, {0}};
    struct measured chosen;
    int32_t largest = measured_choose(scales, n_blocks, &chosen);
    for (int32_t i = 0; i < chosen.n; i++)
        add_f32(&lanes, x + chosen.block[i] * BLOCK_SIZE, codes + chosen.block[i] * BLOCK_BYTES, chosen.scale[i],
                chosen.weight[i]);
    lanes_close(&lanes, largest, loss);
}

static void measure_bf16(const uint16_t *x, const uint8_t *codes, const uint8_t *scales, int32_t n_blocks,
                         moe4_mxfp4_loss *loss)
{
    struct lanes lanes = {{0}, {0}, {0}};
    struct measured chosen;
    int32_t largest = measured_choose(scales, n_blocks, &chosen);
    for (int32_t i = 0; i < chosen.n; i++)
        add_bf16(&lanes, x + chosen.block[i] * BLOCK_SIZE, codes + chosen.block[i] * BLOCK_BYTES, chosen.scale[i],
                 chosen.weight[i]);
    lanes_close(&lanes, largest, loss);
}

const struct block_kernels BLOCK_KERNELS = {from_f32, from_bf16, measure_f32, measure_bf16};
