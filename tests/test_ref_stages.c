/* The oracle on the stages of an expert: an honest fp32 implementation passes, and each kind of error is found where it
 * is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "verdicts.h"

static const ref_arithmetic fp32 = REF_ARITHMETIC_FP32;

/* ---- An implementation in fp32: the golden weights under any activation and order ---- */

enum { N = 5, H = 64, I = 96 };

typedef struct model {
    golden_layer *layer;
    moe4_layer_config config;
    const moe4_expert *expert;
    double x[N * H], v[N * I];
    uint16_t v_bits[N * I], z_bits[N * H];
    uint8_t codes[N * I], bytes[N * 3];
    float scales[N];
} model;

static float sum_f32(const moe4_matrix *matrix, int64_t K, int64_t row, const double *x)
{
    float sum = 0;
    for (int64_t k = 0; k < K; k++) sum = fmaf((float)x[k], (float)ref_weight(matrix, K, row, k), sum);
    return sum + (float)ref_load(matrix->bias, matrix->bias_dtype, row);
}

static void model_intermediate(model *m, int32_t l)
{
    for (int64_t j = 0; j < N; j++)
        for (int64_t i = 0; i < I; i++) {
            int64_t gate, up;
            ref_gate_up_rows(&m->config, i, &gate, &up);
            float g = gate >= 0 ? sum_f32(&m->expert->gate_up, H, gate, m->x + j * H) : 0;
            float u = sum_f32(&m->expert->gate_up, H, up, m->x + j * H);
            m->v_bits[j * I + i] = ref_to_bf16((float)ref_activation(&m->config, l, g, u));
            m->v[j * I + i] = ref_bf16(m->v_bits[j * I + i]);
        }
}

static void model_gemm2(model *m)
{
    for (int64_t j = 0; j < N; j++)
        for (int64_t h = 0; h < H; h++)
            m->z_bits[j * H + h] = ref_to_bf16(sum_f32(&m->expert->down, I, h, m->v + j * I));
}

static model *model_open(int32_t l)
{
    model *m = calloc(1, sizeof *m);
    assert_non_null(m);
    m->layer = golden_layer_open("gptoss_small");
    m->config = m->layer->config;
    m->expert = &m->layer->experts[l];
    for (int i = 0; i < N * H; i++) m->x[i] = ref_bf16(m->layer->hidden_states[i]);
    model_intermediate(m, l);
    model_gemm2(m);
    return m;
}

static void model_close(model *m)
{
    golden_layer_close(m->layer);
    free(m);
}

/* Row and column of a large element, where one unit in the last place is far more than fp32's error. */
static int64_t largest(const double *values, int64_t n)
{
    int64_t best = 0;
    for (int64_t i = 0; i < n; i++)
        if (fabs(values[i]) > fabs(values[best])) best = i;
    return best;
}

static void fp32_passes_under_every_activation_and_order(void **state)
{
    (void)state;
    model *m = model_open(2);
    const float limits[8] = {7, 7, 3, 7, 7, 7, 7, 7};
    for (int a = MOE4_ACTIVATION_SILU; a <= MOE4_ACTIVATION_IDENTITY; a++)
        for (int order = MOE4_GATE_UP_NONE; order <= MOE4_GATE_UP_UP_FIRST; order++) {
            if ((order == MOE4_GATE_UP_NONE) != (a >= MOE4_ACTIVATION_RELU2)) continue;
            m->config.activation = (moe4_activation)a;
            m->config.gate_up = (moe4_gate_up)order;
            m->config.limit = (moe4_param){MOE4_PER_EXPERT, 0, limits};
            ref_verdict verdict;
            model_intermediate(m, 2);
            ref_check_intermediate(&m->config, m->expert, 2, m->x, m->v_bits, N, &fp32, &verdict);
            passes(&verdict, N * I);
            model_gemm2(m);
            ref_check_gemm2(&m->config, m->expert, m->v, m->z_bits, N, &fp32, &verdict);
            passes(&verdict, N * H);
        }
    model_close(m);
}

