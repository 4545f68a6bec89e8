/* Where this library decides what other systems leave open, crash on or get silently wrong: the decisions that no other
 * test pins by name.  docs/differences.md lists them all. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"
#include "identity.h"
#include "ref.h"

static moe4_isa levels[MAX_LEVELS];
static int32_t n_levels;

/* ---- Routing ---- */

static void route_row(const moe4_routing *routing, int32_t n_experts, const float *row, int32_t *ids, float *weights)
{
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_logits logits = MOE4_LOGITS_INIT;
    logits.logits = row;
    if (moe4_route(context, routing, n_experts, 1, &logits, NULL, ids, weights))
        fail_msg("%s", moe4_context_message(context));
    moe4_context_destroy(context);
}

static moe4_routing routing_of(moe4_routing_method method, int32_t top_k)
{
    moe4_routing routing = MOE4_ROUTING_INIT;
    routing.method = method;
    routing.top_k = top_k;
    return routing;
}

/* Two biases that are one bf16, with groups and without. */
static void selection_biases_stay_f32(void **state)
{
    (void)state;
    const float logits[8] = {0}, bias[8] = {1, 1.0001f, 1.0002f, 1.0003f, 1.0004f, 1.0005f, 1.0006f, 1.0007f};
    assert_int_equal(ref_to_bf16(bias[0]), ref_to_bf16(bias[7]));
    for (int n_group = 0; n_group <= 2; n_group++) {
        int32_t ids[2];
        float weights[2];
        moe4_routing routing = routing_of(MOE4_ROUTING_DEEPSEEK_V3, 2);
        routing.n_group = n_group;
        routing.topk_group = n_group > 1;
        routing.correction_bias = bias;
        routing.correction_bias_dtype = MOE4_DTYPE_F32;
        route_row(&routing, 8, logits, ids, weights);
        assert_int_equal(ids[0], 7);
        assert_int_equal(ids[1], 6);
    }
}

static void a_missing_bias_is_zero(void **state)
{
    (void)state;
    static const moe4_routing_method biased[] = {MOE4_ROUTING_DEEPSEEK_V3, MOE4_ROUTING_MINIMAX2,
                                                 MOE4_ROUTING_SQRT_SOFTPLUS};
    const float logits[8] = {0.5f, -1, 2, 0.25f, -3, 1.5f, 0, 1}, zeros[8] = {0};
    for (int i = 0; i < 6; i++) {
        int32_t ids[2][3];
        float weights[2][3];
        moe4_routing routing = routing_of(biased[i % 3], 3);
        if (i >= 3 && routing.method == MOE4_ROUTING_DEEPSEEK_V3) routing.n_group = routing.topk_group = 2;
        route_row(&routing, 8, logits, ids[0], weights[0]);
        routing.correction_bias = zeros;
        routing.correction_bias_dtype = MOE4_DTYPE_F32;
        route_row(&routing, 8, logits, ids[1], weights[1]);
        assert_memory_equal(ids[0], ids[1], sizeof ids[0]);
        assert_memory_equal(weights[0], weights[1], sizeof weights[0]);
        assert_int_equal(ids[0][0], 2);
    }
}

/* Far from zero a sigmoid is small, not 0, and near 1, not 1. */
static void sigmoids_are_accurate_at_the_ends(void **state)
{
    (void)state;
    const float logits[3] = {-30, -80, 18};
    int32_t ids[3];
    float weights[3];
    moe4_routing routing = routing_of(MOE4_ROUTING_SIGMOID, 3);
    routing.scaling_factor = 1;
    route_row(&routing, 3, logits, ids, weights);
    assert_int_equal(ids[1], 0);
    assert_float_equal(weights[1], (float)ref_round_bf16(1 / (1 + exp(30.0))), 0);
    assert_float_equal(weights[2], (float)ref_round_bf16(1 / (1 + exp(80.0))), 0);
    assert_true(weights[2] > 0);
}

