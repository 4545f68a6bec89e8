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
        cmocka_unit_test(chunks_bound_the_workspace),
        cmocka_unit_test(arrays_do_not_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
