/* Second witnesses: tests/data/witness holds what torch, transformers, vLLM, torchao and mpmath make of the same
 * inputs (tests/witness/generate.py wrote it).  Every routing method, every activation, the formats, the quantisers,
 * and whole layers.  Each file's metadata says which class or function of which version it came from. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/convert.h"
#include "base/mxfp8.h"
#include "cpu/activation.h"
#include "cpu/route.h"
#include "fixture.h"
#include "moe4/quant.h"
#include "ref.h"
#include "witness.h"

/* ---- Routing ---- */

static const char *const route_files[] = {
    "route_default",        "route_default_scaled",       "route_renormalize",
    "route_deepseek_v3",    "route_deepseek_v3_negative", "route_deepseek_v3_ungrouped",
    "route_llama4",         "route_renormalize_naive",    "route_topk",
    "route_sigmoid_renorm", "route_sigmoid_renorm_no",    "route_deepseek_v3_many",
    "route_minimax2",       "route_minimax2_scaled",      "route_sigmoid",
    "route_topk_sigmoid",   "route_sqrt_softplus",        "route_hash",
};
enum { N_ROUTE_FILES = sizeof route_files / sizeof *route_files };

/* A weight is what the witness says, moved by the noise of its f32, then rounded to bf16. */
static void check_weight(const char *name, int64_t token, int32_t id, float got, double expected)
{
    const double noise = 2e-6 * fabs(expected);
    if (got >= ref_round_bf16(expected - noise) && got <= ref_round_bf16(expected + noise)) return;
    fail_msg("%s, token %lld, expert %d: weight %.9g, the witness says %.9g", name, (long long)token, id, (double)got,
             expected);
}

/* One token: the same experts, slot by slot or, where the witness leaves their order open, as a set. */
static void check_row(const golden_file *file, const char *name, int64_t t, int32_t A, const int32_t *ids,
                      const float *weights)
{
    const int32_t *expected_ids = (const int32_t *)golden_find(file, "ids")->data + t * A;
    const double *expected = (const double *)golden_find(file, "weights")->data + t * A;
    const int is_ordered = witness_says(file, "order", "descending");
    for (int32_t a = 0; a < A; a++) {
        int32_t match = is_ordered ? a : 0;
        while (!is_ordered && match < A - 1 && expected_ids[match] != ids[a]) match++;
        if (expected_ids[match] != ids[a])
            fail_msg("%s, token %lld, slot %d: expert %d is not the witness's", name, (long long)t, a, ids[a]);
        check_weight(name, t, ids[a], weights[a], expected[match]);
    }
    for (int32_t a = 0; !is_ordered && a < A; a++) /* as many as the set has */
        for (int32_t b = 0; b < a; b++) assert_int_not_equal(ids[a], ids[b]);
}

/* The file's bf16 logits are exact in all three formats. */
static void check_route(moe4_context *context, const char *name, moe4_dtype dtype)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    golden_file *file = witness_open(name);
    moe4_routing routing = witness_routing(file);
    const golden_tensor *given = golden_find(file, "logits"), *tokens = golden_look(file, "token_ids");
    const int64_t T = given->shape[0], E = given->shape[1], A = routing.top_k;
    void *values = buffers_allocate(&buffers, (size_t)(T * E) * 4);
    int32_t *ids = buffers_allocate(&buffers, (size_t)(T * A) * sizeof *ids);
    float *weights = buffers_allocate(&buffers, (size_t)(T * A) * sizeof *weights);
    for (int64_t i = 0; i < T * E; i++) store_value(values, dtype, i, ref_load(given->data, MOE4_DTYPE_BF16, i));

    moe4_logits logits = MOE4_LOGITS_INIT;
    logits.logits = values;
    logits.dtype = dtype;
    if (moe4_route(context, &routing, (int32_t)E, T, &logits, tokens ? tokens->data : NULL, ids, weights))
        fail_msg("%s: %s", name, moe4_context_message(context));
    for (int64_t t = 0; t < T; t++) check_row(file, name, t, (int32_t)A, ids + t * A, weights + t * A);
    golden_file_close(file);
    buffers_release(&buffers);
}

static void routing_methods(void **state)
{
    (void)state;
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    for (int i = 0; i < N_ROUTE_FILES; i++) {
        check_route(context, route_files[i], MOE4_DTYPE_F32);
        check_route(context, route_files[i], MOE4_DTYPE_BF16);
        check_route(context, route_files[i], MOE4_DTYPE_F16);
    }
    moe4_context_destroy(context);
}

static void every_routing_method_has_a_witness(void **state)
{
    (void)state;
    int seen[MOE4_ROUTING_HASH + 1] = {0};
    for (int i = 0; i < N_ROUTE_FILES; i++) {
        golden_file *file = witness_open(route_files[i]);
        seen[witness_method(file)]++;
        golden_file_close(file);
    }
    assert_int_equal(seen[MOE4_ROUTING_NONE], 0);
    for (int m = MOE4_ROUTING_DEFAULT; m <= MOE4_ROUTING_HASH; m++)
        if (!seen[m]) fail_msg("routing %s has no witness", route_method_name((moe4_routing_method)m));
}

