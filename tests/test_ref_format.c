/* The oracle's formats and quantisers against expectations written down by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "ref.h"

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void assert_same(double got, double expected)
{
    if (isnan(expected) ? isnan(got) : got == expected && signbit(got) == signbit(expected)) return;
    fail_msg("got %.17g, expected %.17g", got, expected);
}

/* ---- Decoding ---- */

static void e2m1_codes(void **state)
{
    (void)state;
    static const double expected[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
    for (unsigned code = 0; code < 16; code++) assert_same(ref_e2m1(code), expected[code]);
}

static void e8m0_bytes(void **state)
{
    (void)state;
    assert_same(ref_e8m0(0x00), float_of(0x00400000)); /* 2^-127, a subnormal of f32 */
    for (unsigned byte = 1; byte < 0xFF; byte++) assert_same(ref_e8m0(byte), float_of(byte << 23));
    assert_same(ref_e8m0(0xFF), NAN);
}

static void e4m3_codes(void **state)
{
    (void)state;
    static const double binades[16] = {0, 0.015625, 0.03125, 0.0625, 0.125, 0.25, 0.5, 1,
                                       2, 4,        8,       16,     32,    64,   128, 256};
    static const double subnormals[8] = {0,         0.001953125, 0.00390625, 0.005859375,
                                         0.0078125, 0.009765625, 0.01171875, 0.013671875};
    static const double steps[8] = {1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875};
    for (unsigned code = 0; code < 128; code++) {
        double expected = code < 8 ? subnormals[code] : binades[code / 8] * steps[code % 8];
        if (code == 127) expected = NAN;
        assert_same(ref_e4m3(code), expected);
        assert_same(ref_e4m3(code | 0x80), -expected);
    }
    assert_same(ref_e4m3(0x7E), 448);
    assert_same(ref_e4m3(0x38), 1);
}

static void bf16_is_the_top_of_f32(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++) assert_same(ref_bf16((uint16_t)bits), float_of(bits << 16));
}

static void f16_values(void **state)
{
    (void)state;
    static const struct {
        uint16_t bits;
        double value;
    } expected[] = {{0x0000, 0},       {0x8000, -0.0},       {0x0001, 0x1p-24},  {0x03FF, 0x3FFp-24},
                    {0x0400, 0x1p-14}, {0x3555, 0x1.554p-2}, {0x3C00, 1},        {0x3C01, 1 + 0x1p-10},
                    {0xC000, -2},      {0x7BFF, 65504},      {0x7C00, INFINITY}, {0xFC00, -INFINITY},
                    {0x7C01, NAN},     {0xFE00, NAN}};
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        assert_same(ref_f16(expected[i].bits), expected[i].value);
}

