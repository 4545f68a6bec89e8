/* The CUDA backend's packed weights, on the host: every element decodes to what the checkpoint says. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dims.h"
#include "base/mxfp4.h"
#include "cuda/layout.h"
#include "cuda/pack.h"

enum { MAX_ROWS = 160, MAX_K = 160 };

static uint8_t codes[MAX_ROWS * MAX_K / 2], scales[MAX_ROWS * MAX_K / 32];
static uint32_t state = 1;

static uint8_t random_byte(void)
{
    state = state * 1664525u + 1013904223u;
    return (uint8_t)(state >> 24);
}

static moe4_matrix random_matrix(int32_t least, int32_t most)
{
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = random_byte();
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(least + random_byte() % (most - least + 1));
    return (moe4_matrix){.codes = codes, .scales = scales};
}

static float source_weight(int64_t K, int64_t row, int64_t k)
{
    if (row < 0 || k >= K) return 0.0f;
    return e2m1_to_f32(mxfp4_code(codes + row * (K / 2), k)) * e8m0_to_f32(scales[row * (K / 32) + k / 32]);
}

static void check_tiles(const moe4_matrix *matrix, const struct cuda_row_order *order, int64_t K, int32_t base)
{
    static uint8_t packed[3 * CUDA_STEP_BYTES];
    float bias[CUDA_TILE_ROWS];
    for (int64_t tile = 0; tile < cuda_tile_count(order); tile++) {
        memset(packed, 0xA5, sizeof packed);
        cuda_pack_tile(matrix, K, order, tile, base, packed, bias);
        for (int32_t r = 0; r < CUDA_TILE_ROWS; r++)
            for (int64_t k = 0; k < cuda_step_count(K) * CUDA_STEP_K; k++) {
                float expected = source_weight(K, cuda_source_row(order, tile, r), k);
                float got = cuda_step_weight(packed + k / 64 * CUDA_STEP_BYTES, r, (int32_t)(k % 64));
                assert_true(got * ldexpf(1.0f, base) == expected);
            }
    }
}

static void every_element_survives(void **unused)
{
    (void)unused;
    moe4_matrix matrix = random_matrix(100, 128);
    check_tiles(&matrix, &(struct cuda_row_order){0, MOE4_GATE_UP_NONE, 150, 150}, 160, 0);
    check_tiles(&matrix, &(struct cuda_row_order){0, MOE4_GATE_UP_NONE, 64, 64}, 128, 0);
    for (int order = MOE4_GATE_UP_INTERLEAVED; order <= MOE4_GATE_UP_UP_FIRST; order++)
        check_tiles(&matrix, &(struct cuda_row_order){1, (moe4_gate_up)order, 64, 80}, 96, 0);
}

static const struct cuda_row_order plain_64 = {0, MOE4_GATE_UP_NONE, 64, 64};

static void a_base_holds_large_scales(void **unused)
{
    (void)unused;
    moe4_matrix matrix = random_matrix(31, 140);
    int32_t base = cuda_scale_base(&matrix, &plain_64, 160);
    assert_in_range(base, 1, 12);
    check_tiles(&matrix, &(struct cuda_row_order){0, MOE4_GATE_UP_NONE, 64, 64}, 160, base);
}

static void what_cannot_be_held_is_found(void **unused)
{
    (void)unused;
    moe4_matrix matrix = random_matrix(2, 128);
    codes[0] = 0x22;
    scales[0] = 2;
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), 0);
    scales[0] = 1;
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), -1);
    memset(codes, 0x80, 16); /* zeros need no scale */
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), 0);
    scales[0] = SCALE_NAN;
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), -1);
    scales[0] = 16;
    scales[7] = 142;
    codes[7 * 16] = 0x22;
    for (int i = 0; i < 64 * 5; i++)
        if (scales[i] < 16) scales[i] = 16;
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), 14);
    scales[7] = 143;
    for (int i = 0; i < 64 * 5; i++)
        if (scales[i] == 16) scales[i] = 17;
    assert_int_equal(cuda_scale_base(&matrix, &plain_64, 160), -1);
}