/* ---- Activations ---- */

static const char *const activation_files[] = {
    "activation_silu",         "activation_silu_limit",
    "activation_swiglu_oai",   "activation_swiglu_oai_all",
    "activation_situ",         "activation_swiglu_oai_no_limit",
    "activation_situ_no_beta", "activation_situ_limit",
    "activation_geglu",        "activation_geglu_all",
    "activation_geglu_tanh",   "activation_geglu_tanh_all",
    "activation_swiglu_step",  "activation_swiglu_step_no_limit",
    "activation_relu2",        "activation_identity",
};
enum { N_ACTIVATION_FILES = sizeof activation_files / sizeof *activation_files };

/* What a file has of a parameter is [L]; what it does not have is absent. */
static moe4_param param_of(const golden_file *file, const char *name)
{
    const golden_tensor *values = golden_look(file, name);
    return values ? (moe4_param){MOE4_PER_EXPERT, 0.0f, values->data} : (moe4_param)MOE4_PARAM_INIT;
}

/* The distance of v from expected in f32 ulps of the latter. */
static double ulps(float v, double expected)
{
    int exponent;
    frexp(fmax(fabs(expected), FLT_MIN), &exponent);
    return fabs(v - expected) / ldexp(1.0, exponent - FLT_MANT_DIG);
}

/* One f32 ulp, half of which is our own rounding; what a witness in f32 made of exp, tanh and three products besides.
 */
static void check_activation(const char *name, moe4_isa isa)
{
    golden_file *file = witness_open(name);
    const double allowed = witness_says(file, "arithmetic", "f64") ? 1.0 : 8.0;
    const golden_tensor *tensor = golden_find(file, "v");
    const int64_t L = tensor->shape[0], n = tensor->shape[1];
    const float *gate = golden_data(file, "gate", "F32", L * n), *up = golden_data(file, "up", "F32", L * n);
    const double *expected = golden_data(file, "v", "F64", L * n);
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.activation = witness_activation(file);
    config.alpha = param_of(file, "alpha");
    config.beta = param_of(file, "beta");
    config.limit = param_of(file, "limit");
    float *v = calloc((size_t)n, sizeof *v);
    for (int32_t l = 0; l < L; l++) {
        struct activation_params params = activation_resolve(&config, l);
        activation_kernels_for(isa)->run[config.activation](gate + l * n, up + l * n, n, &params, v);
        for (int64_t i = 0; i < n; i++)
            if (!(ulps(v[i], expected[l * n + i]) <= allowed))
                fail_msg("%s, expert %d, gate %.9g, up %.9g: %.9g, the witness says %.12g", name, l,
                         (double)gate[l * n + i], (double)up[l * n + i], (double)v[i], expected[l * n + i]);
    }
    free(v);
    golden_file_close(file);
}

static void activations(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int32_t level = 0; level < n_levels; level++)
        for (int i = 0; i < N_ACTIVATION_FILES; i++) check_activation(activation_files[i], levels[level]);
}

static void every_activation_has_a_witness(void **state)
{
    (void)state;
    int seen[MOE4_ACTIVATION_IDENTITY + 1] = {0};
    for (int i = 0; i < N_ACTIVATION_FILES; i++) {
        golden_file *file = witness_open(activation_files[i]);
        seen[witness_activation(file)]++;
        golden_file_close(file);
    }
    assert_int_equal(seen[MOE4_ACTIVATION_NONE], 0);
    for (int a = MOE4_ACTIVATION_SILU; a <= MOE4_ACTIVATION_IDENTITY; a++)
        if (!seen[a]) fail_msg("activation %s has no witness", activation_name((moe4_activation)a));
}

/* ---- Formats ---- */

static void expect_f32(const char *what, int64_t i, float got, double expected)
{
    if (f32_bits(got) == f32_bits((float)expected) || (isnan(got) && isnan(expected))) return;
    fail_msg("%s, number %lld: %a, the witness says %a", what, (long long)i, (double)got, expected);
}

/* NaN may be any NaN of the format: larger than `infinity` without its sign. */
static void expect_half(const char *what, float x, uint16_t got, uint16_t expected, uint16_t infinity)
{
    if (got == expected || ((got & 0x7FFF) > infinity && (expected & 0x7FFF) > infinity)) return;
    fail_msg("%s of %a is %04x, the witness says %04x", what, (double)x, got, expected);
}

