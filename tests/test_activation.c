/* Activations: accuracy over the floats, and equal bits on every instruction set.
 *
 *   test_activation                            a dense sample
 *   test_activation --exhaustive [CONFIG]      every float as gate, and as up where that matters: about an hour, or
 *                                              minutes for one row of sample_configs */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/convert.h"
#include "cpu/activation.h"
#include "cpu/isa.h"
#include "fixture.h"
#include "ref.h"

enum { CHUNK = 4096 };

static const double worst_allowed = 0.51; /* ulp, as activation.h promises */

/* The best of the levels here; all give the same bits. */
static const struct activation_kernels *best_kernels(void)
{
    moe4_isa levels[MAX_LEVELS];
    return activation_kernels_for(levels[isa_levels(levels) - 1]);
}

static struct random rng = {1};

static float random_between(float low, float high)
{
    return low + (high - low) * (float)((double)(random_bits(&rng) >> 11) * 0x1p-53);
}

/* ---- Configs ---- */

/* clang-format off */
#define ABSENT {MOE4_ABSENT, 0.0f, 0}
#define SAME(x) {MOE4_SAME, x, 0}
/* clang-format on */

static const struct sample_config {
    moe4_activation activation;
    moe4_param alpha, beta, limit;
} sample_configs[] = {
    {MOE4_ACTIVATION_SILU, ABSENT, ABSENT, ABSENT},
    {MOE4_ACTIVATION_SILU, ABSENT, ABSENT, SAME(10.0f)},
    {MOE4_ACTIVATION_SWIGLU_OAI, SAME(1.702f), SAME(1.0f), SAME(7.0f)},
    {MOE4_ACTIVATION_SWIGLU_OAI, SAME(1.702f), SAME(1.0f), ABSENT},
    {MOE4_ACTIVATION_SWIGLU_OAI, SAME(-0.3f), SAME(-2.5f), SAME(1e30f)},
    {MOE4_ACTIVATION_SWIGLU_OAI, SAME(0.0f), ABSENT, ABSENT},
    {MOE4_ACTIVATION_SWIGLU_OAI, SAME(3e38f), SAME(1e-30f), ABSENT},
    {MOE4_ACTIVATION_SITU, SAME(4.0f), SAME(25.0f), ABSENT},
    {MOE4_ACTIVATION_SITU, SAME(4.0f), ABSENT, ABSENT},
    {MOE4_ACTIVATION_SITU, SAME(1.0f), SAME(1.0f), SAME(0.75f)},
    {MOE4_ACTIVATION_SITU, SAME(1e-30f), SAME(3e38f), ABSENT},
    {MOE4_ACTIVATION_GEGLU, ABSENT, ABSENT, ABSENT},
    {MOE4_ACTIVATION_GEGLU, SAME(1.7f), SAME(1.0f), SAME(7.0f)},
    {MOE4_ACTIVATION_GEGLU, SAME(-1e-20f), ABSENT, ABSENT},
    {MOE4_ACTIVATION_GEGLU_TANH, ABSENT, ABSENT, ABSENT},
    {MOE4_ACTIVATION_GEGLU_TANH, SAME(-0.7f), SAME(1.0f), SAME(7.0f)},
    {MOE4_ACTIVATION_SWIGLU_STEP, ABSENT, ABSENT, SAME(7.0f)},
    {MOE4_ACTIVATION_SWIGLU_STEP, ABSENT, ABSENT, ABSENT},
    {MOE4_ACTIVATION_RELU2, ABSENT, ABSENT, ABSENT},
    {MOE4_ACTIVATION_IDENTITY, ABSENT, ABSENT, ABSENT},
};
enum { N_CONFIGS = sizeof sample_configs / sizeof *sample_configs };

static moe4_layer_config config_of(const struct sample_config *sample)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.activation = sample->activation;
    config.alpha = sample->alpha;
    config.beta = sample->beta;
    config.limit = sample->limit;
    config.gate_up = activation_has_gate(sample->activation) ? MOE4_GATE_UP_INTERLEAVED : MOE4_GATE_UP_NONE;
    return config;
}

