/* The generator of synthetic weights and inputs: its bits never change, whoever makes which part of them. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "generate.h"
#include "moe4/quant.h"
#include "ref.h"
#include "workload.h"

enum { K = 96, ROWS = 40, H = 1000, T = 50 };

/* Files made by `moe4 synth` rely on these.  The numbers are those of a second program, in Python. */
static void bits_are_pinned(void **state)
{
    (void)state;
    uint64_t key = generate_key(1, GENERATE_DOWN, 2);
    assert_true(key == 0x5ca175e283306bdau);
    assert_true(generate_bits(key, 0) == 0x67cc3053ece35c04u);
    assert_true(generate_bits(key, 1000000007) == 0x78688570f387ce63u);
    assert_true(generate_normal(key, 3) == 0x1.4c8e6ap+0f);
    uint8_t codes[K / 2], scales[K / 32];
    generate_weights(key, 5, 6, K, codes, scales);
    static const uint8_t all_codes[K / 2] = {0x51, 0x96, 0xec, 0x54, 0xba, 0xc4, 0x6d, 0xd8, 0x6e, 0x4a, 0xc6, 0x59,
                                             0x1a, 0xda, 0xbc, 0x1e, 0x38, 0xa2, 0x82, 0x69, 0xa2, 0x19, 0xac, 0x19,
                                             0xc1, 0x91, 0x94, 0x2e, 0x82, 0x32, 0x2a, 0x22, 0xa4, 0x3c, 0x32, 0xba,
                                             0xaa, 0x9b, 0x11, 0x18, 0xea, 0x39, 0x34, 0x25, 0xb8, 0x21, 0x3a, 0x22},
                                       all_scales[K / 32] = {120, 121, 121};
    assert_memory_equal(codes, all_codes, sizeof all_codes);
    assert_memory_equal(scales, all_scales, sizeof all_scales);
}

/* Rows and tokens made one at a time are those made at once. */
static void parts_are_the_whole(void **state)
{
    (void)state;
    uint64_t key = generate_key(9, GENERATE_GATE_UP, 0);
    static uint8_t codes[ROWS * K / 2], scales[ROWS * K / 32], row_codes[K / 2], row_scales[K / 32];
    static uint16_t x[T * H], row[H];
    void (*const makers[])(uint64_t, int64_t, int64_t, int64_t, uint8_t *, uint8_t *) = {generate_weights,
                                                                                         generate_weights_fast};
    for (int maker = 0; maker < 2; maker++) {
        makers[maker](key, 0, ROWS, K, codes, scales);
        for (int64_t r = ROWS - 1; r >= 0; r--) {
            makers[maker](key, r, r + 1, K, row_codes, row_scales);
            assert_memory_equal(row_codes, codes + r * (K / 2), K / 2);
            assert_memory_equal(row_scales, scales + r * (K / 32), K / 32);
        }
    }
    generate_inputs(key, 0, T, H, x);
    for (int64_t t = T - 1; t >= 0; t--) {
        generate_inputs(key, t, t + 1, H, row);
        assert_memory_equal(row, x + t * H, sizeof row);
    }
}

static void normal_is_normal(void **state)
{
    (void)state;
    enum { N = 200000 };
    uint64_t key = generate_key(0, GENERATE_INPUT, 0);
    double sum = 0, squares = 0, fourths = 0, below = 0;
    for (uint64_t i = 0; i < N; i++) {
        double x = generate_normal(key, i);
        sum += x;
        squares += x * x;
        fourths += x * x * x * x;
        below += x < -1.959964;
    }
    assert_true(fabs(sum / N) < 0.01);
    assert_true(fabs(squares / N - 1) < 0.02);
    assert_true(fabs(fourths / N - 3) < 0.15);
    assert_true(fabs(below / N - 0.025) < 0.002);
}

/* Weights have the promised spread: sd 0.02 * e^(sigma^2) = 0.02 * e^0.25 over all rows, the log of a row's sd has sd
 * sigma = 0.5, and 1/sqrt(2K) more from its few elements. */
static void weights_have_their_spread(void **state)
{
    (void)state;
    enum { MANY = 2000 };
    static uint8_t codes[MANY * K / 2], scales[MANY * K / 32];
    static float weights[MANY * K];
    generate_weights(generate_key(3, GENERATE_GATE_UP, 0), 0, MANY, K, codes, scales);
    moe4_mxfp4_dequantize(codes, scales, MANY * (K / 32), weights);
    double squares = 0, logs = 0, log_squares = 0;
    for (int64_t r = 0; r < MANY; r++) {
        double row = 0;
        for (int64_t k = 0; k < K; k++) row += (double)weights[r * K + k] * weights[r * K + k];
        squares += row;
        logs += 0.5 * log(row / K) / MANY;
        log_squares += 0.25 * log(row / K) * log(row / K) / MANY;
    }
    assert_true(fabs(sqrt(squares / (MANY * K)) / (0.02 * exp(0.25)) - 1) < 0.04);
    assert_true(fabs(sqrt(log_squares - logs * logs) - sqrt(0.25 + 0.5 / K)) < 0.01);
}

/* One channel in a hundred is twenty times as large. */
static void inputs_have_outliers(void **state)
{
    (void)state;
    static uint16_t x[T * H];
    int n_large = 0;
    generate_inputs(generate_key(0, GENERATE_INPUT, 0), 0, T, H, x);
    for (int64_t h = 0; h < H; h++) {
        double squares = 0;
        for (int64_t t = 0; t < T; t++) squares += pow(ref_bf16(x[t * H + h]), 2);
        double sd = sqrt(squares / T);
        assert_true((sd > 0.6 && sd < 1.5) || (sd > 12 && sd < 30));
        n_large += sd > 12;
    }
    assert_int_equal(n_large, H / 100);
}

static void orders_are_permutations(void **state)
{
    (void)state;
    int32_t order[100], seen[100] = {0}, n_fixed = 0;
    generate_order(generate_key(0, GENERATE_ROUTER_ORDER, 0), 100, order);
    for (int32_t i = 0; i < 100; i++) {
        assert_in_range(order[i], 0, 99);
        assert_int_equal(seen[order[i]]++, 0);
        n_fixed += order[i] == i;
    }
    assert_true(n_fixed < 8);
}

/* The loads that `moe4 bench --routing` promises, of the first choice of each token. */
static void loads_follow_their_pattern(void **state)
{
    (void)state;
    enum { E = 16, TOKENS = 8000 };
    static float logits[TOKENS * E];
    const double busiest[] = {1.0 / E, 1 / 3.3807, 1.0}; /* 3.38 = 1 + 1/2 + ... + 1/16 */
    for (int pattern = LOAD_UNIFORM; pattern <= LOAD_HOT; pattern++) {
        int32_t load[E] = {0}, most = 0;
        assert_int_equal(workload_logits((load_pattern)pattern, 4, TOKENS, E, logits), 0);
        for (int64_t t = 0; t < TOKENS; t++) {
            int32_t best = 0;
            for (int32_t e = 1; e < E; e++)
                if (logits[t * E + e] > logits[t * E + best]) best = e;
            load[best]++;
        }
        for (int32_t e = 0; e < E; e++) most = load[e] > most ? load[e] : most;
        assert_true(fabs((double)most / TOKENS - busiest[pattern]) < 0.02);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_pinned),
        cmocka_unit_test(parts_are_the_whole),
        cmocka_unit_test(normal_is_normal),
        cmocka_unit_test(weights_have_their_spread),
        cmocka_unit_test(inputs_have_outliers),
        cmocka_unit_test(orders_are_permutations),
        cmocka_unit_test(loads_follow_their_pattern),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
