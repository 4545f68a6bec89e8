/* The quantisers' loops: every instruction set and both entry points give the same bytes, MSE is the best there is, and
 * MXFP8 is what the oracle says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "moe4/quant.h"
#include "quant/blocks.h"
#include "ref.h"

enum { N_BLOCKS = 2048, N_RULES = 4 };

static uint16_t x16[N_BLOCKS * 32];
static float x32[N_BLOCKS * 32];

static uint64_t random_state = 7;
static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* bf16 blocks over the whole range of exponents, a few of zeros, a few not finite. */
static int fill(void **state)
{
    (void)state;
    for (int b = 0; b < N_BLOCKS; b++) {
        uint32_t top = b % 16 ? random_bits() % 255 : 254, spread = 1 + random_bits() % 10;
        for (int i = b * 32; i < b * 32 + 32; i++) {
            uint32_t below = random_bits() % spread, exponent = top > below ? top - below : 0;
            x16[i] = (uint16_t)(exponent << 7 | (random_bits() & 0x807Fu));
            if (b % 5 == 0 && i % 5 == 0) x16[i] = (uint16_t)(i << 15);
            if (b % 7 == 0 && i % 3 == 0) x16[i] &= 0x807F; /* subnormal */
            if (b % 61 == 0) x16[i] = (uint16_t)(i << 15);
        }
        if (b % 67 == 0) x16[b * 32 + b % 32] = b % 2 ? 0x7F80 : 0xFFC1;
    }
    for (int i = 0; i < N_BLOCKS * 32; i++) x32[i] = bf16_to_f32(x16[i]);
    return 0;
}

static void test_bf16_is_f32(void **state)
{
    static uint8_t codes[2][N_BLOCKS * 16], scales[2][N_BLOCKS];
    (void)state;
    for (int rule = 0; rule < N_RULES; rule++) {
        moe4_mxfp4_quantize(x32, N_BLOCKS, (moe4_scale_rule)rule, codes[0], scales[0]);
        moe4_mxfp4_quantize_bf16(x16, N_BLOCKS, (moe4_scale_rule)rule, codes[1], scales[1]);
        assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
        assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
    }
}

static int is_supported(const struct block_kernels *kernels)
{
#if defined(__x86_64__)
    if (kernels == &blocks_avx512) return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (kernels == &blocks_avx2) return __builtin_cpu_supports("avx2");
#endif
    return kernels == &blocks_c;
}

static const struct block_kernels *const every_isa[] = {
#if defined(__x86_64__)
    &blocks_avx2, &blocks_avx512,
#endif
    &blocks_c};

static void test_every_isa(void **state)
{
    static uint8_t codes[2][N_BLOCKS * 16], scales[2][N_BLOCKS];
    (void)state;
    for (size_t k = 0; k < sizeof every_isa / sizeof *every_isa; k++)
        for (int rule = 0; rule < N_RULES && is_supported(every_isa[k]); rule++)
            for (int wide = 0; wide < 2; wide++) {
                moe4_mxfp4_quantize(x32, N_BLOCKS, (moe4_scale_rule)rule, codes[0], scales[0]);
                if (wide)
                    every_isa[k]->from_f32(x32, N_BLOCKS, (moe4_scale_rule)rule, codes[1], scales[1]);
                else
                    every_isa[k]->from_bf16(x16, N_BLOCKS, (moe4_scale_rule)rule, codes[1], scales[1]);
                assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
                assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
            }
}

/* ---- Loss -------------------------------------------------------------------------------------------------------- */

/* What blocks lose, by definition. */
static moe4_mxfp4_loss defined_loss(const float *x, const uint8_t *codes, const uint8_t *scales, int64_t n_blocks)
{
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    moe4_mxfp4_loss loss = {.n_blocks = n_blocks};
    for (int64_t b = 0; b < n_blocks; b++) {
        int any = 0;
        loss.n_nan += scales[b] == 255;
        for (int64_t i = b * 32; i < b * 32 + 32 && scales[b] != 255; i++) {
            int code = codes[i / 2] >> 4 * (i % 2) & 7;
            double unit = ldexp(1, scales[b] - 127), value = fabs((double)x[i]);
            loss.squared += value * value;
            loss.squared_error += pow(value - magnitudes[code] * unit, 2);
            loss.n_saturated += value > 6 * unit;
            any |= code;
        }
        loss.n_zero += !any && scales[b] != 255;
    }
    return loss;
}

static void assert_near(double got, double wanted)
{
    if (fabs(got - wanted) > 1e-5 * wanted) fail_msg("%.12g, not %.12g", got, wanted);
}

