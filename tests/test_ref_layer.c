/* The oracle's GEMMs, experts and sums over slots, and the golden layers that nobody here computed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "golden.h"
#include "ref.h"

static void *allocate(int64_t count, size_t bytes)
{
    void *memory = calloc((size_t)count + 1, bytes);
    assert_non_null(memory);
    return memory;
}

/* ---- Weights ---- */

static void every_code_under_every_scale(void **state)
{
    (void)state;
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    uint8_t codes[16], scale;
    for (int k = 0; k < 16; k++) codes[k] = (uint8_t)(k | (15 - k) << 4); /* low nibble k, high nibble 15 - k */
    const moe4_matrix matrix = {codes, &scale, 0, 0, NULL, MOE4_DTYPE_NONE};
    for (int byte = 0; byte < 256; byte++) {
        scale = (uint8_t)byte;
        float power = byte == 255 ? NAN : (float)ldexp(1, byte - 127);
        for (int k = 0; k < 32; k++) {
            int code = k % 2 ? 15 - k / 2 : k / 2;
            float expected = magnitudes[code & 7] * power * (code & 8 ? -1.0f : 1.0f); /* infinite above f32 */
            double got = ref_weight(&matrix, 32, 0, k);
            if (isnan(expected) ? !isnan(got) : got != expected || !signbit(got) != !signbit(expected))
                fail_msg("code %d scale %d: got %g, expected %g", code, byte, got, (double)expected);
        }
    }
    assert_true(ref_weight(&(moe4_matrix){codes, (const uint8_t[]){254}, 0, 0, NULL, 0}, 32, 0, 14) == INFINITY);
    assert_true(ref_weight(&(moe4_matrix){codes, (const uint8_t[]){0}, 0, 0, NULL, 0}, 32, 0, 2) == 0x1p-128);
}

/* A matrix [3, 64] with padded rows, every code and scale byte different from its neighbours'. */
static const moe4_matrix *padded_matrix(void)
{
    static uint8_t codes[3 * 40], scales[3 * 5];
    static const float bias[3] = {1, -2, 0.5f};
    static const moe4_matrix matrix = {codes, scales, 40, 5, bias, MOE4_DTYPE_F32};
    memset(scales, 0xFF, sizeof scales); /* padding that must not be read */
    for (int row = 0; row < 3; row++) {
        for (int k = 0; k < 32; k++) codes[row * 40 + k] = (uint8_t)(row * 57 + k * 41 + 3);
        for (int b = 0; b < 2; b++) scales[row * 5 + b] = (uint8_t)(124 + row * 2 + b);
    }
    return &matrix;
}

static void gemm_is_a_sum_of_weights(void **state)
{
    (void)state;
    const moe4_matrix *matrix = padded_matrix();
    double x[2 * 64], value[6], magnitude[6], again[6];
    for (int i = 0; i < 128; i++) x[i] = (i * 37 % 64 - 31) / 8.0;
    ref_gemm(matrix, 3, 64, x, 2, value, magnitude);
    ref_gemm(matrix, 3, 64, x, 2, again, NULL);
    assert_memory_equal(value, again, sizeof value);
    for (int j = 0; j < 2; j++)
        for (int row = 0; row < 3; row++) {
            double bias = ((const float *)matrix->bias)[row], sum = bias, absolute = fabs(bias);
            for (int k = 0; k < 64; k++) {
                double product = x[j * 64 + k] * ref_weight(matrix, 64, row, k);
                sum += product; /* exact: small integers over a power of two */
                absolute += fabs(product);
            }
            assert_true(value[j * 3 + row] == sum && magnitude[j * 3 + row] == absolute);
        }
}

static void zero_times_a_nan_scale_is_nan(void **state)
{
    (void)state;
    uint8_t codes[32] = {0}, scales[2] = {127, 0xFF};
    const moe4_matrix matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    double x[64] = {0}, value;
    ref_gemm(&matrix, 1, 64, x, 1, &value, NULL);
    assert_true(isnan(value));
    scales[1] = 0xFE;
    ref_gemm(&matrix, 1, 64, x, 1, &value, NULL);
    assert_true(value == 0);
    codes[16] = 0x04; /* 2 * 2^127 is infinite, however small x */
    x[32] = 0x1p-20;
    ref_gemm(&matrix, 1, 64, x, 1, &value, NULL);
    assert_true(value == INFINITY);
}

/* ---- Experts ---- */

