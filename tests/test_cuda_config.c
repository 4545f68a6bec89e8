/* What the CUDA backend decides on the host: kernels by GPU, token tiles by rows, chunks and workspace by tokens. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/forward.h"
#include "cuda/isa.h"
#include "cuda/gemm.h"
#include "cuda/tiling.h"

/* ---- Levels ---- */

static void levels_by_gpu(void **unused)
{
    (void)unused;
    static const struct {
        struct cuda_features features;
        moe4_isa asked;
        const char *kernel; /* NULL = refused */
    } cases[] = {
        {{9, 0, 1}, MOE4_ISA_AUTO, "gemm_sm90"},   {{9, 0, 1}, MOE4_ISA_SM_80, "gemm_mma"},
        {{9, 0, 1}, MOE4_ISA_SM_90A, "gemm_sm90"}, {{9, 0, 0}, MOE4_ISA_AUTO, "gemm_mma"},
        {{9, 0, 0}, MOE4_ISA_SM_90A, NULL},        {{8, 0, 0}, MOE4_ISA_AUTO, "gemm_mma"},
        {{8, 9, 0}, MOE4_ISA_AUTO, "gemm_mma"},    {{8, 0, 0}, MOE4_ISA_SM_90A, NULL},
        {{10, 0, 0}, MOE4_ISA_AUTO, "gemm_mma"},   {{12, 0, 0}, MOE4_ISA_SM_90A, NULL},
        {{7, 5, 0}, MOE4_ISA_AUTO, NULL},          {{7, 5, 0}, MOE4_ISA_SM_80, NULL},
        {{9, 0, 1}, MOE4_ISA_AVX2, NULL},          {{9, 0, 1}, (moe4_isa)77, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct cuda_level *level = cuda_level_of(cases[i].asked, &cases[i].features);
        assert_int_equal(level != NULL, cases[i].kernel != NULL);
        if (level) assert_string_equal(level->kernel, cases[i].kernel);
    }
    assert_true(cuda_level_includes(MOE4_ISA_SM_90A, MOE4_ISA_SM_80));
    assert_false(cuda_level_includes(MOE4_ISA_SM_80, MOE4_ISA_SM_90A));
}

/* ---- Tiles ---- */

static void tiles_hold_all_rows(void **unused)
{
    (void)unused;
    assert_int_equal(tile_rows(0, MAX_TOKENS).n, 0);
    for (int32_t n_rows = 1; n_rows < 20 * MAX_TOKENS; n_rows++) {
        const struct tiling cut = tile_rows(n_rows, MAX_TOKENS);
        assert_in_range(cut.rows, 1, MAX_TOKENS);
        assert_int_equal(cut.rows % 8, 0);
        assert_true((int64_t)cut.n * cut.rows >= n_rows && (int64_t)(cut.n - 1) * cut.rows < n_rows);
        assert_true(cut.n <= 1 + (n_rows - 1) / MAX_TOKENS); /* what the workspace has room for */
    }
}

/* x and the rings lie within the shared memory that is asked for, and rows that do not fit have no stages. */
static void resident_x_fits(void **unused)
{
    (void)unused;
    int n_fit = 0;
    for (int32_t n_steps = 1; n_steps < 400; n_steps++)
        for (int32_t rows = 1; rows <= MAX_TOKENS; rows++) {
            const int32_t steps = resident_steps(n_steps), n = resident_stages(n_steps, rows);
            const int32_t x_bytes = resident_x_bytes(n_steps, (rows + 7) / 8 * 8);
            assert_true(n == 0 || (n >= RESIDENT_LEAST_STAGES && n <= RESIDENT_STAGES && rows <= RESIDENT_ROWS));
            assert_true(x_bytes >= n_steps * 128 * rows && x_bytes % 1024 == 0);
            if (n) assert_true(1024 + x_bytes + n * RESIDENT_TEAMS * steps * CUDA_STEP_BYTES <= RESIDENT_SHARED_BYTES);
            n_fit += n > 0;
        }
    assert_true(n_fit > 1000);
}

static void kernels_by_rows(void **unused)
{
    (void)unused;
    static const struct {
        int32_t mean, gate_up_steps, down_steps, rows;
    } cases[] = {
        {1, 45, 45, STREAM_ROWS},
        {5, 45, 45, STREAM_ROWS},
        {6, 45, 45, 16},
        {16, 45, 45, RESIDENT_ROWS},
        {18, 45, 45, NARROW_TOKENS},
        {64, 45, 45, NARROW_TOKENS},
        {65, 45, 45, MAX_TOKENS},
        {2, 112, 32, STREAM_ROWS},
        {4, 112, 32, STREAM_ROWS}, /* x of 8 rows of 7168 fits */
        {5, 112, 32, NARROW_TOKENS},
        {10, 56, 48, 16},
        {11, 56, 48, NARROW_TOKENS},
        {1, 1000, 45, NARROW_TOKENS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(choose_tile_rows(cases[i].mean, cases[i].gate_up_steps, cases[i].down_steps), cases[i].rows);
}

/* ---- Chunks ---- */

static moe4_layer some_layer(void)
{
    return (moe4_layer){.H = 7168, .I = 2048, .output_size = 7165, .E = 256, .L = 256, .chunk_rows = 131072};
}

static struct cuda_workspace_plan plan_of(const moe4_layer *layer, int64_t n_tokens, int32_t top_k)
{
    struct moe4_context context = {0};
    struct cuda_workspace_plan plan;
    assert_int_equal(cuda_forward_plan(&context, layer, n_tokens, top_k, &plan), MOE4_OK);
    return plan;
}

static void chunks_bound_the_workspace(void **unused)
{
    (void)unused;
    const moe4_layer layer = some_layer();
    static const int32_t top_ks[] = {1, 3, 8, 128};
    for (int i = 0; i < 4; i++) {
        const int64_t A = top_ks[i], largest = 131072 / A;
        assert_int_equal(plan_of(&layer, largest, (int32_t)A).chunk_tokens, largest);
        assert_int_equal(plan_of(&layer, largest + 1, (int32_t)A).chunk_tokens, largest);
        size_t last = 0;
        for (int64_t T = 1; T < 4 * largest; T += 1 + T / 7) { /* never less for more tokens */
            const size_t total = plan_of(&layer, T, (int32_t)A).total;
            assert_true(total >= last);
            last = total;
        }
        const size_t more =
            plan_of(&layer, INT32_MAX, (int32_t)A).total - plan_of(&layer, largest + 1, (int32_t)A).total;
        assert_true(more <= (size_t)INT32_MAX * (size_t)A * 16);
    }
    assert_int_equal(plan_of(&layer, 8192, 16).chunk_tokens, 8192);
}

static void arrays_do_not_overlap(void **unused)
{
    (void)unused;
    moe4_layer layer = some_layer();
    layer.chunk_rows = 10;
    const struct cuda_workspace_plan plan = plan_of(&layer, 100, 4);
    assert_int_equal(plan.chunk_tokens, 2);
    const size_t offsets[] = {plan.ids,        plan.weights,   plan.locals,       plan.row_map,     plan.first,
                              plan.counts,     plan.row_token, plan.tiles,        plan.exact_tiles, plan.numbers,
                              plan.logits,     plan.x,         plan.intermediate, plan.z,           plan.output_rows,
                              plan.row_output, plan.total};
    for (size_t i = 0; i + 1 < sizeof offsets / sizeof *offsets; i++) {
        assert_int_equal(offsets[i] % 256, 0);
        assert_true(offsets[i] <= offsets[i + 1]);
    }
    assert_true(plan.weights - plan.ids >= 100 * 4 * 4 && plan.output_rows - plan.z >= 2 * 4 * (size_t)plan.ldz * 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(levels_by_gpu),
        cmocka_unit_test(tiles_hold_all_rows),
        cmocka_unit_test(resident_x_fits),
        cmocka_unit_test(kernels_by_rows),
        cmocka_unit_test(chunks_bound_the_workspace),
        cmocka_unit_test(arrays_do_not_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