static void one_wrong_bit_is_found(void **state)
{
    (void)state;
    model *m = model_open(0);
    ref_verdict verdict;
    int64_t at = largest(m->v, N * I);
    static const int changes[] = {1, -1, 2, 0x80, -0x8000, 0x7FC0};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        uint16_t kept = m->v_bits[at];
        m->v_bits[at] = changes[i] == 0x7FC0 ? 0x7FC0 : (uint16_t)(kept + changes[i]);
        ref_check_intermediate(&m->config, m->expert, 0, m->x, m->v_bits, N, &fp32, &verdict);
        fails_at(&verdict, at / I, at % I);
        m->v_bits[at] = kept;
    }
    double z[N * H];
    for (int i = 0; i < N * H; i++) z[i] = ref_bf16(m->z_bits[i]);
    at = largest(z, N * H);
    m->z_bits[at]++;
    ref_check_gemm2(&m->config, m->expert, m->v, m->z_bits, N, &fp32, &verdict);
    fails_at(&verdict, at / H, at % H);
    m->z_bits[at] = 0xFF80;
    ref_check_gemm2(&m->config, m->expert, m->v, m->z_bits, N, &fp32, &verdict);
    fails_at(&verdict, at / H, at % H);
    assert_true(verdict.worst_got == -INFINITY && verdict.worst_low <= z[at] && verdict.worst_high >= z[at]);
    model_close(m);
}

static void wrong_rules_are_found(void **state)
{
    (void)state;
    model *m = model_open(1);
    moe4_layer_config wrong = m->config;
    moe4_expert no_bias = *m->expert;
    ref_verdict verdict;
    wrong.gate_up = MOE4_GATE_UP_GATE_FIRST;
    ref_check_intermediate(&wrong, m->expert, 1, m->x, m->v_bits, N, &fp32, &verdict);
    assert_true(verdict.n_outside > N * I / 2);
    wrong = m->config;
    wrong.beta.value = 0;
    ref_check_intermediate(&wrong, m->expert, 1, m->x, m->v_bits, N, &fp32, &verdict);
    assert_true(verdict.n_outside > N * I / 2);
    wrong = m->config;
    wrong.alpha.value = 1.7f;
    ref_check_intermediate(&wrong, m->expert, 1, m->x, m->v_bits, N, &fp32, &verdict);
    assert_true(verdict.n_outside > 5);
    no_bias.down.bias = no_bias.gate_up.bias = NULL;
    ref_check_intermediate(&m->config, &no_bias, 1, m->x, m->v_bits, N, &fp32, &verdict);
    assert_true(verdict.n_outside > N * I / 2);
    ref_check_gemm2(&m->config, &no_bias, m->v, m->z_bits, N, &fp32, &verdict);
    assert_true(verdict.n_outside > N * H / 2);
    model_close(m);
}

static void quantized_intermediates(void **state)
{
    (void)state;
    model *m = model_open(4);
    ref_verdict verdict;
    ref_quantize_mxfp8(m->v, N * I, m->codes, m->bytes);
    ref_check_intermediate_mxfp8(&m->config, m->expert, 4, m->x, m->codes, m->bytes, N, &fp32, &verdict);
    passes(&verdict, N * I + N * I / 32);
    int64_t at = 2 * I + 40; /* row 2, second block */
    static const int changes[] = {2, -2, 0x80};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        m->codes[at] ^= 0x80 * (changes[i] == 0x80);
        m->codes[at] = (uint8_t)(m->codes[at] + (changes[i] == 0x80 ? 0 : changes[i]));
        ref_check_intermediate_mxfp8(&m->config, m->expert, 4, m->x, m->codes, m->bytes, N, &fp32, &verdict);
        fails_at(&verdict, 2, 40);
        ref_quantize_mxfp8(m->v, N * I, m->codes, m->bytes);
    }
    static const int byte_changes[] = {1, -1, 0xFF};
    for (size_t i = 0; i < sizeof byte_changes / sizeof *byte_changes; i++) {
        uint8_t kept = m->bytes[3 * 3 + 2];
        m->bytes[3 * 3 + 2] = byte_changes[i] == 0xFF ? 0xFF : (uint8_t)(kept + byte_changes[i]);
        ref_check_intermediate_mxfp8(&m->config, m->expert, 4, m->x, m->codes, m->bytes, N, &fp32, &verdict);
        fails_at(&verdict, 3, 64);
        assert_true(verdict.worst_low == kept && verdict.worst_high == kept);
        m->bytes[3 * 3 + 2] = kept;
    }
    m->codes[at] = 0x7F;
    ref_check_intermediate_mxfp8(&m->config, m->expert, 4, m->x, m->codes, m->bytes, N, &fp32, &verdict);
    fails_at(&verdict, 2, 40);
    model_close(m);
}

/* Blocks whose maximum may round either way: to 448 or 450, which differ in their scale; to the largest bf16 or
 * infinity; to something or nothing. */