/* Gate rows all 1, up rows all 2, biases 1/2 and 1/4, in every order, in halves of 64 rows of which 32 count. */
static void orders_of_gate_and_up(void **state)
{
    (void)state;
    static const moe4_gate_up orders[] = {MOE4_GATE_UP_INTERLEAVED, MOE4_GATE_UP_GATE_FIRST, MOE4_GATE_UP_UP_FIRST};
    for (int padded = 0; padded < 2; padded++)
        for (int o = 0; o < 3; o++) {
            moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
            config.hidden_size = config.intermediate_size = 32;
            config.stored_intermediate_size = padded ? 64 : 0;
            config.gate_up = orders[o];
            config.activation = MOE4_ACTIVATION_SILU;
            int64_t half = padded ? 64 : 32;
            uint8_t codes[128 * 16], scales[128], down_codes[32 * 16], down_scales[32];
            float bias[128];
            memset(codes, 0x77, sizeof codes);
            memset(scales, 0xFF, sizeof scales);
            memset(down_codes, 0x22, sizeof down_codes); /* 1.0 */
            memset(down_scales, 127, sizeof down_scales);
            for (int i = 0; i < 32; i++)
                for (int up = 0; up < 2; up++) {
                    int64_t row = o == 0 ? 2 * i + up : (o == 1) == up ? half + i : i;
                    memset(codes + row * 16, up ? 0x44 : 0x22, 16); /* 2.0 and 1.0 */
                    scales[row] = 127;
                    bias[row] = up ? 0.25f : 0.5f;
                }
            const moe4_expert expert = {{codes, scales, 0, 0, bias, MOE4_DTYPE_F32},
                                        {down_codes, down_scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
            double x[32] = {0}, v[32], z[32];
            x[5] = 1.5;
            ref_expert(&config, &expert, 0, x, 1, REF_MODE_UNROUNDED, v, z);
            double expected = 2 / (1 + exp(-2)) * 3.25;
            for (int i = 0; i < 32; i++) assert_true(v[i] == expected);
            for (int h = 0; h < 32; h++) assert_true(fabs(z[h] / (32 * expected) - 1) < 1e-15);
        }
}

/* One up row a column, no gate, weights 1 on the diagonal of both matrices: the layer passes x through. */
static void fill_identity(moe4_layer_config *config, moe4_expert *expert, uint8_t *codes, uint8_t *scales)
{
    *config = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    config->hidden_size = config->intermediate_size = 64;
    config->activation = MOE4_ACTIVATION_IDENTITY;
    memset(codes, 0, 64 * 32);
    memset(scales, 127, 64 * 2);
    for (int i = 0; i < 64; i++) codes[i * 32 + i / 2] = i % 2 ? 0x20 : 0x02;
    expert->gate_up = expert->down = (moe4_matrix){codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
}

static void modes_round_the_intermediate(void **state)
{
    (void)state;
    moe4_layer_config config;
    moe4_expert expert;
    uint8_t codes[64 * 32], scales[64 * 2];
    fill_identity(&config, &expert, codes, scales);
    double x[64] = {0}, v[64], z[64];
    x[0] = 1, x[1] = 1 + 0x1p-8 + 0x1p-10, x[33] = 77, x[40] = 448;
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_UNROUNDED, v, z);
    assert_memory_equal(v, x, sizeof x);
    assert_memory_equal(z, x, sizeof x);
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_BF16, v, z);
    assert_true(v[1] == 1 + 0x1p-7 && z[1] == v[1] && v[33] == 77);
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_MXFP8, v, z);
    assert_true(v[0] == 1 && v[1] == 1 && v[33] == 80 && v[40] == 448 && z[33] == 80);
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_FP8, v, z); /* one scale, 1, for all 64 columns */
    assert_true(v[0] == 1 && v[33] == 80 && v[40] == 448 && z[40] == 448);
    x[40] = 896; /* scale 2 in the second block only; in fp8 for all */
    x[1] = 0x1p-9;
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_MXFP8, NULL, z);
    assert_true(z[1] == 0x1p-9 && z[40] == 896);
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_FP8, NULL, z);
    assert_true(z[1] == 0 && z[40] == 896);
}

static void unrounded_tokens_are_double(void **state)
{
    (void)state;
    moe4_layer_config config;
    moe4_expert expert;
    uint8_t codes[64 * 32], scales[64 * 2];
    fill_identity(&config, &expert, codes, scales);
    const moe4_expert *experts[2] = {&expert, &expert};
    const int32_t locals[2] = {0, 0};
    const double weights[2] = {1.0 / 3, 0x1p-40};
    double x[64] = {0.7}, out[64];
    ref_token(&config, experts, locals, 2, weights, x, REF_MODE_UNROUNDED, out);
    assert_true(out[0] == 1.0 / 3 * 0.7 + 0x1p-40 * 0.7 && out[1] == 0);
}

