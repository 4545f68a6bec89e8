#include "pass.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "ref.h"

struct pass pass_begin(const moe4_layer_config *config, pass_routing routing, int64_t n_tokens, int32_t top_k)
{
    return (struct pass){
        .n_tokens = n_tokens,
        .hidden_size = config->hidden_size,
        .intermediate_size = config->intermediate_size,
        .output_size = config->output_size ? config->output_size : config->hidden_size,
        .n_experts = config->n_experts,
        .top_k = top_k,
        .routing = routing,
    };
}

int pass_allocate(struct pass *pass, int wants)
{
    int64_t T = pass->n_tokens, R = T * pass->top_k;
    int code = allocate(&pass->y, T * pass->output_size, sizeof *pass->y, "the output");
    if (!code) code = allocate(&pass->logits, T * pass->n_experts, sizeof *pass->logits, "logits");
    if (!code) code = allocate(&pass->ids, R, sizeof *pass->ids, "expert ids");
    if (!code) code = allocate(&pass->weights, R, sizeof *pass->weights, "expert weights");
    if (!code && wants & PASS_STAGES) {
        code = allocate(&pass->intermediate, R * pass->intermediate_size, sizeof *pass->intermediate, "intermediates");
        if (!code) code = allocate(&pass->gemm2_rows, R * pass->output_size, sizeof *pass->gemm2_rows, "gemm2 rows");
        if (!code) code = allocate(&pass->row_map, R, sizeof *pass->row_map, "the row map");
    }
    if (!code && wants & PASS_REPLAY) code = allocate(&pass->replay, R, sizeof *pass->replay, "routing replay");
    return code;
}

int pass_prepare(struct pass *pass, moe4_context *context, const moe4_layer *layer)
{
    if (moe4_workspace_bytes(context, layer, MOE4_COMPUTE_BF16, pass->n_tokens, pass->top_k, &pass->workspace_bytes) !=
        MOE4_OK)
        return fail_library(context);
    return allocate(&pass->workspace, (int64_t)pass->workspace_bytes, 1, "workspace");
}

static moe4_result pass_result(struct pass *pass, pass_results results)
{
    moe4_result result = MOE4_RESULT_INIT;
    result.ids = pass->ids;
    result.weights = pass->weights;
    if (results != FORWARD_DEFERRED) result.y = pass->y;
    if (results != FORWARD_OUTPUT) {
        result.gemm2_rows = pass->gemm2_rows;
        result.row_map = pass->row_map;
        result.n_rows = &pass->n_rows;
    }
    if (results == FORWARD_ALL) {
        result.intermediate = pass->intermediate;
        result.replay = pass->replay;
        result.replay_rows = pass->replay ? pass->n_tokens : 0;
        result.logits = pass->routing == PASS_IDS ? NULL : pass->logits;
    }
    return result;
}

moe4_status pass_forward(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results)
{
    moe4_batch batch = MOE4_BATCH_INIT;
    batch.n_tokens = pass->n_tokens;
    batch.x = pass->x;
    batch.workspace = pass->workspace;
    batch.workspace_bytes = pass->workspace_bytes;
    moe4_result result = pass_result(pass, results);
    if (pass->routing == PASS_IDS) {
        moe4_topk topk = MOE4_TOPK_INIT;
        topk.top_k = pass->top_k;
        topk.ids = pass->given_ids;
        topk.weights = pass->given_weights;
        return moe4_forward_experts(context, layer, &batch, &topk, &result);
    }
    moe4_logits logits = MOE4_LOGITS_INIT;
    logits.logits = pass->given_logits;
    return moe4_forward_router(context, layer, &batch, pass->routing == PASS_LOGITS ? &logits : NULL, &result);
}

void pass_count_load(const struct pass *pass, int64_t *load)
{
    memset(load, 0, (size_t)pass->n_experts * sizeof *load);
    for (int64_t p = 0; p < pass->n_tokens * pass->top_k; ++p)
        if (pass->ids[p] >= 0 && pass->ids[p] < pass->n_experts) ++load[pass->ids[p]];
}

void pass_count_local(const struct pass *pass, const moe4_layer_config *config, int64_t *n_experts, int64_t *n_rows)
{
    uint8_t seen[32767] = {0}; /* as many as the library takes */
    *n_experts = *n_rows = 0;
    for (int64_t p = 0; p < pass->n_tokens * pass->top_k; ++p) {
        int32_t local = ref_local_expert(config, pass->ids[p]);
        if (local < 0) continue;
        *n_experts += !seen[local];
        seen[local] = 1;
        ++*n_rows;
    }
}

void pass_end(struct pass *pass)
{
    void *const blocks[] = {pass->x,       pass->given_logits, pass->given_ids, pass->given_weights, pass->y,
                            pass->logits,  pass->ids,          pass->weights,   pass->intermediate,  pass->gemm2_rows,
                            pass->row_map, pass->replay,       pass->workspace};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) free(blocks[i]);
}