/* ---- Accuracy ---- */

/* The distance of v from the exact value in ulps of the latter; infinities count as 2^128. */
static double ulps(float v, double exact)
{
    int exponent;
    double magnitude = fmin(fabs(exact), 0x1p128), got = isinf(v) ? copysign(0x1p128, v) : (double)v;
    frexp(magnitude < FLT_MIN ? FLT_MIN : magnitude > FLT_MAX ? FLT_MAX : magnitude, &exponent);
    return fabs(got - copysign(magnitude, exact)) / ldexp(1.0, exponent - FLT_MANT_DIG);
}

/* Compares one level's results on CHUNK points with the oracle; returns the worst distance. */
static double compare(const moe4_layer_config *config, const float *gate, const float *up, const float *v)
{
    double worst = 0.0;
    for (int i = 0; i < CHUNK; i++) {
        double exact = ref_activation(config, 0, gate[i], up[i]);
        if (isnan(exact) || isnan(v[i])) {
            if (isnan(exact) && f32_bits(v[i]) == 0x7FC00000u) continue;
            fail_msg("activation %s, gate %a, up %a: got %a (%08x), expected %a", activation_name(config->activation),
                     gate[i], up[i], v[i], f32_bits(v[i]), exact);
        }
        double distance = ulps(v[i], exact);
        if (distance > worst) worst = distance;
        if (distance > worst_allowed)
            fail_msg("activation %s, gate %a, up %a: got %a, expected %a, %g ulp", activation_name(config->activation),
                     gate[i], up[i], v[i], exact, distance);
    }
    return worst;
}

/* Chunks of 4096: every sign, exponent and leading mantissa bits as gate, four times, then the range where things
 * happen. */
static float sample_gate(int chunk, int i)
{
    if (chunk < 64) return f32_from_bits((uint32_t)(chunk * CHUNK + i) << 16 | (uint32_t)(random_bits(&rng) & 0xFFFF));
    return random_between(-40.0f, 40.0f);
}

static float sample_up(void)
{
    static const float some[] = {0.0f,  -0.0f,  1.0f,   -1.0f,      7.0f,    -7.0f,    1e-45f, -1e-40f,
                                 1e38f, -3e38f, 1e-20f, 16777216.f, FLT_MAX, -FLT_MAX, FLT_MIN};
    uint64_t choice = random_bits(&rng) % 40;
    if (choice < sizeof some / sizeof *some) return some[choice];
    if (choice < 30) return random_between(-30.0f, 30.0f);
    float up = f32_from_bits((uint32_t)random_bits(&rng));
    return isinf(up) ? 1.0f : up;
}

static void accurate_on_a_dense_sample(void **state)
{
    (void)state;
    static float gate[CHUNK], up[CHUNK], v[CHUNK];
    const struct activation_kernels *kernels = best_kernels();
    double worst = 0.0;
    for (int c = 0; c < N_CONFIGS; c++) {
        moe4_layer_config config = config_of(&sample_configs[c]);
        struct activation_params params = activation_resolve(&config, 0);
        for (int chunk = 0; chunk < 80; chunk++) {
            for (int i = 0; i < CHUNK; i++) {
                gate[i] = sample_gate(chunk, i);
                up[i] = sample_up();
            }
            kernels->run[config.activation](gate, up, CHUNK, &params, v);
            worst = fmax(worst, compare(&config, gate, up, v));
        }
    }
    assert_true(worst > 0.49); /* else nothing was measured */
}