static void fp8_groups_end_at_128_columns(void **state)
{
    (void)state;
    uint8_t codes[160 * 16], scales[160], down_codes[32 * 80] = {0}, down_scales[32 * 5];
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = 32;
    config.intermediate_size = 160;
    config.activation = MOE4_ACTIVATION_IDENTITY;
    memset(codes, 0x22, sizeof codes);
    memset(scales, 127, sizeof scales);
    memset(down_scales, 127, sizeof down_scales);
    scales[127] = 127 + 20; /* the last column of the first group is large */
    const moe4_expert expert = {{codes, scales, 0, 0, NULL, 0}, {down_codes, down_scales, 0, 0, NULL, 0}};
    double x[32] = {1}, v[160], z[32];
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_FP8, v, z);
    assert_true(v[0] == 0 && v[126] == 0 && fabs(v[127] / 0x1p20 - 1) < 1e-6 && fabs(v[128] - 1) < 1e-6);
}

static void exact_sums_round_as_fp32_does(void **state)
{
    (void)state;
    moe4_layer_config config;
    moe4_expert expert;
    uint8_t codes[64 * 32], scales[64 * 2];
    fill_identity(&config, &expert, codes, scales);
    double x[64] = {0}, v[64], z[64];
    x[0] = 1 + 0x1p-8 + 0x1p-40; /* f32 sees a tie and goes to even */
    ref_expert(&config, &expert, 0, x, 1, REF_MODE_BF16, v, z);
    assert_true(v[0] == 1);
}

static void output_may_be_narrower(void **state)
{
    (void)state;
    moe4_layer_config config;
    moe4_expert expert;
    uint8_t codes[64 * 32], scales[64 * 2];
    fill_identity(&config, &expert, codes, scales);
    config.output_size = 10;
    double x[128], z[21];
    for (int i = 0; i < 128; i++) x[i] = i;
    z[20] = -1;
    ref_expert(&config, &expert, 0, x, 2, REF_MODE_BF16, NULL, z);
    for (int i = 0; i < 20; i++) assert_true(z[i] == (i < 10 ? i : 64 + i - 10));
    assert_true(z[20] == -1);
}

/* ---- The sum over slots ---- */

static void combine_is_an_fma_in_slot_order(void **state)
{
    (void)state;
    /* 1 + 2^-23 * 3/2 ... : each step rounds to f32, and a product alone does not. */
    const uint16_t a[1] = {0x3F80}, b[1] = {0x3F81}, c[1] = {0x3F80};
    const uint16_t *rows[3] = {a, b, c};
    const float weights[3] = {1, 0x1.000002p-12f, -1};
    float acc, swapped;
    ref_combine(1, 3, rows, weights, &acc);
    float expected = fmaf(-1, 1, fmaf(0x1.000002p-12f, 1.0078125f, 1));
    assert_true(acc == expected);
    const uint16_t *other[3] = {a, c, b};
    ref_combine(1, 3, other, (const float[]){1, -1, 0x1.000002p-12f}, &swapped);
    assert_true(swapped == 0x1.000002p-12f * 1.0078125f && swapped != acc);
    rows[1] = NULL;
    ref_combine(1, 3, rows, weights, &acc);
    assert_true(acc == 0 && !signbit(acc));
    const uint16_t minus_zero[1] = {0x8000}, *only[1] = {minus_zero};
    ref_combine(1, 1, only, weights, &acc);
    assert_true(acc == 0 && !signbit(acc)); /* +0 + -0 */
    rows[0] = rows[2] = NULL;
    acc = 7;
    ref_combine(1, 3, rows, weights, &acc);
    assert_true(acc == 0 && !signbit(acc));
}

static void fused_product_is_not_rounded(void **state)
{
    (void)state;
    const float w = 1 + 0x1p-23f;
    const uint16_t z[1] = {0x3F81}; /* 1 + 2^-7: the product needs 31 bits */
    const uint16_t minus[1] = {0xBF81}, *rows[2] = {minus, z};
    float acc;
    ref_combine(1, 2, rows, (const float[]){1, w}, &acc);
    assert_true(acc == 0x1p-23f + 0x1p-30f);
}

