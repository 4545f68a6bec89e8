#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "layer.h"

/* One token, each buffer of just its size. */
struct token {
    uint16_t *x, *router_x; /* [1, H], [1, router's H] */
    uint16_t *y;            /* [1, output_size] */
    int32_t *ids;           /* [1, A] */
    float *weights;         /* [1, A] */
};

static void *bytes(size_t n_bytes, int value)
{
    void *memory = malloc(n_bytes ? n_bytes : 1);
    FUZZ_CHECK(memory);
    memset(memory, value, n_bytes);
    return memory;
}

static struct token token_create(const moe4_layer *layer, const moe4_layer_info *info)
{
    size_t A = info->top_k ? (size_t)info->top_k : 1;
    struct token token = {
        .x = bytes((size_t)info->hidden_size * 2, 0x3F),
        .router_x = bytes((size_t)layer->router_size * 2, 0x3F),
        .y = bytes((size_t)info->output_size * 2, 0),
        .ids = bytes(A * 4, 0),
        .weights = bytes(A * 4, 0x3F),
    };
    for (size_t a = 0; a < A; a++) token.ids[a] = (int32_t)a;
    return token;
}

static void token_release(struct token *token)
{
    free(token->x);
    free(token->router_x);
    free(token->y);
    free(token->ids);
    free(token->weights);
}

static moe4_status run(moe4_context *context, const moe4_layer *layer, const moe4_layer_info *info, struct token *token,
                       void *workspace, size_t workspace_bytes)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    moe4_topk topk = MOE4_TOPK_INIT;
    static const int32_t token_id = 0;
    batch.n_tokens = 1;
    batch.x = token->x;
    batch.token_ids = &token_id;
    batch.workspace = workspace;
    batch.workspace_bytes = workspace_bytes;
    result.y = token->y;
    if (layer->router_size) {
        batch.router_x = token->router_x;
        batch.router_x_dtype = MOE4_DTYPE_BF16;
        return moe4_forward_router(context, layer, &batch, NULL, &result);
    }
    topk.top_k = info->top_k ? info->top_k : 1;
    topk.ids = token->ids;
    topk.weights = token->weights;
    return moe4_forward_experts(context, layer, &batch, &topk, &result);
}

void fuzz_use_layer(moe4_context *context, const moe4_layer *layer)
{
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    size_t workspace_bytes = 0;
    FUZZ_CHECK(moe4_layer_describe(layer, &info) == MOE4_OK);
    moe4_status status =
        moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, 1, info.top_k ? 0 : 1, &workspace_bytes);
    fuzz_check_status(context, status);
    if (status != MOE4_OK) return;
    void *workspace = NULL;
    FUZZ_CHECK(posix_memalign(&workspace, 256, workspace_bytes) == 0);
    struct token token = token_create(layer, &info);
    status = run(context, layer, &info, &token, workspace, workspace_bytes);
    fuzz_check_status(context, status);
    if (status == MOE4_OK) fuzz_touch(token.y, (size_t)info.output_size * 2);
    token_release(&token);
    free(workspace);
}