static void either_scale_of_an_undecided_maximum(void **state)
{
    (void)state;
    uint8_t codes[32 * 16] = {0}, scales[32], got[32] = {0}, byte;
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = 32;
    config.activation = MOE4_ACTIVATION_IDENTITY;
    memset(scales, 127, sizeof scales);
    codes[0] = codes[16] = 0xA2; /* both rows are x[0] - x[1] */
    const moe4_expert expert = {.gate_up = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    static const struct {
        double x0, x1;
        uint8_t byte, code;
        int64_t n_outside;
    } cases[] = {{449, 0, 127, 0x7E, 0},      {449, 0, 128, 0x76, 0},         {449, 0, 126, 0x7E, 1},
                 {449, 0, 129, 0x6E, 1},      {449, 0, 127, 0x7D, 2},         {449, 0, 128, 0x77, 2},
                 {449, 0, 0xFF, 0, 1},        {0x1.FFp127, 0, 247, 0x7E, 2},  {0x1.FFp127, 0, 247, 0x78, 0},
                 {0x1.FFp127, 0, 0xFF, 0, 0}, {0x1.FFp127, 0, 248, 0x70, 1},  {1, 1, 0, 0, 0},
                 {1, 1, 110, 0, 1},           {-0x1.FFp127, 0, 247, 0xF8, 0}, {-0x1.FFp127, 0, 247, 0xFE, 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const double x[32] = {cases[i].x0, cases[i].x1};
        ref_verdict verdict;
        byte = cases[i].byte;
        got[0] = got[1] = cases[i].code;
        ref_check_intermediate_mxfp8(&config, &expert, 0, x, got, &byte, 1, &fp32, &verdict);
        if (verdict.n_outside != cases[i].n_outside)
            fail_msg("case %zu: %lld outside", i, (long long)verdict.n_outside);
    }
}

/* Scales so small that their difference is lost beside 1, and values that are surely infinite. */
static void fp8_scales_at_the_ends(void **state)
{
    (void)state;
    uint8_t codes[32 * 16] = {0x02}, scales[32], got[32] = {0};
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = config.intermediate_size = 32;
    config.activation = MOE4_ACTIVATION_IDENTITY;
    memset(scales, 127, sizeof scales);
    const moe4_expert expert = {.gate_up = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    double x[32] = {0x1.5p-70};
    ref_verdict verdict;
    float scale = 0x1.5p-70f / 448;
    got[0] = 0x7E;
    ref_check_intermediate_fp8(&config, &expert, 0, x, got, &scale, 1, &fp32, &verdict);
    passes(&verdict, 33);
    scale *= 1.01f;
    ref_check_intermediate_fp8(&config, &expert, 0, x, got, &scale, 1, &fp32, &verdict);
    fails_at(&verdict, 0, 0);
    x[0] = 0x1.FFFFp127;
    scale = FLT_MAX / 448;
    ref_check_intermediate_fp8(&config, &expert, 0, x, got, &scale, 1, &fp32, &verdict);
    fails_at(&verdict, 0, 0);
    scale = NAN;
    ref_check_intermediate_fp8(&config, &expert, 0, x, got, &scale, 1, &fp32, &verdict);
    passes(&verdict, 1);
}

static void fp8_intermediates(void **state)
{
    (void)state;
    model *m = model_open(4);
    ref_verdict verdict;
    for (int j = 0; j < N; j++) ref_quantize_fp8(m->v + j * I, I, m->codes + j * I, &m->scales[j]);
    ref_check_intermediate_fp8(&m->config, m->expert, 4, m->x, m->codes, m->scales, N, &fp32, &verdict);
    passes(&verdict, N * I + N);
    m->codes[3 * I + 50] = (uint8_t)(m->codes[3 * I + 50] + 2);
    ref_check_intermediate_fp8(&m->config, m->expert, 4, m->x, m->codes, m->scales, N, &fp32, &verdict);
    fails_at(&verdict, 3, 50);
    m->scales[1] *= 1.01f;
    m->codes[3 * I + 50] = (uint8_t)(m->codes[3 * I + 50] - 2);
    ref_check_intermediate_fp8(&m->config, m->expert, 4, m->x, m->codes, m->scales, N, &fp32, &verdict);
    fails_at(&verdict, 1, 0);
    m->scales[1] = NAN;
    ref_check_intermediate_fp8(&m->config, m->expert, 4, m->x, m->codes, m->scales, N, &fp32, &verdict);
    fails_at(&verdict, 1, 0);
    model_close(m);
}

static void nan_must_appear_where_it_belongs(void **state)
{
    (void)state;
    model *m = model_open(6);
    ref_verdict verdict;
    m->x[2 * H + 7] = NAN; /* row 2 is lost, the others are not */
    model_intermediate(m, 6);
    ref_check_intermediate(&m->config, m->expert, 6, m->x, m->v_bits, N, &fp32, &verdict);
    passes(&verdict, N * I);
    m->v_bits[2 * I + 9] = 0;
    ref_check_intermediate(&m->config, m->expert, 6, m->x, m->v_bits, N, &fp32, &verdict);
    fails_at(&verdict, 2, 9);
    assert_true(isnan(verdict.worst_low) && isnan(verdict.worst_high) && verdict.worst_ratio == DBL_MAX);
    ref_quantize_mxfp8(m->v, N * I, m->codes, m->bytes);
    assert_int_equal(m->bytes[2 * 3], 0xFF);
    ref_check_intermediate_mxfp8(&m->config, m->expert, 6, m->x, m->codes, m->bytes, N, &fp32, &verdict);
    passes(&verdict, (N - 1) * I + N * 3); /* codes under a NaN scale are not looked at */
    m->bytes[2 * 3 + 1] = 120;
    ref_check_intermediate_mxfp8(&m->config, m->expert, 6, m->x, m->codes, m->bytes, N, &fp32, &verdict);
    fails_at(&verdict, 2, 32);
    model_gemm2(m);
    ref_check_gemm2(&m->config, m->expert, m->v, m->z_bits, N, &fp32, &verdict);
    passes(&verdict, N * H);
    m->z_bits[2 * H] = 0x7F80;
    ref_check_gemm2(&m->config, m->expert, m->v, m->z_bits, N, &fp32, &verdict);
    fails_at(&verdict, 2, 0);
    model_close(m);
}

static void infinities_must_match(void **state)
{
    (void)state;
    model *m = model_open(6);
    ref_verdict verdict;
    m->config.activation = MOE4_ACTIVATION_SILU;
    m->config.limit = (moe4_param)MOE4_PARAM_INIT;
    m->x[H + 3] = INFINITY; /* gates and ups become +-inf, or NaN where the weight is 0 */
    model_intermediate(m, 6);
    int infinite = 0, not_numbers = 0;
    for (int i = 0; i < I; i++) infinite += isinf(m->v[I + i]) != 0, not_numbers += isnan(m->v[I + i]);
    assert_true(infinite > 10 && not_numbers > 10);
    ref_check_intermediate(&m->config, m->expert, 6, m->x, m->v_bits, N, &fp32, &verdict);
    passes(&verdict, N * I);
    int64_t at = I;
    while (!isinf(m->v[at])) at++;
    ref_quantize_mxfp8(m->v, N * I, m->codes, m->bytes);
    ref_check_intermediate_mxfp8(&m->config, m->expert, 6, m->x, m->codes, m->bytes, N, &fp32, &verdict);
    assert_true(m->bytes[3 + (at - I) / 32] == 0xFF && verdict.n_outside == 0);
    for (int j = 0; j < N; j++) ref_quantize_fp8(m->v + j * I, I, m->codes + j * I, &m->scales[j]);
    ref_check_intermediate_fp8(&m->config, m->expert, 6, m->x, m->codes, m->scales, N, &fp32, &verdict);
    assert_true(isnan(m->scales[1]) && verdict.n_outside == 0);
    m->scales[1] = 1;
    ref_check_intermediate_fp8(&m->config, m->expert, 6, m->x, m->codes, m->scales, N, &fp32, &verdict);
    fails_at(&verdict, 1, 0);
    m->v_bits[at] ^= 0x8000;
    ref_check_intermediate(&m->config, m->expert, 6, m->x, m->v_bits, N, &fp32, &verdict);
    fails_at(&verdict, 1, at - I);
    m->v_bits[at] = 0x7F7F;
    ref_check_intermediate(&m->config, m->expert, 6, m->x, m->v_bits, N, &fp32, &verdict);
    fails_at(&verdict, 1, at - I);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fp32_passes_under_every_activation_and_order),
        cmocka_unit_test(one_wrong_bit_is_found),
        cmocka_unit_test(wrong_rules_are_found),
        cmocka_unit_test(quantized_intermediates),
        cmocka_unit_test(either_scale_of_an_undecided_maximum),
        cmocka_unit_test(fp8_intermediates),
        cmocka_unit_test(fp8_scales_at_the_ends),
        cmocka_unit_test(nan_must_appear_where_it_belongs),
        cmocka_unit_test(infinities_must_match),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