static void what_pads_a_half_decides_nothing(void **unused)
{
    (void)unused;
    moe4_matrix matrix = random_matrix(100, 128);
    for (int order = MOE4_GATE_UP_GATE_FIRST; order <= MOE4_GATE_UP_UP_FIRST; order++) {
        struct cuda_row_order padded = {1, (moe4_gate_up)order, 64, 80};
        assert_int_equal(cuda_stored_rows(&padded), 144);
        for (int64_t row = 64; row < 80; row++) memset(scales + row * 5, SCALE_NAN, 5);
        assert_int_equal(cuda_scale_base(&matrix, &padded, 160), 0);
        scales[143 * 5] = SCALE_NAN;
        assert_int_equal(cuda_scale_base(&matrix, &padded, 160), -1);
        scales[143 * 5] = 100;
    }
}

/* The fp8 arrangement: words split to the codes they were joined from, in the places that the kernels' table look-up
 * and sign masks read; every (row, k) of a step is in one word. */
static void fp8_words_hold_every_code(void **unused)
{
    (void)unused;
    for (int i = 0; i < 4096; i++) {
        uint32_t eight = 0;
        for (int b = 0; b < 4; b++) eight |= (uint32_t)random_byte() << 8 * b;
        uint32_t word = fp8_join(eight);
        assert_int_equal(fp8_split(word), eight);
        for (int n = 0; n < 8; n++) {
            uint32_t code = eight >> 4 * n & 15, sign = (n < 4 ? word : word << 4) >> (n % 4 * 8 + 7) & 1;
            assert_int_equal(word >> 4 * n & 7, code & 7);
            assert_int_equal(sign, code >> 3);
        }
    }
    uint8_t seen[CUDA_TILE_ROWS][CUDA_STEP_K] = {{0}};
    for (int32_t thread = 0; thread < 128; thread++)
        for (int32_t j = 0; j < 4; j++)
            for (int32_t n = 0; n < 8; n++) seen[fp8_word_row(thread, j)][fp8_word_k(thread, j) + n % 4 + n / 4 * 16]++;
    for (int32_t i = 0; i < CUDA_TILE_ROWS * CUDA_STEP_K; i++)
        assert_int_equal(seen[i / CUDA_STEP_K][i % CUDA_STEP_K], 1);
}

static void fp8_holds_27_binades(void **unused)
{
    (void)unused;
    assert_true(fp8_holds(100, 126));
    assert_false(fp8_holds(100, 127));
    assert_true(fp8_holds(SCALE_NAN, 0)); /* nothing but zeros */
    assert_false(fp8_holds(120, SCALE_NAN));
    assert_false(fp8_holds(39, 40));
    assert_false(fp8_holds(180, 181));
}

static void every_row_appears_once(void **unused)
{
    (void)unused;
    for (int order = MOE4_GATE_UP_INTERLEAVED; order <= MOE4_GATE_UP_UP_FIRST; order++) {
        struct cuda_row_order gated = {1, (moe4_gate_up)order, 96, 96};
        int seen[192] = {0};
        for (int64_t tile = 0; tile < cuda_tile_count(&gated); tile++)
            for (int32_t r = 0; r < CUDA_TILE_ROWS; r++) seen[cuda_source_row(&gated, tile, r)]++;
        for (int row = 0; row < 192; row++) assert_int_equal(seen[row], 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_element_survives),       cmocka_unit_test(a_base_holds_large_scales),
        cmocka_unit_test(what_cannot_be_held_is_found), cmocka_unit_test(what_pads_a_half_decides_nothing),
        cmocka_unit_test(fp8_words_hold_every_code),    cmocka_unit_test(fp8_holds_27_binades),
        cmocka_unit_test(every_row_appears_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