static void load_reads_every_dtype_unaligned(void **state)
{
    (void)state;
    unsigned char bytes[33] = {0};
    const float f32[2] = {0, -1.5f};
    const uint16_t half[2] = {0, 0xBE00}; /* f16 -1.5 */
    const uint16_t bf16[2] = {0, 0xBFC0};
    const int16_t i16[2] = {0, -7};
    const int32_t i32[2] = {0, -70000};
    const int64_t i64[2] = {0, -5000000000};
    const uint8_t e4m3[2] = {0, 0xBC}, e8m0[2] = {127, 128};
    const struct {
        moe4_dtype dtype;
        const void *data;
        size_t bytes;
        double value;
    } cases[] = {{MOE4_DTYPE_F32, f32, 8, -1.5},      {MOE4_DTYPE_F16, half, 4, -1.5},
                 {MOE4_DTYPE_BF16, bf16, 4, -1.5},    {MOE4_DTYPE_I16, i16, 4, -7},
                 {MOE4_DTYPE_I32, i32, 8, -70000},    {MOE4_DTYPE_I64, i64, 16, -5e9},
                 {MOE4_DTYPE_F8_E4M3, e4m3, 2, -1.5}, {MOE4_DTYPE_E8M0, e8m0, 2, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        memcpy(bytes + 1, cases[i].data, cases[i].bytes);
        assert_same(ref_load(bytes + 1, cases[i].dtype, 1), cases[i].value);
    }
}

/* ---- Rounding ---- */

static void e2m1_ties_go_to_even_codes(void **state)
{
    (void)state;
    static const struct {
        double tie, below, at, above;
    } cases[] = {{0.25, 0, 0, 0.5}, {0.75, 0.5, 1, 1}, {1.25, 1, 1, 1.5}, {1.75, 1.5, 2, 2},
                 {2.5, 2, 2, 3},    {3.5, 3, 4, 4},    {5, 4, 4, 6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            float tie = (float)cases[i].tie;
            assert_same(ref_e2m1(ref_to_e2m1(sign * nextafterf(tie, 0))), sign * cases[i].below);
            assert_same(ref_e2m1(ref_to_e2m1(sign * tie)), sign * cases[i].at);
            assert_same(ref_e2m1(ref_to_e2m1(sign * nextafterf(tie, 9))), sign * cases[i].above);
        }
    assert_int_equal(ref_to_e2m1(1e30), 7);
    assert_int_equal(ref_to_e2m1(-INFINITY), 15);
    assert_int_equal(ref_to_e2m1(NAN), 7);
    assert_int_equal(ref_to_e2m1(-0.0), 8);
}

static void e4m3_ties_go_to_even_codes(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 0x7E; code++) {
        double low = ref_e4m3(code), high = ref_e4m3(code + 1), tie = (low + high) / 2;
        assert_int_equal(ref_to_e4m3(low), code);
        assert_int_equal(ref_to_e4m3(nextafter(tie, 0)), code);
        assert_int_equal(ref_to_e4m3(tie), code % 2 ? code + 1 : code);
        assert_int_equal(ref_to_e4m3(nextafter(tie, 1e9)), code + 1);
        assert_int_equal(ref_to_e4m3(-tie), (code % 2 ? code + 1 : code) | 0x80);
    }
    assert_int_equal(ref_to_e4m3(449), 0x7E);
    assert_int_equal(ref_to_e4m3(-1e300), 0xFE);
    assert_int_equal(ref_to_e4m3(INFINITY), 0x7E);
    assert_int_equal(ref_to_e4m3(NAN) & 0x7F, 0x7F);
}

/* The integer rule for f32, over a sample of all its bit patterns. */
static void bf16_of_f32(void **state)
{
    (void)state;
    for (uint64_t bits = 0; bits <= 0xFFFFFFFF; bits += 9973) {
        float value = float_of((uint32_t)bits);
        if (isnan(value)) {
            assert_true(isnan(ref_bf16(ref_to_bf16(value))));
            continue;
        }
        assert_int_equal(ref_to_bf16(value), (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16));
        assert_same(ref_round_bf16(value), ref_bf16(ref_to_bf16(value)));
    }
}

static void bf16_ends(void **state)
{
    (void)state;
    /* Straight from double: f32 in between would see a tie and go down. */
    assert_same(ref_round_bf16(1 + 0x1p-8 + 0x1p-40), 1 + 0x1p-7);
    assert_same(ref_round_bf16(1 + 0x1p-8), 1);
    assert_same(ref_round_bf16(0x1.FFp127), INFINITY);
    assert_same(ref_round_bf16(nextafter(0x1.FFp127, 0)), 0x1.FEp127);
    assert_same(ref_round_bf16(-1e200), -INFINITY);
    assert_same(ref_round_bf16(0x1p-133), 0x1p-133);
    assert_same(ref_round_bf16(0x1p-134), 0);
    assert_same(ref_round_bf16(nextafter(0x1p-134, 1)), 0x1p-133);
    assert_same(ref_round_bf16(-1e-300), -0.0);
    assert_int_equal(ref_to_bf16(NAN) & 0x7FC0, 0x7FC0);
}

static void f16_rounds_between_neighbours(void **state)
{
    (void)state;
    for (unsigned bits = 0; bits < 0x7BFF; bits++) {
        double low = ref_f16((uint16_t)bits), high = ref_f16((uint16_t)(bits + 1)), tie = (low + high) / 2;
        assert_true(low < high);
        assert_int_equal(ref_to_f16(low), bits);
        assert_int_equal(ref_to_f16(nextafter(tie, 0)), bits);
        assert_int_equal(ref_to_f16(tie), bits + bits % 2);
        assert_int_equal(ref_to_f16(-nextafter(tie, 1e9)), (bits + 1) | 0x8000);
    }
    assert_same(ref_round_f16(65519.9), 65504);
    assert_same(ref_round_f16(65520), INFINITY);
    assert_same(ref_round_f16(-NAN), NAN);
}

/* ---- Quantisers ---- */

static void fill(double *x, int64_t n, double value)
{
    for (int64_t i = 0; i < n; i++) x[i] = value;
}

/* MXFP8 scale of a block whose largest magnitude is amax. */
static unsigned mxfp8_byte(double amax)
{
    double x[32];
    uint8_t codes[32], scale;
    fill(x, 32, 0);
    x[17] = -amax;
    ref_quantize_mxfp8(x, 32, codes, &scale);
    return scale;
}

static void mxfp8_scales(void **state)
{
    (void)state;
    for (int j = -100; j <= 119; j++) {
        assert_int_equal(mxfp8_byte(ldexp(448, j)), 127 + j);
        assert_int_equal(mxfp8_byte(ldexp(450, j)), 128 + j); /* the bf16 after 448 */
        assert_int_equal(mxfp8_byte(ldexp(446, j)), 127 + j);
        assert_int_equal(mxfp8_byte(ldexp(256, j)), 127 + j);
        assert_int_equal(mxfp8_byte(ldexp(224, j)), 126 + j);
    }
    assert_int_equal(mxfp8_byte(0), 0);
    assert_int_equal(mxfp8_byte(0x1p-133), 0);
    assert_int_equal(mxfp8_byte(448 * 0x1p-127), 0); /* s = 2^-127 */
    assert_int_equal(mxfp8_byte(450 * 0x1p-127), 1); /* just above: s subnormal, byte 1 */
    assert_int_equal(mxfp8_byte(448 * 0x1p-126), 1);
    assert_int_equal(mxfp8_byte(0x1.FEp127), 247); /* the largest bf16 */
    assert_int_equal(mxfp8_byte(INFINITY), 0xFF);
    assert_int_equal(mxfp8_byte(NAN), 0xFF);
}

static void mxfp8_codes(void **state)
{
    (void)state;
    double x[64];
    uint8_t codes[64], scales[2];
    fill(x, 64, 0);
    x[0] = 1, x[1] = -0.30078125, x[2] = 0x1p-17, x[3] = 0x1p-18, x[4] = -0x1p-18; /* scale 2^-8 */
    x[32] = 448 * 0x1p-127, x[33] = -1e-38;                                        /* byte 0: all codes 0 */
    ref_quantize_mxfp8(x, 64, codes, scales);
    assert_int_equal(scales[0], 119);
    assert_int_equal(codes[0], 0x78); /* 256 */
    assert_int_equal(codes[1], 0xEA); /* -77 -> -80 */
    assert_int_equal(codes[2], 0x01); /* 2^-9 */
    assert_int_equal(codes[3], 0x00); /* 2^-10 ties to even */
    assert_int_equal(codes[4], 0x80);
    assert_int_equal(scales[1], 0);
    assert_int_equal(codes[32] | codes[33], 0);

    double back[64];
    ref_dequantize_mxfp8(codes, scales, 64, back);
    assert_same(back[0], 1);
    assert_same(back[1], -0.3125);

    x[5] = -INFINITY;
    ref_quantize_mxfp8(x, 64, codes, scales);
    assert_int_equal(scales[0], 0xFF);
    assert_int_equal(scales[1], 0);
    ref_dequantize_mxfp8(codes, scales, 64, back);
    assert_true(isnan(back[0]) && isnan(back[31]) && back[32] == 0);
}

static void fp8_tokens(void **state)
{
    (void)state;
    double x[5] = {1, -0.5, 0, 0.001953125, -1};
    uint8_t codes[5];
    float scale;
    ref_quantize_fp8(x, 5, codes, &scale);
    assert_same(scale, 1.0f / 448.0f);
    assert_int_equal(codes[0], 0x7E);
    assert_int_equal(codes[1], 0xF6); /* -224 */
    assert_int_equal(codes[2], 0x00);
    assert_int_equal(codes[3], 0x36); /* 0.875 */
    assert_int_equal(codes[4], 0xFE);

    fill(x, 5, -0.0);
    ref_quantize_fp8(x, 5, codes, &scale);
    assert_same(scale, 0);
    assert_int_equal(codes[0], 0);

    x[3] = NAN;
    ref_quantize_fp8(x, 5, codes, &scale);
    assert_true(isnan(scale));
    double back[5];
    ref_dequantize_fp8(codes, scale, 5, back);
    assert_true(isnan(back[0]) && isnan(back[4]));
}

static void int8_blocks(void **state)
{
    (void)state;
    double x[64] = {127, 63.5, 62.5, -0.5, 0.5, 1.5, -126.5, -127}, back[64];
    static const int8_t expected[] = {127, 64, 62, 0, 0, 2, -126, -127};
    int8_t codes[64];
    float scales[2];
    x[32] = -0.25;
    x[33] = 0.125; /* 63.5 steps of 0.25/127, which f32 rounds down */
    ref_quantize_int8(x, 64, codes, scales);
    assert_same(scales[0], 1);
    for (int i = 0; i < 8; i++) assert_int_equal(codes[i], expected[i]);
    assert_same(scales[1], 0.25f / 127);
    assert_int_equal(codes[32], -127);
    assert_int_equal(codes[33], 64);
    ref_dequantize_int8(codes, scales, 64, back);
    assert_same(back[6], -126);
    assert_same(back[32], -127 * (double)(0.25f / 127));

    fill(x, 32, -0.0);
    x[40] = -INFINITY;
    ref_quantize_int8(x, 64, codes, scales);
    assert_same(scales[0], 0);
    assert_true(isnan(scales[1]));
    for (int i = 0; i < 64; i++) assert_int_equal(codes[i], 0);
    ref_round_int8(x, 64);
    assert_true(x[0] == 0 && isnan(x[32]) && isnan(x[63]));
}

/* Two blocks: (3 * 1.5 - 4 * 6) * 2 * 0.75 = -29.25, then -0.5 * 2^-25 times 1, which f32 loses beside it, or 127,
 * which it rounds to a unit in the last place. */
static void int8_sums(void **state)
{
    (void)state;
    uint8_t codes[32] = {0x73}, scales[2] = {128, 127 - 25};
    codes[16] = 0x09;
    const moe4_matrix matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    int8_t x[64] = {3, -4};
    const float x_scales[2] = {0.75f, 1};
    x[32] = 1;
    assert_same(ref_int8_sum(&matrix, 64, 0, x, x_scales), -29.25);
    x[32] = 127;
    assert_same(ref_int8_sum(&matrix, 64, 0, x, x_scales), -29.25 - 0x1p-19);
    scales[1] = 0xFF;
    x[32] = 0;
    assert_true(isnan(ref_int8_sum(&matrix, 64, 0, x, x_scales)));
}

/* Scale of a block with this largest magnitude: 2^(byte-127), its other elements 0. */
static double mxfp4_scale(double amax, moe4_scale_rule rule)
{
    double x[32];
    uint8_t codes[16], scale;
    fill(x, 32, 0);
    x[31] = amax;
    ref_quantize_mxfp4(x, 32, rule, codes, &scale);
    return ref_e8m0(scale);
}

static void mxfp4_scale_rules(void **state)
{
    (void)state;
    static const double amax[8] = {6, 6.25, 6.5, 6.75, 7, 7.5, 8, 12};
    static const double expected[3][8] = {[MOE4_SCALE_FLOOR] = {1, 1, 1, 1, 1, 1, 2, 2},
                                          [MOE4_SCALE_EVEN] = {1, 1, 1, 1, 2, 2, 2, 2},
                                          [MOE4_SCALE_CEIL] = {1, 2, 2, 2, 2, 2, 2, 2}};
    for (int rule = 0; rule < 3; rule++) {
        for (int i = 0; i < 8; i++) {
            assert_same(mxfp4_scale(amax[i], (moe4_scale_rule)rule), expected[rule][i]);
            assert_same(mxfp4_scale(-ldexp(amax[i], -50), (moe4_scale_rule)rule), ldexp(expected[rule][i], -50));
        }
        assert_same(mxfp4_scale(0, (moe4_scale_rule)rule), 0x1p-127);
        assert_same(mxfp4_scale(1e-45, (moe4_scale_rule)rule), 0x1p-127);
        assert_same(mxfp4_scale(1e-38, (moe4_scale_rule)rule), 0x1p-127); /* 1.7 * 2^-127 */
        assert_same(mxfp4_scale(INFINITY, (moe4_scale_rule)rule), NAN);
        assert_same(mxfp4_scale(NAN, (moe4_scale_rule)rule), NAN);
    }
    assert_same(mxfp4_scale(FLT_MAX, MOE4_SCALE_FLOOR), 0x1p125);
    assert_same(mxfp4_scale(FLT_MAX, MOE4_SCALE_EVEN), 0x1p125);
    assert_same(mxfp4_scale(FLT_MAX, MOE4_SCALE_CEIL), 0x1p125);
}

static void mxfp4_codes(void **state)
{
    (void)state;
    double x[32];
    uint8_t codes[16], scale;
    fill(x, 32, 0);
    x[0] = 12, x[1] = -5, x[2] = 0.9, x[31] = -3.4;
    ref_quantize_mxfp4(x, 32, MOE4_SCALE_EVEN, codes, &scale);
    assert_int_equal(scale, 128);
    assert_int_equal(codes[0], 0xC7);  /* 6 low, -2 high: -2.5 ties to even */
    assert_int_equal(codes[1], 0x01);  /* 0.45 -> 0.5 */
    assert_int_equal(codes[15], 0xB0); /* -1.7 -> -1.5 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e2m1_codes),
        cmocka_unit_test(e8m0_bytes),
        cmocka_unit_test(e4m3_codes),
        cmocka_unit_test(bf16_is_the_top_of_f32),
        cmocka_unit_test(f16_values),
        cmocka_unit_test(load_reads_every_dtype_unaligned),
        cmocka_unit_test(e2m1_ties_go_to_even_codes),
        cmocka_unit_test(e4m3_ties_go_to_even_codes),
        cmocka_unit_test(bf16_of_f32),
        cmocka_unit_test(bf16_ends),
        cmocka_unit_test(f16_rounds_between_neighbours),
        cmocka_unit_test(mxfp8_scales),
        cmocka_unit_test(mxfp8_codes),
        cmocka_unit_test(fp8_tokens),
        cmocka_unit_test(int8_blocks),
        cmocka_unit_test(int8_sums),
        cmocka_unit_test(mxfp4_scale_rules),
        cmocka_unit_test(mxfp4_codes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
