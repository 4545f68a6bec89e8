/* Batches beyond every 32-bit product: 70,000 tokens, and element counts past 2^31, with "--nightly" past 2^32 and an
 * intermediate output of more than 4 GiB.  Sampled tokens must be what they are alone, and alone what the oracle says.
 */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

enum { T = 70000, H = 32, E = 160 };

struct size {
    int64_t intermediate_size;
    int32_t top_k;
    int shows_intermediate;
};
static const struct size every_day = {1024, 16, 0}; /* T*A*2I = 2.3e9 */
static const struct size nightly = {256, 128, 1};   /* T*A*2I = 4.6e9, and as many bytes of intermediate */
static const struct size *chosen = &every_day;

/* Ids of token t: distinct, and different from its neighbours'. */
static void fill_ids(const struct size *size, int64_t t, int32_t *ids, float *weights)
{
    for (int32_t a = 0; a < size->top_k; a++) {
        ids[a] = (int32_t)((t * 7 + a) % E);
        weights[a] = 1.0f / (float)(1 + (t + a) % 3);
    }
}

static void run(moe4_context *context, const moe4_layer *layer, const struct size *size, int64_t n_tokens,
                const uint16_t *x, const int32_t *ids, const float *weights, moe4_result *result)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    assert_int_equal(
        moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, n_tokens, size->top_k, &batch.workspace_bytes),
        MOE4_OK);
    void *workspace = aligned_alloc(256, (batch.workspace_bytes + 255) / 256 * 256);
    assert_non_null(workspace);
    batch.workspace = workspace;
    batch.n_tokens = n_tokens;
    batch.x = x;
    topk.top_k = size->top_k;
    topk.ids = ids;
    topk.weights = weights;
    if (moe4_forward_experts(context, layer, &batch, &topk, result) != MOE4_OK)
        fail_msg("%s", moe4_context_message(context));
    free(workspace);
}

/* Token t alone, through the oracle's eyes, and its row of the big call. */
static void check_token(struct buffers *buffers, moe4_context *context, const moe4_layer *layer,
                        const moe4_layer_config *config, const moe4_expert *experts, const struct size *size, int64_t t,
                        const uint16_t *x, const moe4_result *whole)
{
    struct call_plan plan = {.n_tokens = 1, .top_k = size->top_k, .routing = ROUTE_IDS_F32, .seed = 1};
    struct call call = call_create(buffers, config, &plan);
    memcpy((void *)call.batch.x, x + t * H, H * sizeof *x);
    fill_ids(size, t, (int32_t *)call.topk.ids, (float *)call.topk.weights);
    call_must_run(buffers, context, layer, &call);
    call_check(&call, experts, MOE4_ISA_AUTO, 4);
    assert_memory_equal((const uint16_t *)whole->y + t * H, call.result.y, H * sizeof(uint16_t));
    if (!whole->intermediate) return;
    for (int32_t a = 0; a < size->top_k; a += size->top_k - 1) {
        const int64_t I = size->intermediate_size, row = whole->row_map[t * size->top_k + a];
        assert_memory_equal((const uint16_t *)whole->intermediate + row * I,
                            (const uint16_t *)call.result.intermediate + call.result.row_map[a] * I, (size_t)I * 2);
    }
}

static void test_huge_batch(void **state)
{
    (void)state;
    const struct size *size = chosen;
    const int64_t R = (int64_t)T * size->top_k;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, size->intermediate_size, E, size->top_k);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 8};
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 0);
    moe4_layer *layer = layer_open(context, &config, experts);
    uint16_t *x = buffers_allocate(&buffers, (size_t)T * H * 2);
    int32_t *ids = buffers_allocate(&buffers, (size_t)R * 4);
    float *expert_weights = buffers_allocate(&buffers, (size_t)R * 4);
    struct random random = {17};
    for (int64_t i = 0; i < (int64_t)T * H; i++) store_value(x, MOE4_DTYPE_BF16, i, random_normal(&random));
    for (int64_t t = 0; t < T; t++) fill_ids(size, t, ids + t * size->top_k, expert_weights + t * size->top_k);
    moe4_result result = MOE4_RESULT_INIT;
    result.y = buffers_allocate(&buffers, (size_t)T * H * 2);
    result.row_map = buffers_allocate(&buffers, (size_t)R * 4);
    if (size->shows_intermediate) result.intermediate = malloc((size_t)R * (size_t)size->intermediate_size * 2);
    assert_true(!size->shows_intermediate || result.intermediate);
    run(context, layer, size, T, x, ids, expert_weights, &result);
    static const int64_t sampled[] = {0, 1, 1023, 1024, 4095, 32767, 32768, 65535, 65536, T - 1};
    for (size_t i = 0; i < sizeof sampled / sizeof *sampled; i++)
        check_token(&buffers, context, layer, &config, experts, size, sampled[i], x, &result);
    free(result.intermediate);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--nightly") == 0) chosen = &nightly;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_huge_batch)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
