/* The MXFP4 quantiser and its inverse against slow definitions in double precision. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "moe4/quant.h"

static const double magnitudes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
/* MSE is the last: it has no scale by definition of amax alone. */
static const moe4_scale_rule rules[4] = {MOE4_SCALE_FLOOR, MOE4_SCALE_EVEN, MOE4_SCALE_CEIL, MOE4_SCALE_MSE};

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* ---- The definitions --------------------------------------------------------------------------------------------- */

/* The scale byte for a largest magnitude, finite and above zero. */
static int defined_scale(double amax, moe4_scale_rule rule)
{
    int exponent;
    double mantissa = 2 * frexp(amax, &exponent); /* amax = mantissa * 2^(exponent-1), 1 <= mantissa < 2 */
    int byte = exponent - 1 - 2 + 127;
    if (rule == MOE4_SCALE_EVEN && mantissa >= 1.75) byte++; /* 1.75 rounds to 2.0, the even one of 1.5 and 2.0 */
    if (rule == MOE4_SCALE_CEIL) {
        byte = 0;
        while (ldexp(6, byte - 127) < amax) byte++;
    }
    return byte < 0 ? 0 : byte > 252 ? 252 : byte; /* beyond 2^125 a code of 4 or 6 would be infinite */
}

/* The nearest code, the even one of two that are equally near; magnitudes beyond 6 stay at 6. */
static int defined_code(double x, int byte)
{
    double scaled = ldexp(fabs(x), 127 - byte);
    int best = 0;
    for (int code = 1; code < 8; code++) {
        double old = fabs(scaled - magnitudes[best]), new = fabs(scaled - magnitudes[code]);
        if (new < old || (new == old &&code % 2 == 0)) best = code;
    }
    return best | (signbit(x) ? 8 : 0);
}

static int code_of(const uint8_t *codes, int i)
{
    return codes[i / 2] >> 4 * (i % 2) & 15;
}

/* Quantises one block and compares all of it with the definitions. */
static void check_block(const float *x, moe4_scale_rule rule)
{
    uint8_t codes[16], scale;
    double amax = 0;
    for (int i = 0; i < 32; i++) amax = fmax(amax, fabs((double)x[i]));
    moe4_mxfp4_quantize(x, 1, rule, codes, &scale);
    int wanted = defined_scale(amax, rule);
    if (scale != wanted) fail_msg("rule %d, amax %a: scale %d, not %d", rule, amax, scale, wanted);
    for (int i = 0; i < 32; i++) {
        wanted = defined_code(x[i], scale);
        if (code_of(codes, i) != wanted)
            fail_msg("rule %d, scale %d, x %a: code %d, not %d", rule, scale, x[i], code_of(codes, i), wanted);
    }
}

/* ---- Decoding ---------------------------------------------------------------------------------------------------- */

static void test_decodes_everything(void **state)
{
    static uint8_t codes[256 * 16], scales[256];
    static float x[256 * 32];
    (void)state;
    for (int scale = 0; scale < 256; scale++) {
        scales[scale] = (uint8_t)scale;
        for (int j = 0; j < 16; j++) codes[scale * 16 + j] = (uint8_t)(j | (15 - j) << 4);
    }
    moe4_mxfp4_dequantize(codes, scales, 256, x);
    for (int scale = 0; scale < 255; scale++)
        for (int i = 0; i < 32; i++) {
            int code = i % 2 ? 15 - i / 2 : i / 2;
            double value = ldexp(magnitudes[code & 7], scale - 127);
            float wanted = value > FLT_MAX ? INFINITY : (float)value;
            if (to_bits(x[scale * 32 + i]) != to_bits(code & 8 ? -wanted : wanted))
                fail_msg("scale %d, code %d is %a, not %a", scale, code, x[scale * 32 + i], wanted);
        }
    for (int i = 0; i < 32; i++) assert_true(isnan(x[255 * 32 + i]));
    assert_true(x[2] == 0x1p-128f && x[4] == 0x1p-127f); /* scale byte 0: codes 1 and 2 */
}

/* Every finite block that is not zero throughout comes back as it was. */
static void test_round_trip(void **state)
{
    (void)state;
    for (int scale = 0; scale <= 252; scale++) {
        uint8_t codes[16], again[16], scale_byte = (uint8_t)scale, scale_again;
        float x[32];
        for (int j = 0; j < 16; j++) codes[j] = (uint8_t)(j | (15 - j) << 4);
        moe4_mxfp4_dequantize(codes, &scale_byte, 1, x);
        for (int r = 0; r < 3; r++) {
            moe4_mxfp4_quantize(x, 1, rules[r], again, &scale_again);
            assert_int_equal(scale_again, scale); /* the largest is 6, where all rules agree */
            assert_memory_equal(again, codes, 16);
        }
    }
}

/* ---- Rounding ---------------------------------------------------------------------------------------------------- */

