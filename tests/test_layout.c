/* Packing: every code, scale and bias of a checkpoint matrix where cpu/layout.h says it is, and what scales are held.
 */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/kernels/pack.h"
#include "cpu/layout.h"
#include "fixture.h"
#include "ref.h"

/* The matrix row of gate or up column i, written down from the three orders. */
static int64_t stored_row(moe4_gate_up order, int64_t i, int is_up, int64_t stored)
{
    switch (order) {
    case MOE4_GATE_UP_INTERLEAVED: return 2 * i + is_up;
    case MOE4_GATE_UP_GATE_FIRST: return is_up ? stored + i : i;
    case MOE4_GATE_UP_UP_FIRST: return is_up ? i : stored + i;
    case MOE4_GATE_UP_NONE: break;
    }
    fail();
    return -1;
}

/* Bits of a packed lane by the picture in layout.h. */
static unsigned lane_code(const uint8_t *block, int32_t row, int32_t k)
{
    static const int lowest_bit[8] = {0, 16, 4, 20, 8, 24, 12, 28};
    uint32_t lane;
    memcpy(&lane, block + 64 + row / 16 * 256 + k / 8 * 64 + row % 16 * 4, 4);
    return lane >> lowest_bit[k % 8] & 15;
}

static void check_row(const moe4_matrix *matrix, int64_t K, int64_t row, const uint8_t *packed, int32_t lane)
{
    for (int64_t k = 0; k < K; k++) {
        const uint8_t *block = packed + k / 32 * PANEL_BLOCK_BYTES;
        unsigned code = layout_code(block, lane, (int32_t)(k % 32)), scale = layout_scale(block, lane);
        assert_int_equal(code, lane_code(block, lane, (int32_t)(k % 32)));
        assert_int_equal(block[lane], scale);
        double value = ref_round_f32(ref_e2m1(code) * ref_e8m0(scale));
        double expected = row < 0 ? 0 : ref_weight(matrix, K, row, k);
        if (value != expected)
            fail_msg("lane %d, row %lld, k %lld: %g, expected %g", lane, (long long)row, (long long)k, value, expected);
    }
}

static void check_packed(pack_rows_fn *pack, const moe4_matrix *matrix, int64_t K, const struct row_order *order,
                         int64_t panel, const int64_t rows[PANEL_ROWS], struct buffers *buffers)
{
    const size_t bytes = (size_t)(K / 32 * PANEL_BLOCK_BYTES);
    uint8_t *packed = buffers_allocate(buffers, bytes);
    float *bias = buffers_allocate(buffers, PANEL_ROWS * sizeof *bias);
    assert_int_equal(layout_pack_panel(pack, matrix, K, order, panel, packed, bias), 1);
    for (int32_t lane = 0; lane < PANEL_ROWS; lane++) {
        int64_t row = rows[lane];
        assert_int_equal(layout_source_row(order, panel, lane), row);
        check_row(matrix, K, row, packed, lane);
        double expected = row < 0 || !matrix->bias ? 0 : ref_load(matrix->bias, matrix->bias_dtype, row);
        if ((double)bias[lane] != expected)
            fail_msg("bias of lane %d is %g, not %g", lane, (double)bias[lane], expected);
    }
}

/* With every packer that can be run here. */
static void check_panel(const moe4_matrix *matrix, int64_t K, const struct row_order *order, int64_t panel,
                        const int64_t rows[PANEL_ROWS], struct buffers *buffers)
{
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    for (int32_t i = 0; i < n; i++) check_packed(pack_rows_for(levels[i]), matrix, K, order, panel, rows, buffers);
}

static void check_gated(const moe4_layer_config *config, const struct weight_plan *plan, enum buffers_kind kind)
{
    struct buffers buffers = {kind, NULL};
    moe4_matrix matrix = weights_expert(&buffers, config, plan, 1).gate_up;
    int64_t I = config->intermediate_size, stored = config->stored_intermediate_size;
    struct row_order order = {PANEL_GATED, config->gate_up, I, stored ? stored : I};
    assert_int_equal(panel_count(&order), I / 32);
    for (int64_t panel = 0; panel < I / 32; panel++) {
        int64_t rows[PANEL_ROWS];
        for (int32_t lane = 0; lane < PANEL_ROWS; lane++)
            rows[lane] =
                stored_row(config->gate_up, 32 * panel + lane / 32 * 16 + lane % 16, lane / 16 % 2, order.stored_rows);
        check_panel(&matrix, config->hidden_size, &order, panel, rows, &buffers);
    }
    buffers_release(&buffers);
}