/* Values computed with 60 digits by an arbitrary-precision program. */
static void known_values(void **state)
{
    (void)state;
    static const struct {
        moe4_activation activation;
        float gate, up;
        struct activation_params params;
        double expected;
    } points[] = {
        {MOE4_ACTIVATION_SILU, 1.5f, -2.25f, {1.0f, -0.0f, INFINITY}, -2.7593138571535474},
        {MOE4_ACTIVATION_SILU, -80.0f, 3.0f, {1.0f, -0.0f, INFINITY}, -4.3316433308289964e-33},
        {MOE4_ACTIVATION_SILU, 1e-30f, 1e-05f, {1.0f, -0.0f, INFINITY}, 4.9999998895447597e-36},
        {MOE4_ACTIVATION_SILU, -100.0f, 2.0f, {1.0f, -0.0f, INFINITY}, -7.4401519520416719e-42},
        {MOE4_ACTIVATION_SWIGLU_OAI, 0.7f, -1.3f, {1.702f, 1.0f, 7.0f}, -0.16106815698765017},
        {MOE4_ACTIVATION_SWIGLU_OAI, -20.0f, 5.0f, {1.702f, 1.0f, 7.0f}, -1.9760452779677633e-13},
        {MOE4_ACTIVATION_SWIGLU_OAI, 30.0f, -30.0f, {1.702f, 1.0f, 7.0f}, -41.999718769863083},
        {MOE4_ACTIVATION_SWIGLU_OAI, -3.0f, 2.0f, {-0.5f, 0.25f, INFINITY}, -5.5186277143070947},
        {MOE4_ACTIVATION_SITU, 6.0f, 40.0f, {4.0f, 25.0f, INFINITY}, 83.218390479500871},
        {MOE4_ACTIVATION_SITU, -2.0f, 0.001f, {4.0f, 25.0f, INFINITY}, -0.00022034287219599846},
        {MOE4_ACTIVATION_SITU, -0.001f, -30.0f, {4.0f, INFINITY, INFINITY}, 0.014992500400030521},
        {MOE4_ACTIVATION_SITU, 1e-20f, 1e-10f, {4.0f, 25.0f, INFINITY}, 4.9999999080847704e-31},
        {MOE4_ACTIVATION_GEGLU, 0.3f, 1.7f, {1.0f, -0.0f, INFINITY}, 0.31513484899670652},
        {MOE4_ACTIVATION_GEGLU, -5.0f, 2.0f, {1.0f, -0.0f, INFINITY}, -2.8665157187919391e-6},
        {MOE4_ACTIVATION_GEGLU, -12.5f, -3.0f, {1.0f, 0.5f, INFINITY}, 1.1664263433992854e-34},
        {MOE4_ACTIVATION_GEGLU, 2.0f, 1.0f, {1.5f, -0.0f, INFINITY}, 1.9973002039367398},
        {MOE4_ACTIVATION_GEGLU_TANH, 0.3f, 1.7f, {1.0f, -0.0f, INFINITY}, 0.31513059370225716},
        {MOE4_ACTIVATION_GEGLU_TANH, -5.0f, 2.0f, {1.0f, -0.0f, INFINITY}, -4.5835923932590141e-7},
        {MOE4_ACTIVATION_GEGLU_TANH, 3.0f, -2.0f, {1.0f, -0.0f, INFINITY}, -5.992725215836454},
        {MOE4_ACTIVATION_SWIGLU_STEP, 9.0f, 8.0f, {1.0f, -0.0f, 7.0f}, 49.0},
        {MOE4_ACTIVATION_SWIGLU_STEP, -1.25f, -9.0f, {1.0f, -0.0f, 7.0f}, 1.9486262147214525},
        {MOE4_ACTIVATION_SWIGLU_STEP, 9.0f, 8.0f, {1.0f, -0.0f, INFINITY}, 71.991115590528991},
        {MOE4_ACTIVATION_RELU2, 0.0f, 3.0f, {1.0f, -0.0f, INFINITY}, 9.0},
        {MOE4_ACTIVATION_RELU2, 0.0f, -3.0f, {1.0f, -0.0f, INFINITY}, 0.0},
        {MOE4_ACTIVATION_IDENTITY, 0.0f, -3.0f, {1.0f, -0.0f, INFINITY}, -3.0},
    };
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int l = 0; l < n_levels; l++)
        for (size_t p = 0; p < sizeof points / sizeof *points; p++) {
            float v;
            const float *gate = activation_has_gate(points[p].activation) ? &points[p].gate : NULL;
            activation_kernels_for(levels[l])->run[points[p].activation](gate, &points[p].up, 1, &points[p].params, &v);
            if (!(ulps(v, points[p].expected) <= worst_allowed))
                fail_msg("point %zu on %s: got %.9g, expected %.17g", p, isa_name(levels[l]), (double)v,
                         points[p].expected);
        }
}

