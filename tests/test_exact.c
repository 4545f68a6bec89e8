/* What must match bit for bit: layers whose sums are exact, the row orders, and experts with scales that only the exact
 * kernel holds. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

static moe4_isa levels[MAX_LEVELS];
static int32_t n_levels;

/* ---- Exact sums ---- */

/* SILU's gates are 18 and more, so that its sigmoid rounds to 1 in f32; the others have no gate. */
static void choose_activation(moe4_layer_config *config, moe4_activation activation, int i)
{
    static const moe4_gate_up orders[] = {MOE4_GATE_UP_INTERLEAVED, MOE4_GATE_UP_GATE_FIRST, MOE4_GATE_UP_UP_FIRST};
    config->activation = activation;
    config->alpha = config->beta = config->limit = (moe4_param)MOE4_PARAM_INIT;
    config->gate_up = activation == MOE4_ACTIVATION_SILU ? orders[i % 3] : MOE4_GATE_UP_NONE;
}

/* fp8 scales of the intermediate are no powers of two: a bias beside one scaled sum would be a second rounding. */
static enum bias_use choose_biases(moe4_activation activation, moe4_compute compute)
{
    const int is_fp8 = compute == MOE4_COMPUTE_FP8;
    if (activation == MOE4_ACTIVATION_SILU) return is_fp8 ? BIAS_GATE_UP : BIAS_BOTH;
    return is_fp8 ? BIAS_NONE : BIAS_DOWN;
}

static void check_exact(int64_t H, int64_t I, moe4_activation activation, const struct call_plan *plan, moe4_isa isa)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, 5, 3);
    struct weight_plan weights = {.data = WEIGHTS_EXACT,
                                  .biases = choose_biases(activation, plan->compute),
                                  .bias_dtype = MOE4_DTYPE_BF16,
                                  .seed = plan->seed};
    choose_activation(&config, activation, (int)plan->seed);
    config.compute = plan->compute;
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call call = call_create(&buffers, &config, plan);
    call.label = "exact mode";
    call_must_run(&buffers, context, layer, &call);
    call_check_exact(&call, experts);
    call_check(&call, experts, isa, 8);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_exact_sums(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{64, 96}, {544, 160}, {96, 608}, {544, 128}};
    static const moe4_activation activations[] = {MOE4_ACTIVATION_SILU, MOE4_ACTIVATION_IDENTITY,
                                                  MOE4_ACTIVATION_RELU2};
    uint64_t seed = 0;
    for (int32_t i = 0; i < n_levels; i++)
        for (int size = 0; size < 4; size++)
            for (int a = 0; a < 3; a++)
                for (int compute = 0; compute < n_computes(); compute++) {
                    if (compute == MOE4_COMPUTE_FP8 && sizes[size][1] > 128) continue; /* more than one scaled sum */
                    if (compute == MOE4_COMPUTE_INT8) continue; /* scales of 2/127; test_int8 has its sums to the bit */
                    struct call_plan plan = {.n_tokens = 29,
                                             .top_k = 3,
                                             .routing = ROUTE_IDS_F32,
                                             .ids = IDS_WILD,
                                             .compute = (moe4_compute)compute,
                                             .data = WEIGHTS_EXACT,
                                             .seed = ++seed};
                    check_exact(sizes[size][0], sizes[size][1], activations[a], &plan, levels[i]);
                }
}

/* ---- Row orders ---- */

/* Gate rows all 1, up rows all 2, x all 1/32: gate 1, up 2.  Exchanged, the activation would be 1.76. */
static void test_gate_and_up_rows(void **state)
{
    (void)state;
    enum { H = 32, I = 32 };
    static const moe4_gate_up orders[] = {MOE4_GATE_UP_INTERLEAVED, MOE4_GATE_UP_GATE_FIRST, MOE4_GATE_UP_UP_FIRST};
    const uint16_t expected = ref_to_bf16(2 / (1 + exp(-1.0)));
    for (int i = 0; i < 3; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        moe4_layer_config config = layer_config(H, I, 1, 1);
        choose_activation(&config, MOE4_ACTIVATION_SILU, i);
        uint8_t codes[2 * I * H / 2], scales[2 * I];
        memset(scales, 127, sizeof scales);
        for (int row = 0; row < 2 * I; row++) {
            int is_up =
                orders[i] == MOE4_GATE_UP_INTERLEAVED ? row % 2 : (row >= I) == (orders[i] == MOE4_GATE_UP_GATE_FIRST);
            memset(codes + row * H / 2, is_up ? 0x44 : 0x22, H / 2);
        }
        moe4_expert expert = {{codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE},
                              {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE}};
        moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
        moe4_layer *layer = layer_open(context, &config, &expert);
        struct call call = call_create(&buffers, &config, &(struct call_plan){.n_tokens = 1});
        uint16_t *x = (uint16_t *)call.batch.x;
        for (int h = 0; h < H; h++) x[h] = ref_to_bf16(1.0 / 32);
        call_must_run(&buffers, context, layer, &call);
        for (int j = 0; j < I; j++) assert_int_equal(((uint16_t *)call.result.intermediate)[j], expected);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
        buffers_release(&buffers);
    }
}

