/* Blocks of 32 floats, by every rule: as the oracle has them, within the error that the scale allows, and unchanged
 * when quantised again; blocks of codes, dequantised as the oracle has them. */
#include <math.h>
#include <string.h>

#include "fuzz.h"
#include "moe4/quant.h"
#include "ref.h"

enum { BLOCK = 32, CODES = BLOCK / 2, N_RULES = MOE4_SCALE_CEIL + 1 };

static int is_finite(const float *x)
{
    for (int i = 0; i < BLOCK; i++)
        if (!isfinite(x[i])) return 0;
    return 1;
}

static void check_oracle(const float *x, moe4_scale_rule rule, const uint8_t *codes, uint8_t scale)
{
    double wide[BLOCK];
    uint8_t expected_codes[CODES], expected_scale;
    for (int i = 0; i < BLOCK; i++) wide[i] = x[i];
    ref_quantize_mxfp4(wide, BLOCK, rule, expected_codes, &expected_scale);
    FUZZ_CHECK(scale == expected_scale && memcmp(codes, expected_codes, CODES) == 0);
}

/* Half of the widest gap between codes, times the scale; more only where a code saturates, which under CEIL only the
 * largest scale does. */
static void check_error(const float *x, moe4_scale_rule rule, uint8_t scale, const float *y)
{
    double unit = ldexp(1.0, scale - 127);
    for (int i = 0; i < BLOCK; i++) {
        double magnitude = fabs((double)x[i]) / unit, error = fabs((double)x[i] - (double)y[i]) / unit;
        int saturates = magnitude > 6.0 && (rule != MOE4_SCALE_CEIL || scale == 252);
        FUZZ_CHECK(error <= (magnitude <= 2.0 ? 0.25 : magnitude <= 4.0 ? 0.5 : 1.0) || saturates);
        FUZZ_CHECK(!saturates || (magnitude < 8.0 && error == magnitude - 6.0));
    }
}

static void check_block(const float *x, moe4_scale_rule rule)
{
    uint8_t codes[CODES], scale, again_codes[CODES], again_scale;
    float y[BLOCK], again[BLOCK];
    moe4_mxfp4_quantize(x, 1, rule, codes, &scale);
    check_oracle(x, rule, codes, scale);
    moe4_mxfp4_dequantize(codes, &scale, 1, y);
    FUZZ_CHECK((scale != 0xFF) == is_finite(x));
    if (!is_finite(x)) return;
    FUZZ_CHECK(is_finite(y));
    check_error(x, rule, scale, y);
    moe4_mxfp4_quantize(y, 1, rule, again_codes, &again_scale);
    moe4_mxfp4_dequantize(again_codes, &again_scale, 1, again);
    for (int i = 0; i < BLOCK; i++) FUZZ_CHECK(again[i] == y[i]);
}

static void check_codes(const uint8_t *codes, uint8_t scale)
{
    static const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    float y[BLOCK];
    moe4_mxfp4_dequantize(codes, &scale, 1, y);
    for (int i = 0; i < BLOCK; i++) {
        int code = codes[i / 2] >> (i % 2 * 4) & 15;
        double expected = ldexp(code < 8 ? magnitudes[code] : -magnitudes[code - 8], scale - 127);
        FUZZ_CHECK(scale == 0xFF ? isnan(y[i]) : y[i] == (float)expected && !signbit(y[i]) == !signbit(expected));
    }
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    (void)context;
    for (; n_bytes >= BLOCK * sizeof(float); n_bytes -= BLOCK * sizeof(float), data += BLOCK * sizeof(float)) {
        float x[BLOCK];
        memcpy(x, data, sizeof x);
        for (int rule = 0; rule < N_RULES; rule++) check_block(x, (moe4_scale_rule)rule);
    }
    for (; n_bytes > CODES; n_bytes -= CODES + 1, data += CODES + 1) check_codes(data + 1, data[0]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