/* ---- NaN, infinities, zeros, clamps ---- */

static float one(const struct sample_config *sample, float gate, float up)
{
    moe4_layer_config config = config_of(sample);
    struct activation_params params = activation_resolve(&config, 0);
    float v;
    activation_c.run[config.activation](&gate, &up, 1, &params, &v);
    return v;
}

/* A limit never hides a NaN. */
static void nan_reaches_the_result(void **state)
{
    (void)state;
    for (int c = 0; c < N_CONFIGS; c++) {
        const struct sample_config *sample = &sample_configs[c];
        assert_true(isnan(one(sample, 1.0f, NAN)));
        assert_true(isnan(one(sample, 1.0f, -NAN)));
        if (activation_has_gate(sample->activation)) assert_true(isnan(one(sample, NAN, 1.0f)));
    }
}

static void infinities_follow_the_formula(void **state)
{
    (void)state;
    static const float values[] = {INFINITY, -INFINITY, 2.0f, -2.0f, 0.0f, 1e20f, -30.0f};
    enum { N = sizeof values / sizeof *values };
    for (int c = 0; c < N_CONFIGS; c++) {
        moe4_layer_config config = config_of(&sample_configs[c]);
        for (int i = 0; i < N * N; i++) {
            float gate = values[i / N], up = values[i % N], v = one(&sample_configs[c], gate, up);
            double expected = ref_activation(&config, 0, gate, up);
            if (isnan(expected) ? !isnan(v) : !(ulps(v, expected) <= worst_allowed))
                fail_msg("config %d, gate %g, up %g: got %g, expected %g", c, (double)gate, (double)up, (double)v,
                         expected);
        }
    }
}

/* A zero keeps the sign of its product. */
static void zeros_keep_their_sign(void **state)
{
    (void)state;
    static const moe4_activation gated[] = {MOE4_ACTIVATION_SILU,       MOE4_ACTIVATION_SWIGLU_OAI,
                                            MOE4_ACTIVATION_SITU,       MOE4_ACTIVATION_GEGLU,
                                            MOE4_ACTIVATION_GEGLU_TANH, MOE4_ACTIVATION_SWIGLU_STEP};
    static const float zeros[] = {0.0f, -0.0f};
    for (size_t a = 0; a < sizeof gated / sizeof *gated; a++) {
        struct sample_config sample = {gated[a], ABSENT, ABSENT, ABSENT};
        if (gated[a] == MOE4_ACTIVATION_SITU) sample.alpha = (moe4_param)SAME(4.0f);
        for (int g = 0; g < 2; g++)
            for (int u = 0; u < 2; u++) {
                assert_int_equal(!!signbit(one(&sample, zeros[g], zeros[u])), g != u);
                assert_int_equal(!!signbit(one(&sample, zeros[g], u ? -3.0f : 3.0f)), g != u);
            }
    }
    struct sample_config situ = {MOE4_ACTIVATION_SITU, SAME(4.0f), SAME(25.0f), ABSENT};
    assert_true(signbit(one(&situ, -0.0f, 1.0f)) && signbit(one(&situ, 1.0f, -0.0f)));
    assert_false(signbit(one(&situ, -0.0f, -0.0f)));
}

static void limits_clamp_before_the_product(void **state)
{
    (void)state;
    const struct sample_config limited = {MOE4_ACTIVATION_SILU, ABSENT, ABSENT, SAME(10.0f)};
    const struct sample_config unlimited = {MOE4_ACTIVATION_SILU, ABSENT, ABSENT, ABSENT};
    const struct sample_config infinite = {MOE4_ACTIVATION_SILU, ABSENT, ABSENT, SAME(INFINITY)};
    assert_float_equal(one(&limited, 12.0f, -15.0f), one(&unlimited, 10.0f, -10.0f), 0.0);
    assert_float_equal(one(&limited, 12.0f, 15.0f), one(&unlimited, 10.0f, 10.0f), 0.0);
    assert_float_equal(one(&limited, -12.0f, 1.0f), one(&unlimited, -12.0f, 1.0f),
                       0.0); /* the gate's upper side only */
    assert_float_equal(one(&infinite, 1e10f, -1e10f), -1e20, 1e14);
    assert_float_equal(one(&unlimited, 1e10f, -1e10f), -1e20, 1e14);
}

