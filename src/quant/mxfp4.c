/* f32, bf16 <-> MXFP4, in integer arithmetic on the bits: neither the host's rounding mode nor its treatment of
 * subnormals changes anything.  Blocks of ordinary size take the loops of blocks_template.h; the others, and the
 * inverse, are here. */
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/mxfp4.h"
#include "cpu/fpenv.h"
#include "moe4/quant.h"
#include "quant/blocks.h"

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

/* EVEN carries from a mantissa of 1.75 up, CEIL from just above 1.5 = 6/4: amax/6 <= 2^s is the same as
 * amax <= 1.5 * 2^(s+2). */
int32_t block_carry(moe4_scale_rule rule)
{
    static const int32_t carries[] = {
        [MOE4_SCALE_EVEN] = 0x200000, [MOE4_SCALE_FLOOR] = 0, [MOE4_SCALE_CEIL] = 0x3FFFFF, [MOE4_SCALE_MSE] = 0};
    return carries[rule];
}

static void encode(const int32_t *bits, int32_t scale, uint8_t *codes)
{
    int32_t code[BLOCK_SIZE], limits[N_MIDPOINTS];
    for (int i = 0; i < N_MIDPOINTS; i++) limits[i] = scaled(midpoints[i].bits, scale) - midpoints[i].goes_up;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE, above = 0;
        for (int m = 0; m < N_MIDPOINTS; m++) above += magnitude > limits[m];
        code[i] = above | (int32_t)((uint32_t)bits[i] >> 28 & 8);
    }
    for (int j = 0; j < BLOCK_BYTES; j++) codes[j] = (uint8_t)(code[2 * j] | code[2 * j + 1] << 4);
}

/* Squared error of a block encoded under a scale, over 2^-254: in double and exact but for the sum. */
static double squared_error(const int32_t *bits, int32_t scale, const uint8_t *codes)
{
    double sum = 0, step = ldexp(1, scale);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        double magnitude = ldexp((double)f32_from_bits((uint32_t)(bits[i] & MAGNITUDE)), UNIT_SCALE);
        double error = magnitude - step * (double)e2m1_to_f32(mxfp4_code(codes, i) & 7);
        sum += error * error;
    }
    return sum;
}

/* The scale of least error: half, once or twice 2^(floor-127), as far as there is such a byte. */
static int32_t best_scale(const int32_t *bits, int32_t floor)
{
    uint8_t codes[BLOCK_BYTES];
    int32_t best = floor;
    double least = INFINITY;
    uint32_t host = fpenv_enter();
    for (int32_t scale = floor > 0 ? floor - 1 : 0; scale <= floor + 1; scale++) {
        encode(bits, scale, codes);
        double error = squared_error(bits, scale, codes);
        if (error < least || (error == least && scale == floor)) {
            least = error;
            best = scale;
        }
    }
    fpenv_leave(host);
    return best;
}

void block_quantize_rare(const int32_t *bits, moe4_scale_rule rule, uint8_t *codes, uint8_t *scale)
{
    int32_t amax = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        amax = magnitude > amax ? magnitude : amax;
    }
    if (amax == 0 || amax >= INFINITY_BITS) {
        *scale = amax ? SCALE_NAN : 0;
        memset(codes, 0, BLOCK_BYTES);
        return;
    }
    int32_t exponent = ((amax + block_carry(rule)) >> MANTISSA_BITS) - 2;
    exponent = exponent > 0 ? exponent : 0;
    if (rule == MOE4_SCALE_MSE) exponent = best_scale(bits, exponent);
    *scale = (uint8_t)exponent;
    encode(bits, exponent, codes);
}

double block_unit(int32_t scale)
{
    return ldexp(1, scale - UNIT_SCALE);
}

/* Counts a block, and measures it if the loops do not. */
static void block_measure(const float *x, const uint8_t *codes, uint8_t scale, moe4_mxfp4_loss *loss)
{
    double unit = block_unit(scale);
    int32_t any = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        double magnitude = fabs((double)x[i]), code = (double)e2m1_to_f32(mxfp4_code(codes, i) & 7) * unit;
        loss->squared += magnitude * magnitude;
        loss->squared_error += (magnitude - code) * (magnitude - code);
        loss->n_saturated += magnitude > 6 * unit;
        any |= code > 0;
    }
    loss->n_zero += !any;
}

static const struct block_kernels *kernels_choose(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return &blocks_avx512;
    if (__builtin_cpu_supports("avx2")) return &blocks_avx2;
#endif
    return &blocks_c;
}

void moe4_mxfp4_quantize(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales)
{
    uint32_t host = fpenv_enter();
    kernels_choose()->from_f32(x, n_blocks, rule, codes, scales);
    fpenv_leave(host);
}

void moe4_mxfp4_quantize_bf16(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                              uint8_t *scales)
{
    uint32_t host = fpenv_enter();
    kernels_choose()->from_bf16(x, n_blocks, rule, codes, scales);
    fpenv_leave(host);
}

/* ---- With the loss ----------------------------------------------------------------------------------------------- */

/* What the loops do not measure, and the counts. */
static void measure_rest(const void *x, int32_t is_bf16, const uint8_t *codes, const uint8_t *scales, int64_t n_blocks,
                         moe4_mxfp4_loss *loss)
{
    loss->n_blocks += n_blocks;
    for (int64_t b = 0; b < n_blocks; b++) {
        float wide[BLOCK_SIZE];
        if (scales[b] == SCALE_NAN) loss->n_nan++;
        if (scales[b] >= LOWEST_MEASURED) continue;
        for (int64_t i = 0, at = b * BLOCK_SIZE; i < BLOCK_SIZE; i++, at++)
            wide[i] = is_bf16 ? bf16_to_f32(((const uint16_t *)x)[at]) : ((const float *)x)[at];
        block_measure(wide, codes + b * BLOCK_BYTES, scales[b], loss);
    }
}

/* LOSS_BLOCKS at a time, so that what is measured is still in the first-level cache. */
static void quantize_measured(const void *x, int is_bf16, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                              uint8_t *scales, moe4_mxfp4_loss *loss)
{
    const struct block_kernels *kernels = kernels_choose();
    const size_t block_bytes = BLOCK_SIZE * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
    uint32_t host = fpenv_enter();
    for (int64_t rest = n_blocks, n; rest > 0; rest -= n) {
        n = rest < LOSS_BLOCKS ? rest : LOSS_BLOCKS;
        if (is_bf16) {
            kernels->from_bf16(x, n, rule, codes, scales);
            kernels->measure_bf16(x, codes, scales, (int32_t)n, loss);
        } else {
            kernels->from_f32(x, n, rule, codes, scales);
            kernels->measure_f32(x, codes, scales, (int32_t)n, loss);
        }
        measure_rest(x, is_bf16, codes, scales, n, loss);
        x = (const char *)x + (size_t)n * block_bytes;
        codes += n * BLOCK_BYTES;
        scales += n;
    }
    fpenv_leave(host);
}

void moe4_mxfp4_quantize_measured(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                  uint8_t *scales, moe4_mxfp4_loss *loss)
{
    quantize_measured(x, 0, n_blocks, rule, codes, scales, loss);
}

void moe4_mxfp4_quantize_bf16_measured(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                       uint8_t *scales, moe4_mxfp4_loss *loss)
{
    quantize_measured(x, 1, n_blocks, rule, codes, scales, loss);
}

/* ---- The inverse ------------------------------------------------------------------------------------------------- */

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