/* From single blocks, whose sums nothing larger hides, to all of them. */
static void test_loss(void **state)
{
    static const int64_t counts[] = {0, 1, 2, 31, 32, 33, N_BLOCKS};
    static uint8_t codes[3][N_BLOCKS * 16], scales[3][N_BLOCKS];
    (void)state;
    for (int rule = 0; rule < N_RULES; rule++)
        for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
            for (int64_t n = counts[c], first = 0; first + n <= N_BLOCKS; first += n ? n : N_BLOCKS + 1) {
                moe4_mxfp4_loss loss = {0}, same = {0};
                const float *x = x32 + first * 32;
                moe4_mxfp4_quantize(x, n, (moe4_scale_rule)rule, codes[0], scales[0]);
                moe4_mxfp4_quantize_measured(x, n, (moe4_scale_rule)rule, codes[1], scales[1], &loss);
                moe4_mxfp4_quantize_bf16_measured(x16 + first * 32, n, (moe4_scale_rule)rule, codes[2], scales[2],
                                                  &same);
                for (int k = 1; k < 3; k++) {
                    assert_memory_equal(codes[0], codes[k], (size_t)n * 16);
                    assert_memory_equal(scales[0], scales[k], (size_t)n);
                }
                moe4_mxfp4_loss wanted = defined_loss(x, codes[0], scales[0], n);
                assert_memory_equal(&loss, &same, sizeof loss);
                assert_near(loss.squared, wanted.squared);
                assert_near(loss.squared_error, wanted.squared_error);
                assert_int_equal(loss.n_blocks, wanted.n_blocks);
                assert_int_equal(loss.n_saturated, wanted.n_saturated);
                assert_int_equal(loss.n_zero, wanted.n_zero);
                assert_int_equal(loss.n_nan, wanted.n_nan);
            }
}

/* To what is there already, and the same sums in every instruction set. */
static void test_loss_of_every_isa(void **state)
{
    static uint8_t codes[N_BLOCKS * 16], scales[N_BLOCKS];
    (void)state;
    for (int rule = 0; rule < N_RULES; rule++) {
        moe4_mxfp4_loss sums[2] = {{.n_saturated = 5}, {.n_saturated = 5}};
        moe4_mxfp4_quantize(x32, N_BLOCKS, (moe4_scale_rule)rule, codes, scales);
        for (size_t k = 0; k < sizeof every_isa / sizeof *every_isa; k++) {
            if (!is_supported(every_isa[k])) continue;
            moe4_mxfp4_loss loss = {.n_saturated = 5}, same = loss;
            for (int64_t b = 0; b < N_BLOCKS; b += LOSS_BLOCKS) {
                every_isa[k]->measure_f32(x32 + b * 32, codes + b * 16, scales + b, LOSS_BLOCKS, &loss);
                every_isa[k]->measure_bf16(x16 + b * 32, codes + b * 16, scales + b, LOSS_BLOCKS, &same);
            }
            if (!sums[0].squared) sums[0] = sums[1] = loss;
            assert_memory_equal(&loss, &sums[0], sizeof loss);
            assert_memory_equal(&same, &sums[1], sizeof same);
            assert_true(loss.n_saturated >= 5 && loss.squared > 0);
        }
    }
}

/* ---- MSE --------------------------------------------------------------------------------------------------------- */

/* Sum of squared errors of a block against 2^(byte-127) times the nearest magnitudes, over the square of that of
 * `unit`. */
static double error_under(const float *x, int byte, int unit)
{
    static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    double sum = 0;
    for (int i = 0; i < 32; i++) {
        double y = ldexp(fabs((double)x[i]), 127 - unit), least = INFINITY;
        for (int m = 0; m < 8 && ldexp(magnitudes[m], byte - 127) <= (double)FLT_MAX; m++)
            least = fmin(least, fabs(y - ldexp(magnitudes[m], byte - unit)));
        sum += least * least;
    }
    return sum;
}

/* Against every scale there is: so also against those of the other rules. */
static void check_mse(const float *x)
{
    uint8_t codes[16], scale;
    float back[32];
    double got, sum = 0;
    moe4_mxfp4_quantize(x, 1, MOE4_SCALE_MSE, codes, &scale);
    if (scale == 255) return;
    moe4_mxfp4_dequantize(codes, &scale, 1, back);
    got = error_under(x, scale, scale);
    for (int i = 0; i < 32; i++) {
        double error = ldexp((double)x[i], 127 - scale) - ldexp((double)back[i], 127 - scale);
        sum += error * error; /* the codes are those of that scale */
    }
    assert_true(sum <= got * (1 + 1e-9));
    for (int byte = scale > 6 ? scale - 6 : 0; byte <= scale + 6 && byte < 255; byte++)
        assert_true(got <= error_under(x, byte, scale) * (1 + 1e-5));
}