static void conversions(void **state)
{
    (void)state;
    golden_file *file = witness_open("formats");
    const int64_t n = golden_find(file, "x")->shape[0], n_e4m3 = golden_find(file, "e4m3_x")->shape[0];
    const float *x = golden_data(file, "x", "F32", n), *e4m3_x = golden_data(file, "e4m3_x", "F32", n_e4m3);
    const uint16_t *bf16 = golden_data(file, "bf16", "I16", n), *f16 = golden_data(file, "f16", "I16", n);
    const uint16_t *halves = golden_data(file, "halves", "I16", n);
    const float *from_bf16 = golden_data(file, "bf16_to_f32", "F32", n);
    const float *from_f16 = golden_data(file, "f16_to_f32", "F32", n);
    const float *from_e4m3 = golden_data(file, "e4m3_to_f32", "F32", 256);
    const uint8_t *e4m3 = golden_data(file, "e4m3", "U8", n_e4m3);
    for (int64_t i = 0; i < n; i++) {
        expect_half("bf16", x[i], bf16_from_f32(x[i]), bf16[i], 0x7F80);
        expect_half("f16", x[i], f16_from_f32(x[i]), f16[i], 0x7C00);
        expect_f32("bf16", i, bf16_to_f32(halves[i]), from_bf16[i]);
        expect_f32("f16", i, f16_to_f32(halves[i]), from_f16[i]);
    }
    for (int64_t i = 0; i < n_e4m3; i++)
        if (e4m3_from_f32(e4m3_x[i]) != e4m3[i])
            fail_msg("e4m3 of %a is %02x, the witness says %02x", (double)e4m3_x[i], e4m3_from_f32(e4m3_x[i]), e4m3[i]);
    for (int code = 0; code < 256; code++) expect_f32("e4m3", code, e4m3_to_f32((uint8_t)code), from_e4m3[code]);
    golden_file_close(file);
}

static void every_mxfp4_code_under_every_scale(void **state)
{
    (void)state;
    golden_file *file = witness_open("formats");
    const float *e2m1 = golden_data(file, "e2m1_to_f32", "F32", 16);
    const float *e8m0 = golden_data(file, "e8m0_to_f32", "F32", 256);
    uint8_t codes[16];
    float values[32];
    for (int k = 0; k < 32; k++) set_code(codes, k, (unsigned)k % 16);
    for (int byte = 0; byte < 256; byte++) {
        const uint8_t scale = (uint8_t)byte;
        moe4_mxfp4_dequantize(codes, &scale, 1, values);
        for (int k = 0; k < 32; k++) expect_f32("mxfp4", byte * 32 + k, values[k], (double)e2m1[k % 16] * e8m0[byte]);
    }
    golden_file_close(file);
}

static void mxfp4_quantiser(void **state)
{
    (void)state;
    static const char *const rules[] = {
        [MOE4_SCALE_EVEN] = "even", [MOE4_SCALE_FLOOR] = "floor", [MOE4_SCALE_CEIL] = "ceil"};
    golden_file *file = witness_open("mxfp4");
    const int64_t n = golden_find(file, "x")->shape[0];
    const float *x = golden_data(file, "x", "F32", n * 32);
    for (int rule = MOE4_SCALE_EVEN; rule <= MOE4_SCALE_CEIL; rule++) {
        char name[32];
        uint8_t codes[16], scale;
        snprintf(name, sizeof name, "%s_codes", rules[rule]);
        const uint8_t *expected = golden_data(file, name, "U8", n * 16);
        snprintf(name, sizeof name, "%s_scales", rules[rule]);
        const uint8_t *scales = golden_data(file, name, "U8", n);
        for (int64_t b = 0; b < n; b++) {
            moe4_mxfp4_quantize(x + b * 32, 1, (moe4_scale_rule)rule, codes, &scale);
            if (scale != scales[b])
                fail_msg("block %lld, rule %s: scale %d, the witness says %d", (long long)b, rules[rule], scale,
                         scales[b]);
            if (memcmp(codes, expected + b * 16, 16))
                fail_msg("block %lld, rule %s: the codes differ", (long long)b, rules[rule]);
        }
    }
    golden_file_close(file);
}

static void mxfp8_quantiser(void **state)
{
    (void)state;
    golden_file *file = witness_open("mxfp8");
    const int64_t n = golden_find(file, "x")->shape[0];
    const uint16_t *x = golden_data(file, "x", "BF16", n * 32);
    const uint8_t *scales = golden_data(file, "scales", "U8", n), *codes = golden_data(file, "codes", "U8", n * 32);
    const float *values = golden_data(file, "values", "F32", n * 32);
    for (int64_t b = 0; b < n; b++) {
        uint8_t got[32];
        uint16_t back[32];
        assert_int_equal(mxfp8_quantize_block(x + b * 32, got), scales[b]);
        assert_memory_equal(got, codes + b * 32, 32);
        mxfp8_dequantize_block(got, scales[b], back);
        for (int k = 0; k < 32; k++) expect_f32("mxfp8", b * 32 + k, bf16_to_f32(back[k]), values[b * 32 + k]);
    }
    golden_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routing_methods), cmocka_unit_test(every_routing_method_has_a_witness),
        cmocka_unit_test(activations),     cmocka_unit_test(every_activation_has_a_witness),
        cmocka_unit_test(conversions),     cmocka_unit_test(every_mxfp4_code_under_every_scale),
        cmocka_unit_test(mxfp4_quantiser), cmocka_unit_test(mxfp8_quantiser),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