static void outputs(void **state)
{
    (void)state;
    const float acc = 1 + 0x1p-8f + 0x1p-20f;
    assert_true(ref_output(acc, MOE4_WRITE_OVERWRITE, 99, MOE4_DTYPE_F32) == acc);
    assert_true(ref_output(acc, MOE4_WRITE_OVERWRITE, 99, MOE4_DTYPE_BF16) == 1 + 0x1p-7);
    assert_true(ref_output(acc, MOE4_WRITE_OVERWRITE, 99, MOE4_DTYPE_F16) == 1 + 0x1p-8);
    assert_true(ref_output(acc, MOE4_WRITE_ADD, 2, MOE4_DTYPE_F32) == 3 + 0x1p-8 + 0x1p-20);
    assert_true(ref_output(acc, MOE4_WRITE_ADD, 2, MOE4_DTYPE_BF16) == 3);
    assert_true(ref_output(0x1p-30f, MOE4_WRITE_ADD, 1, MOE4_DTYPE_F32) == 1);
    assert_true(ref_output(70000, MOE4_WRITE_OVERWRITE, 0, MOE4_DTYPE_F16) == INFINITY);
}

/* ---- Golden layers ---- */

static void widen(const uint16_t *from, int64_t n, double *to)
{
    for (int64_t i = 0; i < n; i++) to[i] = ref_bf16(from[i]);
}

/* Experts and local numbers of one token's slots. */
static void token_slots(const golden_layer *layer, int64_t t, const moe4_expert **experts, int32_t *locals)
{
    for (int32_t a = 0; a < layer->config.routing.top_k; a++) {
        locals[a] = layer->topk_ids[t * layer->config.routing.top_k + a];
        experts[a] = &layer->experts[locals[a]];
    }
}

static void golden_router_and_ids(const golden_layer *layer)
{
    int32_t E = layer->config.n_experts, A = layer->config.routing.top_k, ids[8];
    int64_t H = layer->config.hidden_size;
    double *x = allocate(H, sizeof *x), *logits = allocate(E, sizeof *logits), *magnitude = allocate(E, sizeof *x);
    double weights[8];
    for (int64_t t = 0; t < layer->T; t++) {
        widen(layer->hidden_states + t * H, H, x);
        ref_router(&layer->config, x, logits, magnitude);
        for (int32_t e = 0; e < E; e++)
            assert_true(fabs(logits[e] - layer->router_logits[t * E + e]) <= 1e-6 * magnitude[e]);
        ref_route(&layer->config.routing, E, logits, 0, ids, weights);
        for (int32_t a = 0; a < A; a++) {
            assert_int_equal(ids[a], layer->topk_ids[t * A + a]);
            assert_true(fabs(weights[a] - layer->topk_weights[t * A + a]) <= 0x1.01p-8 * weights[a]);
            assert_true(weights[a] == ref_bf16(layer->expert_weights[t * A + a]));
        }
    }
    free(magnitude);
    free(logits);
    free(x);
}

/* transformers computes in f32: only its own rounding separates it from the unrounded oracle. */
static void golden_unrounded(const golden_layer *layer)
{
    int64_t H = layer->config.hidden_size, T = layer->T;
    int32_t A = layer->config.routing.top_k;
    double *x = allocate(H, sizeof *x), *got = allocate(T * H, sizeof *x), *expected = allocate(T * H, sizeof *x);
    for (int64_t t = 0; t < T; t++) {
        const moe4_expert *experts[8];
        int32_t locals[8];
        double weights[8];
        token_slots(layer, t, experts, locals);
        for (int32_t a = 0; a < A; a++) weights[a] = layer->topk_weights[t * A + a];
        widen(layer->hidden_states + t * H, H, x);
        ref_token(&layer->config, experts, locals, A, weights, x, REF_MODE_UNROUNDED, got + t * H);
    }
    for (int64_t i = 0; i < T * H; i++) expected[i] = layer->output[i];
    ref_frobenius frobenius;
    ref_compare(got, expected, T, H, &frobenius);
    double column_limit = T > 1 ? 1e-6 : 1e-3; /* the column of one token is one element, perhaps a cancelled one */
    if (!(frobenius.overall < 2e-7 && frobenius.worst_row < 1e-6 && frobenius.worst_column < column_limit))
        fail_msg("relative error %g, row %g, column %g", frobenius.overall, frobenius.worst_row,
                 frobenius.worst_column);
    free(expected);
    free(got);
    free(x);
}

/* Fails unless 99 % of the bits are equal and the rest one ulp apart; 0 counts as next to either smallest number. */
static void expect_bits(const char *stage, const double *got, const uint16_t *expected, int64_t n)
{
    int64_t unequal = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits = ref_to_bf16(got[i]);
        if (bits == expected[i]) continue;
        unequal++;
        if (abs((int)bits - (int)expected[i]) != 1)
            fail_msg("%s %lld: 0x%04x, expected 0x%04x", stage, (long long)i, bits, expected[i]);
    }
    if (unequal * 100 > n) fail_msg("%s: %lld of %lld differ", stage, (long long)unequal, (long long)n);
}