/* As every method does; and more than 128 experts. */
static void llama4_lets_nan_win(void **state)
{
    (void)state;
    enum { E = 200 };
    float logits[E] = {0}, weight;
    int32_t id;
    moe4_routing routing = routing_of(MOE4_ROUTING_LLAMA4, 1);
    logits[190] = 5;
    route_row(&routing, E, logits, &id, &weight);
    assert_int_equal(id, 190);
    logits[170] = -NAN;
    route_row(&routing, E, logits, &id, &weight);
    assert_int_equal(id, 170);
    assert_true(isnan(weight));
}

/* ---- Experts and ranks ---- */

/* One expert twice in a row of few and of many tokens: both slots count. */
static void duplicates_all_count(void **state)
{
    (void)state;
    enum { T = 20, H = 32 };
    static const int32_t ids[T * 3] = {0};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    moe4_layer *layer = identity_layer(context, H, 3);
    for (int64_t n = 1; n <= T; n += 19) {
        float x[T * H], y[T * H], weights[T * 3];
        for (int i = 0; i < T * H; i++) x[i] = (float)(i % 7 - 3);
        for (int t = 0; t < T; t++) weights[t * 3] = 0.25f, weights[t * 3 + 1] = 0.5f, weights[t * 3 + 2] = 2;
        moe4_batch batch = MOE4_BATCH_INIT;
        moe4_topk topk = MOE4_TOPK_INIT;
        moe4_result result = MOE4_RESULT_INIT;
        batch.n_tokens = n;
        batch.x = x;
        batch.x_dtype = result.y_dtype = MOE4_DTYPE_F32;
        topk.top_k = 3;
        topk.ids = ids;
        topk.weights = weights;
        result.y = y;
        identity_run(context, layer, &batch, &topk, &result);
        for (int i = 0; i < n * H; i++) assert_float_equal(y[i], 2.75f * x[i], 0);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
}

enum { RANKS = 3, RANK_EXPERTS = 4, RANKED_E = RANKS * RANK_EXPERTS, RANKED_T = 23, RANKED_A = 5, RANKED_H = 96 };

/* One rank's part of a deferred call: its rows behind those that are there, its slots of the map. */
static void add_rank(struct buffers *buffers, moe4_context *context, const moe4_layer_config *whole, int rank,
                     moe4_deferred *all, uint16_t *rows, int32_t *map)
{
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    moe4_layer_config config = *whole;
    moe4_expert *experts = weights_create(buffers, whole, &weights);
    config.first_expert = rank * RANK_EXPERTS;
    config.n_local_experts = RANK_EXPERTS;
    moe4_layer *layer = layer_open(context, &config, experts + config.first_expert);
    struct call call = call_create(buffers, &config, &(struct call_plan){.n_tokens = RANKED_T});
    call.result.y = NULL;
    call_must_run(buffers, context, layer, &call);
    const int64_t n = *call.result.n_rows;
    memcpy(rows + all->n_rows * RANKED_H, call.result.gemm2_rows, (size_t)(n * RANKED_H) * sizeof *rows);
    for (int64_t slot = 0; slot < call.R; slot++)
        if (call.result.row_map[slot] >= 0) map[slot] = call.result.row_map[slot] + (int32_t)all->n_rows;
    all->n_rows += n;
    all->weights = call.result.weights;
    moe4_layer_destroy(layer);
}

/* Rows of experts on three ranks, combined by the owner of the tokens: the bits of one rank that has all experts. */
static void ranks_combine_to_the_same_bits(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    moe4_layer_config config = layer_config(RANKED_H, 64, RANKED_E, RANKED_A);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    struct call one = call_create(&buffers, &config, &(struct call_plan){.n_tokens = RANKED_T});
    call_must_run(&buffers, context, layer, &one);
    moe4_layer_destroy(layer);

    static uint16_t rows[RANKED_T * RANKED_A * RANKED_H], y[RANKED_T * RANKED_H];
    int32_t map[RANKED_T * RANKED_A];
    moe4_deferred all = MOE4_DEFERRED_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    for (int rank = 0; rank < RANKS; rank++) add_rank(&buffers, context, &config, rank, &all, rows, map);
    all.n_tokens = RANKED_T;
    all.top_k = RANKED_A;
    all.output_size = RANKED_H;
    all.gemm2_rows = rows;
    all.row_map = map;
    result.y = y;
    assert_int_equal(all.n_rows, RANKED_T * RANKED_A);
    assert_int_equal(moe4_combine(context, &all, &result), MOE4_OK);
    assert_memory_equal(y, one.result.y, sizeof y);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* ---- Activations ---- */

static void a_limit_of_infinity_is_no_limit(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(64, 64, 4, 2);
    struct weight_plan weights = {.seed = 8};
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    struct call calls[3];
    for (int i = 0; i < 3; i++) { /* absent, +inf, a number that matters */
        config.limit = (moe4_param){i ? MOE4_SAME : MOE4_ABSENT, i == 1 ? INFINITY : 0.5f, NULL};
        moe4_layer *layer = layer_open(context, &config, experts);
        calls[i] = call_create(&buffers, &config, &(struct call_plan){.n_tokens = 9});
        call_must_run(&buffers, context, layer, &calls[i]);
        moe4_layer_destroy(layer);
    }
    call_compare(&calls[0], &calls[1]);
    assert_memory_not_equal(calls[0].result.y, calls[2].result.y, calls[0].y_bytes);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* ---- Quantised activations ---- */

static moe4_batch mxfp8_batch(int64_t n_tokens, const void *x)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    batch.n_tokens = n_tokens;
    batch.compute = MOE4_COMPUTE_MXFP8;
    batch.x = x;
    return batch;
}

/* A token with a NaN or an infinity: NaN in its row, not a number that looks sound, and only in its row. */
static void mxfp8_makes_nan_of_what_is_not_finite(void **state)
{
    (void)state;
    enum { T = 4, H = 64 };
    for (int32_t level = 0; level < n_levels; level++) {
        uint16_t x[T * H];
        float y[T * H];
        uint8_t codes[T * H], scales[T * H / 32];
        for (int i = 0; i < T * H; i++) x[i] = ref_to_bf16(i % 5 - 2);
        x[1 * H + 40] = ref_to_bf16(NAN);
        x[2 * H + 3] = ref_to_bf16(-INFINITY);
        moe4_context *context = context_open(levels[level], 1);
        moe4_layer *layer = identity_layer(context, H, 1);
        moe4_batch batch = mxfp8_batch(T, x);
        moe4_result result = MOE4_RESULT_INIT;
        result.y = y;
        result.y_dtype = MOE4_DTYPE_F32;
        result.intermediate = codes;
        result.intermediate_scale = scales;
        identity_pass(context, layer, &batch, &result);
        for (int i = 0; i < T * H; i++)
            if (i / H == 1 || i / H == 2)
                assert_true(isnan(y[i]) && scales[i / 32] == 0xFF && codes[i] == 0);
            else
                assert_float_equal(y[i], ref_bf16(x[i]), 0);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
}

/* The same in fp8 compute, where the caller's scale too may be no number, and infinite is none. */
static void fp8_makes_nan_of_what_is_not_finite(void **state)
{
    (void)state;
    enum { T = 5, H = 160, GROUPS = 2 };
    static const float given[T] = {1, NAN, INFINITY, 0, -0.5f};
    for (int32_t level = 0; level < n_levels; level++)
        for (int is_given = 0; is_given < 2; is_given++) {
            uint16_t x[T * H];
            float y[T * H], scales[T * GROUPS];
            uint8_t x_codes[T * H], codes[T * H];
            for (int i = 0; i < T * H; i++) x[i] = ref_to_bf16(i % 8), x_codes[i] = (uint8_t)ref_to_e4m3(i % 8);
            x[1 * H + 140] = ref_to_bf16(NAN);
            x[2 * H + 3] = ref_to_bf16(-INFINITY);
            moe4_context *context = context_open(levels[level], 1);
            moe4_layer *layer = identity_layer(context, H, 1);
            moe4_batch batch = mxfp8_batch(T, is_given ? (void *)x_codes : (void *)x);
            moe4_result result = MOE4_RESULT_INIT;
            batch.compute = MOE4_COMPUTE_FP8;
            batch.x_dtype = is_given ? MOE4_DTYPE_F8_E4M3 : MOE4_DTYPE_BF16;
            batch.x_scale = is_given ? given : NULL;
            result.y = y;
            result.y_dtype = MOE4_DTYPE_F32;
            result.intermediate = codes;
            result.intermediate_scale = scales;
            identity_pass(context, layer, &batch, &result);
            for (int i = 0; i < T * H; i++) /* 7/448 = 2^-6: what is finite is exact */
                if (i / H == 1 || i / H == 2)
                    assert_true(isnan(y[i]) && isnan(scales[i / H * GROUPS + i % H / 128]) && codes[i] == 0);
                else
                    assert_float_equal(y[i], is_given ? (float)(i % 8) * given[i / H] : (float)(i % 8), 0);
            moe4_layer_destroy(layer);
            moe4_context_destroy(context);
        }
}

/* 1.0625 + 2^-12 lies above the tie between 1 and 1.125; as bf16 it is the tie, and goes to the even code. */
static void the_intermediate_is_bf16_before_it_is_mxfp8(void **state)
{
    (void)state;
    enum { H = 64, I = 32 };
    uint8_t up_codes[I * H / 2] = {0}, up_scales[I * H / 32], down_codes[H * I / 2] = {0}, down_scales[H];
    memset(up_scales, 127, sizeof up_scales);
    memset(down_scales, 127, sizeof down_scales);
    set_code(up_codes, 0, 2), set_code(up_codes, 1, 2), set_code(up_codes, 32, 2); /* row 0: x0 + x1 + x32 */
    set_code(up_codes + H / 2, 2, 2);                                              /* row 1: x2 */
    const moe4_expert expert = {{up_codes, up_scales, 0, 0, NULL, MOE4_DTYPE_NONE},
                                {down_codes, down_scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    uint16_t x[H] = {0};
    x[0] = ref_to_bf16(1), x[1] = ref_to_bf16(0.0625), x[2] = ref_to_bf16(448), x[32] = ref_to_bf16(0x1p-12);
    moe4_layer_config config = layer_config(H, I, 1, 1);
    config.activation = MOE4_ACTIVATION_IDENTITY;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    for (int32_t level = 0; level < n_levels; level++) {
        uint16_t y[H];
        uint8_t codes[I], scale;
        moe4_context *context = context_open(levels[level], 1);
        moe4_layer *layer = layer_open(context, &config, &expert);
        moe4_batch batch = mxfp8_batch(1, x);
        moe4_result result = MOE4_RESULT_INIT;
        result.y = y;
        result.intermediate = codes;
        result.intermediate_scale = &scale;
        identity_pass(context, layer, &batch, &result);
        assert_int_equal(scale, 127);
        assert_int_equal(codes[1], ref_to_e4m3(448));
        assert_int_equal(codes[0], ref_to_e4m3(1));
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
}

/* x' = bf16(x * w), then as if x' had come with weight 1, quantised or not. */
static void weights_on_the_input_come_before_quantisation(void **state)
{
    (void)state;
    enum { T = 3, H = 64 };
    uint16_t x[T * H], weighted[T * H], y[2][T * H];
    const float weights[T] = {0.3f, -1.7f, 5}, ones[T] = {1, 1, 1};
    const int32_t ids[T] = {0};
    for (int i = 0; i < T * H; i++) {
        x[i] = ref_to_bf16(sin(i) * (1 + i % 9));
        weighted[i] = ref_to_bf16((float)((float)ref_bf16(x[i]) * weights[i / H]));
    }
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *layer = identity_layer(context, H, 1);
    for (int compute = MOE4_COMPUTE_BF16; compute <= MOE4_COMPUTE_MXFP8; compute++) {
        for (int i = 0; i < 2; i++) {
            moe4_batch batch = mxfp8_batch(T, i ? weighted : x);
            moe4_topk topk = MOE4_TOPK_INIT;
            moe4_result result = MOE4_RESULT_INIT;
            batch.compute = (moe4_compute)compute;
            topk.top_k = 1;
            topk.ids = ids;
            topk.weights = i ? ones : weights;
            topk.weight_use = i ? MOE4_WEIGHT_ON_OUTPUT : MOE4_WEIGHT_ON_INPUT;
            result.y = y[i];
            identity_run(context, layer, &batch, &topk, &result);
        }
        assert_memory_equal(y[0], y[1], sizeof y[0]);
        if (compute == MOE4_COMPUTE_BF16) assert_memory_equal(y[0], weighted, sizeof weighted);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
}

/* The CPU keeps activations as bf16, which holds e4m3 codes exactly under scale bytes 3..246 alone.  All codes 448,
 * weights 2^-20: finite sums, were it not for the 448 * 2^120 of byte 247.  All codes 2^-9: 2^-134 rounds to 0. */
static void mxfp8_input_beyond_bf16_is_rounded_to_it(void **state)
{
    (void)state;
    enum { H = 32 };
    uint8_t codes[H * H / 2], scales[H], x[H];
    memset(codes, 0x22, sizeof codes);
    const moe4_expert expert = {{codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE},
                                {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
    moe4_layer_config config = layer_config(H, H, 1, 1);
    config.activation = MOE4_ACTIVATION_IDENTITY;
    config.gate_up = MOE4_GATE_UP_NONE;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    static const struct {
        uint8_t scale, code, weight;
        double sum; /* y: 32 * 32 times code * scale * weight^2 */
    } cases[] = {
        {246, 0x7E, 107, 448 * 0x1p119 * 0x1p-30},
        {247, 0x7E, 107, NAN}, /* infinite, and then not finite in an MXFP8 intermediate */
        {2, 0x01, 187, 0},
        {2, 0x02, 187, 0x1p-8 * 0x1p-125 * 0x1p130},
    };
    moe4_context *context = context_open(MOE4_ISA_C, 1); /* whose sums keep subnormals */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float y[H];
        memset(x, cases[i].code, sizeof x);
        memset(scales, cases[i].weight, sizeof scales);
        moe4_layer *layer = layer_open(context, &config, &expert);
        moe4_batch batch = mxfp8_batch(1, x);
        moe4_result result = MOE4_RESULT_INIT;
        batch.x_dtype = MOE4_DTYPE_F8_E4M3;
        batch.x_scale = &cases[i].scale;
        result.y = y;
        result.y_dtype = MOE4_DTYPE_F32;
        identity_pass(context, layer, &batch, &result);
        for (int h = 0; h < H; h++)
            if (y[h] != (float)cases[i].sum && !(isnan(y[h]) && isnan(cases[i].sum)))
                fail_msg("case %zu: y[%d] is %a, expected %a", i, h, (double)y[h], cases[i].sum);
        moe4_layer_destroy(layer);
    }
    moe4_context_destroy(context);
}

int main(void)
{
    n_levels = isa_levels(levels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection_biases_stay_f32),
        cmocka_unit_test(a_missing_bias_is_zero),
        cmocka_unit_test(sigmoids_are_accurate_at_the_ends),
        cmocka_unit_test(llama4_lets_nan_win),
        cmocka_unit_test(duplicates_all_count),
        cmocka_unit_test(ranks_combine_to_the_same_bits),
        cmocka_unit_test(a_limit_of_infinity_is_no_limit),
        cmocka_unit_test(mxfp8_makes_nan_of_what_is_not_finite),
        cmocka_unit_test(fp8_makes_nan_of_what_is_not_finite),
        cmocka_unit_test(the_intermediate_is_bf16_before_it_is_mxfp8),
        cmocka_unit_test(weights_on_the_input_come_before_quantisation),
        cmocka_unit_test(mxfp8_input_beyond_bf16_is_rounded_to_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
