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

static void test_every_isa(void **state)
{
    static const struct block_kernels *const all[] = {
#if defined(__x86_64__)
        &blocks_avx2,
        &blocks_avx512,
#endif
        &blocks_c
    };
    static uint8_t codes[2][N_BLOCKS * 16], scales[2][N_BLOCKS];
    (void)state;
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        for (int rule = 0; rule < N_RULES && is_supported(all[k]); rule++)
            for (int wide = 0; wide < 2; wide++) {
                moe4_mxfp4_quantize(x32, N_BLOCKS, (moe4_scale_rule)rule, codes[0], scales[0]);
                if (wide)
                    all[k]->from_f32(x32, N_BLOCKS, (moe4_scale_rule)rule, codes[1], scales[1]);
                else
                    all[k]->from_bf16(x16, N_BLOCKS, (moe4_scale_rule)rule, codes[1], scales[1]);
                assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
                assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
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
        cmocka_unit_test(test_mse_is_best),  cmocka_unit_test(test_mse_takes_all_three),
        cmocka_unit_test(test_huge_weights), cmocka_unit_test(test_mse_in_other_modes),
        cmocka_unit_test(test_mxfp8),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