/* The midpoints and one unit in the last place to either side, at every scale. */
static void test_midpoints(void **state)
{
    static const struct {
        float midpoint;
        int below, at, above;
    } cases[] = {{0.25f, 0, 0, 1}, {0.75f, 1, 2, 2}, {1.25f, 2, 2, 3}, {1.75f, 3, 4, 4},
                 {2.5f, 4, 4, 5},  {3.5f, 5, 6, 6},  {5.0f, 6, 6, 7}};
    (void)state;
    for (int scale = 3; scale <= 252; scale++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            uint8_t codes[16], scale_byte;
            float x[32] = {ldexpf(6.0f, scale - 127)}, midpoint = ldexpf(cases[i].midpoint, scale - 127);
            x[1] = from_bits(to_bits(midpoint) - 1);
            x[2] = midpoint;
            x[3] = from_bits(to_bits(midpoint) + 1);
            for (int s = 1; s <= 3; s++) x[3 + s] = -x[s];
            moe4_mxfp4_quantize(x, 1, MOE4_SCALE_EVEN, codes, &scale_byte);
            assert_int_equal(scale_byte, scale);
            const int wanted[] = {7, cases[i].below, cases[i].at, cases[i].above};
            for (int s = 0; s <= 3; s++) assert_int_equal(code_of(codes, s), wanted[s]);
            for (int s = 1; s <= 3; s++) assert_int_equal(code_of(codes, 3 + s), wanted[s] | 8);
        }
}

static void test_scale_rules(void **state)
{
    static const float maxima[8] = {6, 6.25f, 6.5f, 6.75f, 7, 7.5f, 8, 12};
    static const int wanted[3][8] = {{1, 1, 1, 1, 1, 1, 2, 2}, {1, 1, 1, 1, 2, 2, 2, 2}, {1, 2, 2, 2, 2, 2, 2, 2}};
    (void)state;
    for (int r = 0; r < 3; r++)
        for (int m = 0; m < 8; m++)
            for (int shift = -120; shift <= 120; shift += 8) {
                uint8_t codes[16], scale;
                float x[32] = {0};
                x[31] = ldexpf(-maxima[m], shift);
                moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
                assert_int_equal(scale, 127 + shift + wanted[r][m] - 1);
                check_block(x, rules[r]);
            }
}

/* Where each rule steps: the largest magnitude that keeps a scale, and the next number. */
static void test_scale_steps(void **state)
{
    static const float last[3] = {0x1.fffffep2f, 0x1.bffffep2f, 6.0f}; /* floor, even, ceil; scale 1 */
    (void)state;
    for (int r = 0; r < 3; r++)
        for (int byte = 1; byte <= 251; byte++) {
            uint8_t codes[16], scale;
            float x[32] = {0};
            x[7] = ldexpf(last[r], byte - 127);
            moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
            assert_int_equal(scale, byte);
            x[7] = from_bits(to_bits(x[7]) + 1);
            moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
            assert_int_equal(scale, byte + 1);
        }
}

/* ---- The ends of the range --------------------------------------------------------------------------------------- */

static void test_extreme_maxima(void **state)
{
    static const float maxima[] = {0x1p-149f, 0x1.8p-148f, 0x1p-130f,   0x1p-127f,   0x1p-126f,
                                   1e-38f,    3e-38f,      0x1.8p-125f, 0x1.cp-125f, 0x1.fffffep-125f,
                                   1e38f,     0x1p127f,    0x1.8p127f,  0x1.cp127f,  0x1.fep127f, /* the largest bf16 */
                                   FLT_MAX};
    (void)state;
    for (size_t m = 0; m < sizeof maxima / sizeof *maxima; m++)
        for (int r = 0; r < 4; r++) {
            uint8_t codes[16], scale;
            float x[32] = {0}, back[32];
            for (int i = 0; i < 32; i++) x[i] = ldexpf(maxima[m], -i / 4) * (i % 2 ? -1.0f : 1.0f);
            if (r < 3) check_block(x, rules[r]);
            moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
            assert_true(scale <= 252);
            moe4_mxfp4_dequantize(codes, &scale, 1, back);
            for (int i = 0; i < 32; i++) assert_true(isfinite(back[i]));
        }
}

static void test_zero_blocks(void **state)
{
    (void)state;
    for (int r = 0; r < 4; r++) {
        uint8_t codes[16], scale = 9;
        float x[32] = {0};
        x[3] = -0.0f;
        memset(codes, 0xEE, sizeof codes);
        moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
        assert_int_equal(scale, 0);
        for (int j = 0; j < 16; j++) assert_int_equal(codes[j], 0);
        x[4] = 1.0f; /* in any other block a zero keeps its sign */
        moe4_mxfp4_quantize(x, 1, rules[r], codes, &scale);
        assert_int_equal(code_of(codes, 3), 8);
        assert_int_equal(code_of(codes, 2), 0);
    }
}