static void beta_is_added_to_up(void **state)
{
    (void)state;
    const struct sample_config none = {MOE4_ACTIVATION_SWIGLU_OAI, SAME(1.702f), ABSENT, SAME(7.0f)};
    const struct sample_config zero = {MOE4_ACTIVATION_SWIGLU_OAI, SAME(1.702f), SAME(0.0f), SAME(7.0f)};
    const struct sample_config by_one = {MOE4_ACTIVATION_SWIGLU_OAI, SAME(1.702f), SAME(1.0f), SAME(7.0f)};
    assert_float_equal(one(&none, 0.5f, 2.0f), one(&zero, 0.5f, 2.0f), 0.0);
    assert_float_equal(one(&by_one, 0.5f, 2.0f), one(&zero, 0.5f, 3.0f), 0.0);
    assert_float_equal(one(&by_one, 0.5f, 7.0f), one(&zero, 0.5f, 7.0f) * 8.0 / 7.0, 1e-6); /* after the clamp */
}

/* ---- Instruction sets ---- */

static float any_float(void)
{
    uint64_t bits = random_bits(&rng);
    if (bits >> 60) return f32_from_bits((uint32_t)bits);
    static const uint32_t special[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000,
                                       0x7F800001, 0xFFABCDEF, 0,          1u << 31};
    return f32_from_bits(special[bits & 7]);
}

static void same_bits_on_every_level(void **state)
{
    (void)state;
    static float gate[CHUNK], up[CHUNK], expected[CHUNK], v[CHUNK];
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int repeat = 0; repeat < 8; repeat++)
        for (int c = 0; c < N_CONFIGS; c++) {
            moe4_layer_config config = config_of(&sample_configs[c]);
            struct activation_params params = activation_resolve(&config, 0);
            for (int i = 0; i < CHUNK; i++) {
                gate[i] = repeat & 1 ? random_between(-100.0f, 100.0f) : any_float();
                up[i] = repeat & 2 ? random_between(-100.0f, 100.0f) : any_float();
            }
            activation_kernels_for(levels[0])->run[config.activation](gate, up, CHUNK, &params, expected);
            for (int l = 1; l < n_levels; l++) {
                activation_kernels_for(levels[l])->run[config.activation](gate, up, CHUNK, &params, v);
                for (int i = 0; i < CHUNK; i++)
                    if (f32_bits(v[i]) != f32_bits(expected[i]))
                        fail_msg("%s, gate %a, up %a: %a on %s, %a on %s", activation_name(config.activation), gate[i],
                                 up[i], v[i], isa_name(levels[l]), expected[i], isa_name(levels[0]));
            }
        }
}

/* An element's result does not depend on where it stands, and nothing is written past the end. */
static void any_length(void **state)
{
    (void)state;
    enum { MOST = 67 };
    float gate[MOST], up[MOST], alone[MOST], v[MOST + 1];
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int l = 0; l < n_levels; l++)
        for (int c = 0; c < N_CONFIGS; c++) {
            moe4_layer_config config = config_of(&sample_configs[c]);
            struct activation_params params = activation_resolve(&config, 0);
            activation_fn *run = activation_kernels_for(levels[l])->run[config.activation];
            for (int i = 0; i < MOST; i++) {
                gate[i] = random_between(-9.0f, 9.0f);
                up[i] = random_between(-9.0f, 9.0f);
                run(&gate[i], &up[i], 1, &params, &alone[i]);
            }
            for (int n = 0; n <= MOST; n++) {
                for (int i = 0; i <= MOST; i++) v[i] = 12345.0f;
                run(gate, up, n, &params, v);
                assert_memory_equal(v, alone, (size_t)n * sizeof *v);
                assert_float_equal(v[n], 12345.0f, 0.0f);
            }
        }
}