/* ---- Scales at the ends ---- */

enum { EDGE_H = 64, EDGE_I = 96, N_EDGES = 10 };

/* What expert l has in one row: a scale for the whole row, of gate_up or of down. */
static const struct edge {
    int scale, is_down, has_codes, is_exact, is_exact_on_gpu;
} edges[N_EDGES] = {
    {2, 0, 1, 0, 0},   {0, 0, 1, 1, 1},   {1, 0, 1, 1, 1}, {240, 0, 1, 0, 1}, {241, 0, 1, 1, 1},
    {254, 0, 1, 1, 1}, {255, 0, 0, 1, 1}, {0, 1, 1, 1, 1}, {0, 0, 0, 0, 0},   {254, 1, 0, 0, 0},
};

static int64_t edge_row(int l)
{
    return 6 * l + 3;
}

static void set_edges(moe4_expert *experts)
{
    for (int l = 0; l < N_EDGES; l++) {
        moe4_matrix *matrix = edges[l].is_down ? &experts[l].down : &experts[l].gate_up;
        const int64_t K = edges[l].is_down ? EDGE_I : EDGE_H, row = edge_row(l);
        memset((uint8_t *)matrix->scales + row * K / 32, edges[l].scale, (size_t)K / 32);
        if (!edges[l].has_codes) memset((uint8_t *)matrix->codes + row * K / 2, l % 2 ? 0x80 : 0, (size_t)K / 2);
    }
}

/* Two tokens' numbers of three times a power of two, so that tiles hold rows of both kinds. */
static void scale_x(struct call *call, double factor)
{
    uint16_t *x = (uint16_t *)call->batch.x;
    for (int64_t i = 0; i < call->T * EDGE_H; i++)
        if (i / EDGE_H % 3) x[i] = ref_to_bf16(ref_bf16(x[i]) * factor);
}

static void check_edge_values(const struct call *call, double factor)
{
    const moe4_result *result = &call->result;
    for (int64_t p = 0; p < call->R; p++) {
        const int l = result->ids[p], row = result->row_map[p], is_scaled = p / call->A % 3 != 0;
        const double v = ref_bf16(((uint16_t *)result->intermediate)[(int64_t)row * EDGE_I + edge_row(l)]);
        if (edges[l].scale == 255 && !isnan(v)) fail_msg("a NaN scale was lost");
        if (edges[l].scale == 0 && edges[l].has_codes && !edges[l].is_down && is_scaled && factor > 1 && v == 0)
            fail_msg("scale 2^-127 was taken for 0");
    }
}

static void check_edges(moe4_isa isa, moe4_compute compute, double factor)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(EDGE_H, EDGE_I, N_EDGES, 3);
    struct weight_plan weights = {.seed = 5}; /* no biases: nothing to drown small sums in */
    choose_activation(&config, MOE4_ACTIVATION_IDENTITY, 0);
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    set_edges(experts);
    moe4_context *context = context_open(isa, 2);
    moe4_layer *layer = layer_open(context, &config, experts);
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    int n_exact = 0;
    for (int l = 0; l < N_EDGES; l++) n_exact += is_cpu_tested() ? edges[l].is_exact : edges[l].is_exact_on_gpu;
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_int_equal(info.n_exact_experts, n_exact);
    struct call_plan plan = {.n_tokens = 60, .compute = compute, .y_dtype = MOE4_DTYPE_F32, .seed = 3};
    struct call call = call_create(&buffers, &config, &plan);
    call.label = "scales at the ends";
    scale_x(&call, factor);
    call_must_run(&buffers, context, layer, &call);
    if (compute == MOE4_COMPUTE_BF16) check_edge_values(&call, factor);
    /* nothing may be flushed here, whatever the level, but where products are those of scaled weights */
    call_check(&call, experts, isa == MOE4_ISA_AMX ? isa : MOE4_ISA_C, call.R);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* From activations whose sums are just normal numbers to such as overflow. */
static void test_scales_at_the_ends(void **state)
{
    (void)state;
    static const double factors[] = {0x1p-100, 0x1p-60, 1, 0x1p40, 0x1p113, 0x1p119, 0x1p124};
    const double most = is_cpu_tested() ? 0x1p124 : 0x1p113; /* a GPU's partial sums overflow as f32's do */
    for (int32_t i = 0; i < n_levels; i++)
        for (size_t j = 0; j < sizeof factors / sizeof *factors && factors[j] <= most; j++) {
            check_edges(levels[i], MOE4_COMPUTE_BF16, factors[j]);
            if (is_cpu_tested()) check_edges(levels[i], MOE4_COMPUTE_INT8, factors[j]);
        }
}

int main(void)
{
    n_levels = isa_levels(levels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_sums),
        cmocka_unit_test(test_gate_and_up_rows),
        cmocka_unit_test(test_scales_at_the_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