/* Each stage from the golden stage before, row by row. */
static void golden_rounded(const golden_layer *layer)
{
    int64_t H = layer->config.hidden_size, I = layer->config.intermediate_size, T = layer->T;
    int32_t A = layer->config.routing.top_k;
    double *x = allocate(H, sizeof *x), *v = allocate(T * A * I, sizeof *x), *unused = allocate(H, sizeof *x);
    double *golden_v = allocate(I, sizeof *x), *z = allocate(T * A * H, sizeof *x), *y = allocate(T * H, sizeof *x);
    float *acc = allocate(H, sizeof *acc), weights[8];
    for (int64_t t = 0; t < T; t++) {
        const uint16_t *rows[8];
        widen(layer->hidden_states + t * H, H, x);
        for (int32_t a = 0; a < A; a++) {
            int64_t p = t * A + a, row = layer->row_map[p];
            const moe4_expert *expert = &layer->experts[layer->topk_ids[p]];
            ref_expert(&layer->config, expert, layer->topk_ids[p], x, 1, REF_MODE_BF16, v + row * I, unused);
            widen(layer->intermediate + row * I, I, golden_v);
            ref_gemm(&expert->down, H, I, golden_v, 1, z + row * H, NULL);
            rows[a] = layer->gemm2_rows + row * H;
            weights[a] = (float)ref_bf16(layer->expert_weights[p]);
        }
        ref_combine(H, A, rows, weights, acc);
        for (int64_t h = 0; h < H; h++) y[t * H + h] = acc[h];
    }
    expect_bits("intermediate", v, layer->intermediate, T * A * I);
    expect_bits("gemm2_rows", z, layer->gemm2_rows, T * A * H);
    expect_bits("output", y, layer->rounded_output, T * H);
    free(acc);
    free(y);
    free(z);
    free(golden_v);
    free(unused);
    free(v);
    free(x);
}

static void golden_layers(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        golden_layer *layer = golden_layer_open(golden_layer_names[i]);
        golden_router_and_ids(layer);
        golden_unrounded(layer);
        golden_rounded(layer);
        golden_layer_close(layer);
    }
}

/* With all roundings, a token is its stages one after the other. */
static void token_is_its_stages(void **state)
{
    (void)state;
    golden_layer *layer = golden_layer_open("gptoss_small");
    int64_t H = layer->config.hidden_size;
    double x[64], z[64], out[64], weights[4] = {0.5, 0.25, 1, 3};
    const moe4_expert *experts[8];
    int32_t locals[8];
    token_slots(layer, 3, experts, locals);
    widen(layer->hidden_states + 3 * H, H, x);
    for (int mode = REF_MODE_BF16; mode <= REF_MODE_FP8; mode++) {
        if (mode == REF_MODE_UNROUNDED) continue;
        uint16_t rows[4][64];
        const uint16_t *pointers[4] = {rows[0], rows[1], NULL, rows[3]};
        const float f32_weights[4] = {0.5f, 0.25f, 1, 3};
        float acc[64];
        for (int a = 0; a < 4; a++) {
            ref_expert(&layer->config, experts[a], locals[a], x, 1, (ref_mode)mode, NULL, z);
            for (int64_t h = 0; h < H; h++) rows[a][h] = ref_to_bf16(z[h]);
        }
        const moe4_expert *three[4] = {experts[0], experts[1], NULL, experts[3]};
        ref_token(&layer->config, three, locals, 4, weights, x, (ref_mode)mode, out);
        ref_combine(H, 4, pointers, f32_weights, acc);
        for (int64_t h = 0; h < H; h++) assert_true(out[h] == (double)acc[h]);
    }
    golden_layer_close(layer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_under_every_scale),
        cmocka_unit_test(gemm_is_a_sum_of_weights),
        cmocka_unit_test(zero_times_a_nan_scale_is_nan),
        cmocka_unit_test(orders_of_gate_and_up),
        cmocka_unit_test(modes_round_the_intermediate),
        cmocka_unit_test(unrounded_tokens_are_double),
        cmocka_unit_test(fp8_groups_end_at_128_columns),
        cmocka_unit_test(exact_sums_round_as_fp32_does),
        cmocka_unit_test(output_may_be_narrower),
        cmocka_unit_test(combine_is_an_fma_in_slot_order),
        cmocka_unit_test(fused_product_is_not_rounded),
        cmocka_unit_test(outputs),
        cmocka_unit_test(golden_layers),
        cmocka_unit_test(token_is_its_stages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