static void test_not_finite(void **state)
{
    const float bad[] = {INFINITY, -INFINITY, NAN, from_bits(0xFF800001), from_bits(0x7FFFFFFF), from_bits(0x7F800001)};
    (void)state;
    for (size_t b = 0; b < 4 * (sizeof bad / sizeof *bad); b++)
        for (int position = 0; position < 32; position += 31) {
            uint8_t codes[3 * 16], scales[3];
            float x[3 * 32], back[3 * 32];
            for (int i = 0; i < 3 * 32; i++) x[i] = 1.0f;
            x[32 + position] = bad[b / 4];
            moe4_mxfp4_quantize(x, 3, rules[b % 4], codes, scales);
            assert_int_equal(scales[0], 125);
            assert_int_equal(scales[1], 255);
            assert_int_equal(scales[2], 125);
            for (int j = 0; j < 16; j++) assert_int_equal(codes[16 + j], 0);
            moe4_mxfp4_dequantize(codes, scales, 3, back);
            for (int i = 0; i < 32; i++) assert_true(back[i] == 1.0f && isnan(back[32 + i]) && back[64 + i] == 1.0f);
        }
}

/* ---- Anything ---------------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1;
static uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* A block whose exponents lie within `spread` below `top`. */
static void random_block(int top, int spread, float *x)
{
    for (int i = 0; i < 32; i++) {
        int exponent = top - (int)(random_bits() % (uint32_t)spread);
        uint32_t field = exponent > 0 ? (uint32_t)exponent << 23 : 0;
        uint32_t mantissa = random_bits() & (i % 3 ? 0x7FFFFF : 0x600000); /* every third one is near a midpoint */
        x[i] = from_bits((random_bits() & 0x80000000u) | field | mantissa);
    }
    x[random_bits() % 32] = from_bits((uint32_t)top << 23 | 1);
}

static void test_random_blocks(void **state)
{
    float x[32];
    (void)state;
    for (int n = 0; n < 60000; n++) {
        random_block(1 + (int)(random_bits() % 254), 1 + (int)(random_bits() % 12), x);
        check_block(x, rules[n % 3]);
    }
}

/* A host that flushes subnormals or rounds upward changes nothing. */
static void test_host_modes(void **state)
{
    enum { N_BLOCKS = 64 };
    static float x[N_BLOCKS * 32], back[2][N_BLOCKS * 32];
    static uint8_t codes[2][N_BLOCKS * 16], scales[2][N_BLOCKS];
    (void)state;
    for (int b = 0; b < N_BLOCKS; b++) random_block(1 + b % 8, 8, x + b * 32);
    for (int r = 0; r < 3; r++) {
        moe4_mxfp4_quantize(x, N_BLOCKS, rules[r], codes[0], scales[0]);
        moe4_mxfp4_dequantize(codes[0], scales[0], N_BLOCKS, back[0]);
        fesetround(FE_UPWARD);
#if defined(__SSE__)
        unsigned old = _mm_getcsr();
        _mm_setcsr(old | 0x8040); /* FTZ and DAZ */
#endif
        moe4_mxfp4_quantize(x, N_BLOCKS, rules[r], codes[1], scales[1]);
        moe4_mxfp4_dequantize(codes[0], scales[0], N_BLOCKS, back[1]);
#if defined(__SSE__)
        _mm_setcsr(old);
#endif
        fesetround(FE_TONEAREST);
        assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
        assert_memory_equal(scales[0], scales[1], sizeof scales[0]);
        assert_memory_equal(back[0], back[1], sizeof back[0]);
    }
}

/* Blocks side by side do not touch each other, nor anything around the outputs. */
static void test_block_borders(void **state)
{
    float x[5 * 32], back[5 * 32 + 2];
    uint8_t codes[5 * 16 + 2], scales[5 + 2], one[16], scale;
    (void)state;
    memset(codes, 0xEE, sizeof codes);
    memset(scales, 0xEE, sizeof scales);
    back[0] = back[5 * 32 + 1] = 77.0f;
    for (int b = 0; b < 5; b++) random_block(100 + 10 * b, 5, x + b * 32);
    moe4_mxfp4_quantize(x, 5, MOE4_SCALE_FLOOR, codes + 1, scales + 1);
    moe4_mxfp4_dequantize(codes + 1, scales + 1, 5, back + 1);
    moe4_mxfp4_quantize(x, 0, MOE4_SCALE_FLOOR, codes, scales);
    assert_true(codes[0] == 0xEE && codes[5 * 16 + 1] == 0xEE && scales[0] == 0xEE && scales[6] == 0xEE);
    assert_true(back[0] == 77.0f && back[5 * 32 + 1] == 77.0f);
    for (int b = 0; b < 5; b++) {
        moe4_mxfp4_quantize(x + b * 32, 1, MOE4_SCALE_FLOOR, one, &scale);
        assert_memory_equal(one, codes + 1 + b * 16, 16);
        assert_int_equal(scale, scales[1 + b]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decodes_everything), cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_midpoints),          cmocka_unit_test(test_scale_rules),
        cmocka_unit_test(test_scale_steps),        cmocka_unit_test(test_extreme_maxima),
        cmocka_unit_test(test_zero_blocks),        cmocka_unit_test(test_not_finite),
        cmocka_unit_test(test_random_blocks),      cmocka_unit_test(test_host_modes),
        cmocka_unit_test(test_block_borders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