static void rounding_to_bf16(void **state)
{
    (void)state;
    enum { N = 1031 };
    float v[N];
    uint16_t rounded[N];
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    for (int repeat = 0; repeat < 64; repeat++) {
        for (int i = 0; i < N; i++) v[i] = any_float();
        v[0] = 0x1.01p0f, v[1] = 0x1.03p0f, v[2] = 0x1.010002p0f, v[3] = FLT_MAX, v[4] = 0x1p-134f; /* ties, ends */
        for (int l = 0; l < n_levels; l++) {
            activation_kernels_for(levels[l])->round(v, N, rounded);
            for (int i = 0; i < N; i++) {
                if (isnan(v[i]))
                    assert_true(isnan(ref_bf16(rounded[i])));
                else
                    assert_int_equal(rounded[i], ref_to_bf16(v[i]));
            }
        }
    }
}

static void levels_of_isas(void **state)
{
    (void)state;
    assert_ptr_equal(activation_kernels_for(MOE4_ISA_C), &activation_c);
#if defined(__x86_64__)
    assert_ptr_equal(activation_kernels_for(MOE4_ISA_AVX2), &activation_avx2);
    assert_ptr_equal(activation_kernels_for(MOE4_ISA_AVX512), &activation_avx512);
    assert_ptr_equal(activation_kernels_for(MOE4_ISA_AVX512_BF16), &activation_avx512);
#endif
}

/* ---- Every float ---- */

/* Runs all floats through one argument; the other takes values up to 8 that differ from float to float. */
static double sweep(const struct sample_config *sample, int sweep_up)
{
    static float every[CHUNK], other[CHUNK], v[CHUNK];
    moe4_layer_config config = config_of(sample);
    struct activation_params params = activation_resolve(&config, 0);
    const float *gate = sweep_up ? other : every, *up = sweep_up ? every : other;
    const struct activation_kernels *kernels = best_kernels();
    double worst = 0.0;
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += CHUNK) {
        for (int i = 0; i < CHUNK; i++) {
            every[i] = f32_from_bits((uint32_t)(first + (uint64_t)i));
            other[i] = random_between(-8.0f, 8.0f);
        }
        kernels->run[config.activation](gate, up, CHUNK, &params, v);
        worst = fmax(worst, compare(&config, gate, up, v));
    }
    return worst;
}

static int first_config, last_config = N_CONFIGS - 1; /* what --exhaustive covers */

static void accurate_everywhere(void **state)
{
    (void)state;
    for (int c = first_config; c <= last_config; c++) {
        moe4_activation activation = sample_configs[c].activation;
        const char *name = activation_name(activation);
        int has_gate = activation_has_gate(activation);
        if (has_gate) print_message("config %d, %s, every gate: %.4f ulp\n", c, name, sweep(&sample_configs[c], 0));
        if (!has_gate || activation == MOE4_ACTIVATION_SITU)
            print_message("config %d, %s, every up: %.4f ulp\n", c, name, sweep(&sample_configs[c], 1));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accurate_on_a_dense_sample),
        cmocka_unit_test(known_values),
        cmocka_unit_test(nan_reaches_the_result),
        cmocka_unit_test(infinities_follow_the_formula),
        cmocka_unit_test(zeros_keep_their_sign),
        cmocka_unit_test(limits_clamp_before_the_product),
        cmocka_unit_test(beta_is_added_to_up),
        cmocka_unit_test(same_bits_on_every_level),
        cmocka_unit_test(any_length),
        cmocka_unit_test(rounding_to_bf16),
        cmocka_unit_test(levels_of_isas),
    };
    const struct CMUnitTest exhaustive[] = {cmocka_unit_test(accurate_everywhere)};
    if (argc > 1 && strcmp(argv[1], "--exhaustive")) return 2;
    if (argc > 2) first_config = last_config = atoi(argv[2]) % N_CONFIGS;
    if (argc > 1) return cmocka_run_group_tests(exhaustive, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