static void test_mse_is_best(void **state)
{
    (void)state;
    for (int b = 0; b < N_BLOCKS; b++)
        if (b % 61) check_mse(x32 + b * 32); /* blocks of zeros have no best scale */
}

/* Blocks whose best scale is half of FLOOR's, FLOOR's and twice that. */
static void test_mse_takes_all_three(void **state)
{
    uint8_t codes[16], scale;
    float x[32];
    (void)state;
    for (int i = 0; i < 32; i++) x[i] = 0.25f;
    x[0] = 4;
    check_mse(x);
    moe4_mxfp4_quantize(x, 1, MOE4_SCALE_MSE, codes, &scale);
    assert_int_equal(scale, 126);
    x[0] = 6;
    moe4_mxfp4_quantize(x, 1, MOE4_SCALE_MSE, codes, &scale);
    assert_int_equal(scale, 127);
    for (int i = 0; i < 32; i++) x[i] = 7.9f;
    moe4_mxfp4_quantize(x, 1, MOE4_SCALE_MSE, codes, &scale);
    assert_int_equal(scale, 128);
}

/* Up to the largest floats: what comes back is finite by every rule, and never nearer by another than by MSE. */
static void test_huge_weights(void **state)
{
    (void)state;
    for (int n = 0; n < 20000; n++) {
        float x[32], back[32];
        double errors[N_RULES] = {0};
        for (int i = 0; i < 32; i++) {
            uint32_t exponent = 254 - random_bits() % (1 + (uint32_t)n % 6);
            x[i] = f32_from_bits((random_bits() & 0x807FFFFF) | exponent << 23);
        }
        x[n % 32] = f32_from_bits(0x7F000000 | (random_bits() & 0x7FFFFF));
        for (int rule = 0; rule < N_RULES; rule++) {
            uint8_t codes[16], scale;
            moe4_mxfp4_quantize(x, 1, (moe4_scale_rule)rule, codes, &scale);
            moe4_mxfp4_dequantize(codes, &scale, 1, back);
            for (int i = 0; i < 32; i++) {
                double error = ldexp((double)x[i] - (double)back[i], -125);
                assert_true(isfinite(back[i]));
                errors[rule] += error * error;
            }
        }
        for (int rule = 0; rule < N_RULES; rule++) assert_true(errors[MOE4_SCALE_MSE] <= errors[rule] * (1 + 1e-5));
    }
}

static void test_mse_in_other_modes(void **state)
{
    static uint8_t codes[2][N_BLOCKS * 16], scales[2][N_BLOCKS];
    (void)state;
    moe4_mxfp4_quantize(x32, N_BLOCKS, MOE4_SCALE_MSE, codes[0], scales[0]);
    fesetround(FE_UPWARD);
    moe4_mxfp4_quantize(x32, N_BLOCKS, MOE4_SCALE_MSE, codes[1], scales[1]);
    int mode = fegetround();
    fesetround(FE_TONEAREST);
    assert_int_equal(mode, FE_UPWARD);
    assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
    assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
}

/* ---- MXFP8 ------------------------------------------------------------------------------------------------------- */

static void test_mxfp8(void **state)
{
    static uint8_t codes[N_BLOCKS * 32], scales[N_BLOCKS], wanted[32];
    static uint16_t back[N_BLOCKS * 32];
    (void)state;
    moe4_mxfp8_quantize(x16, N_BLOCKS, codes, scales);
    moe4_mxfp8_dequantize(codes, scales, N_BLOCKS, back);
    for (int b = 0; b < N_BLOCKS; b++) {
        double x[32];
        uint8_t scale;
        for (int i = 0; i < 32; i++) x[i] = (double)x32[b * 32 + i];
        ref_quantize_mxfp8(x, 32, wanted, &scale);
        assert_int_equal(scales[b], scale);
        for (int i = 0; i < 32; i++) /* under byte 0 all are zeros, of either sign */
            assert_int_equal(codes[b * 32 + i] & (scale ? 0xFF : 0x7F), wanted[i]);
        for (int i = 0; i < 32; i++) {
            double value = (double)bf16_to_f32(back[b * 32 + i]);
            if (scale == 255) assert_true(isnan(value));
            if (scale >= 10 && scale <= 246) /* within the half step of the coarsest code */
                assert_true(fabs(value - x[i]) <= ldexp(16, (int)scale - 127));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bf16_is_f32),  cmocka_unit_test(test_every_isa),
        cmocka_unit_test(test_loss),         cmocka_unit_test(test_loss_of_every_isa),
        cmocka_unit_test(test_mse_is_best),  cmocka_unit_test(test_mse_takes_all_three),
        cmocka_unit_test(test_huge_weights), cmocka_unit_test(test_mse_in_other_modes),
        cmocka_unit_test(test_mxfp8),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