static void test_gated(void **state)
{
    (void)state;
    static const moe4_gate_up orders[] = {MOE4_GATE_UP_INTERLEAVED, MOE4_GATE_UP_GATE_FIRST, MOE4_GATE_UP_UP_FIRST};
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_F32, MOE4_DTYPE_F16, MOE4_DTYPE_BF16};
    static const int64_t hidden_sizes[] = {544, 96, 640, 1120}; /* blocks are packed by 4, their scales by 16 */
    for (int i = 0; i < 12; i++) {
        moe4_layer_config config = layer_config(hidden_sizes[i % 4], i % 3 ? 96 : 32, 2, 1);
        config.gate_up = orders[i % 3];
        config.stored_intermediate_size = i % 2 ? 0 : config.intermediate_size + 64;
        struct weight_plan plan = {.biases = i % 5 ? BIAS_BOTH : BIAS_NONE,
                                   .bias_dtype = dtypes[i % 3],
                                   .row_gap = i % 7,
                                   .seed = (uint64_t)i};
        check_gated(&config, &plan, i % 2 ? BUFFERS_GUARD_AFTER : BUFFERS_GUARD_BEFORE);
    }
}

static void test_plain(void **state)
{
    (void)state;
    static const int64_t sizes[] = {32, 64, 96, 160, 608};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct buffers buffers = {i % 2 ? BUFFERS_GUARD_AFTER : BUFFERS_GUARD_BEFORE, NULL};
        moe4_layer_config config = layer_config(sizes[i], 32 * (int64_t)(i + 1), 2, 1);
        struct weight_plan plan = {
            .biases = BIAS_DOWN, .bias_dtype = MOE4_DTYPE_BF16, .row_gap = (int64_t)i, .seed = i};
        moe4_matrix matrix = weights_expert(&buffers, &config, &plan, 0).down;
        struct row_order order = {PANEL_PLAIN, MOE4_GATE_UP_NONE, sizes[i], sizes[i]};
        assert_int_equal(panel_count(&order), (sizes[i] + 63) / 64);
        for (int64_t panel = 0; panel < panel_count(&order); panel++) {
            int64_t rows[PANEL_ROWS];
            for (int32_t lane = 0; lane < PANEL_ROWS; lane++)
                rows[lane] = panel * 64 + lane < sizes[i] ? panel * 64 + lane : -1;
            check_panel(&matrix, config.intermediate_size, &order, panel, rows, &buffers);
        }
        buffers_release(&buffers);
    }
}

/* Whether packing calls these 64 rows of one block fast, when row `row` has this scale byte and code. */
static int is_fast(pack_rows_fn *pack, int32_t row, unsigned scale, unsigned code)
{
    uint8_t codes[PANEL_ROWS * BLOCK_BYTES], scales[PANEL_ROWS];
    uint8_t packed[PANEL_BLOCK_BYTES] __attribute__((aligned(LINE_BYTES)));
    float bias[PANEL_ROWS];
    memset(codes, 0x23, sizeof codes);
    memset(scales, 120, sizeof scales);
    memset(codes + row * BLOCK_BYTES, 0x88, BLOCK_BYTES); /* -0 */
    scales[row] = (uint8_t)scale;
    set_code(codes + row * BLOCK_BYTES, row % 32, code);
    moe4_matrix matrix = {codes, scales, 0, 0, NULL, MOE4_DTYPE_NONE};
    struct row_order order = {PANEL_PLAIN, MOE4_GATE_UP_NONE, PANEL_ROWS, PANEL_ROWS};
    return layout_pack_panel(pack, &matrix, 32, &order, 0, packed, bias);
}

static void check_scales(pack_rows_fn *pack)
{
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned code = 0; code < 16; code++) {
            int is_zero = code % 8 == 0;
            int expected = scale == 255 ? 0 : is_zero || (scale >= 2 && scale <= 240);
            assert_int_equal(is_fast(pack, (int32_t)((scale + code) % 64), scale, code), expected);
        }
}

static void test_which_scales_are_fast(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    for (int32_t i = 0; i < n; i++) check_scales(pack_rows_for(levels[i]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gated),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_which_scales_are_fast),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
