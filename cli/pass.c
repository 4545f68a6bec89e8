#include "pass.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "ref.h"
#include "tensor.h"

enum { SCALE_BLOCK = 32, FP8_GROUP = 128 };

struct pass pass_begin(const moe4_layer_config *config, pass_routing routing, int64_t n_tokens, int32_t top_k)
{
    return (struct pass){
        .n_tokens = n_tokens,
        .hidden_size = config->hidden_size,
        .intermediate_size = config->intermediate_size,
        .output_size = config->output_size ? config->output_size : config->hidden_size,
        .router_size = config->router.hidden_size ? config->router.hidden_size : config->hidden_size,
        .n_experts = config->n_experts,
        .top_k = top_k,
        .compute = MOE4_COMPUTE_BF16,
        .routing = routing,
        .x_dtype = MOE4_DTYPE_BF16,
        .router_x_dtype = MOE4_DTYPE_BF16,
        .logits_dtype = MOE4_DTYPE_F32,
        .n_logit_sets = 1,
        .weights_dtype = MOE4_DTYPE_F32,
        .y_dtype = MOE4_DTYPE_BF16,
    };
}

size_t pass_intermediate_bytes(const struct pass *pass)
{
    return pass->compute == MOE4_COMPUTE_BF16 ? 2 : 1;
}

int64_t pass_scales(const struct pass *pass, moe4_dtype *dtype)
{
    static const moe4_dtype dtypes[] = {[MOE4_COMPUTE_BF16] = MOE4_DTYPE_NONE,
                                        [MOE4_COMPUTE_MXFP8] = MOE4_DTYPE_E8M0,
                                        [MOE4_COMPUTE_FP8] = MOE4_DTYPE_F32,
                                        [MOE4_COMPUTE_INT8] = MOE4_DTYPE_F32};
    static const int64_t groups[] = {
        [MOE4_COMPUTE_MXFP8] = SCALE_BLOCK, [MOE4_COMPUTE_FP8] = FP8_GROUP, [MOE4_COMPUTE_INT8] = SCALE_BLOCK};
    *dtype = dtypes[pass->compute];
    if (!*dtype) return 0;
    return (pass->intermediate_size + groups[pass->compute] - 1) / groups[pass->compute];
}

size_t pass_scale_bytes(const struct pass *pass)
{
    moe4_dtype dtype;
    int64_t n = pass_scales(pass, &dtype);
    return (size_t)n * (dtype == MOE4_DTYPE_F32 ? sizeof(float) : 1);
}

void pass_widen_intermediate(const struct pass *pass, const void *intermediate, const void *scales, double *v)
{
    int64_t I = pass->intermediate_size;
    switch (pass->compute) {
    case MOE4_COMPUTE_MXFP8: ref_dequantize_mxfp8(intermediate, scales, I, v); break;
    case MOE4_COMPUTE_FP8:
        for (int64_t i = 0; i < I; i += FP8_GROUP)
            ref_dequantize_fp8((const uint8_t *)intermediate + i,
                               (float)ref_load(scales, MOE4_DTYPE_F32, i / FP8_GROUP),
                               I - i < FP8_GROUP ? I - i : FP8_GROUP, v + i);
        break;
    case MOE4_COMPUTE_INT8: ref_dequantize_int8(intermediate, scales, I, v); break;
    default:
        for (int64_t i = 0; i < I; ++i) v[i] = ref_load(intermediate, MOE4_DTYPE_BF16, i);
    }
}

int pass_allocate(struct pass *pass, int wants)
{
    int64_t T = pass->n_tokens, R = T * pass->top_k;
    int code = allocate(&pass->y, T * pass->output_size, dtype_bytes(pass->y_dtype), "the output");
    if (!code) code = allocate(&pass->logits, T * pass->n_experts, sizeof *pass->logits, "logits");
    if (!code) code = allocate(&pass->ids, R, sizeof *pass->ids, "expert ids");
    if (!code) code = allocate(&pass->weights, R, sizeof *pass->weights, "expert weights");
    if (!code && wants & PASS_STAGES) {
        int64_t I = pass->intermediate_size;
        code = allocate(&pass->intermediate, R * I, pass_intermediate_bytes(pass), "intermediates");
        if (!code && pass->compute != MOE4_COMPUTE_BF16)
            code = allocate(&pass->intermediate_scale, R, pass_scale_bytes(pass), "scales of intermediates");
        if (!code) code = allocate(&pass->gemm2_rows, R * pass->output_size, sizeof *pass->gemm2_rows, "gemm2 rows");
        if (!code) code = allocate(&pass->row_map, R, sizeof *pass->row_map, "the row map");
    }
    if (!code && wants & PASS_REPLAY) code = allocate(&pass->replay, R, sizeof *pass->replay, "routing replay");
    return code;
}

/* ---- Where the layer is ------------------------------------------------------------------------------------------ */

/* Room on the GPU for every block there is, and the inputs there. */
static int pass_mirror(struct pass *pass)
{
    const int64_t T = pass->n_tokens, E = pass->n_experts, R = T * pass->top_k, O = pass->output_size;
    const int64_t H = pass->hidden_size, I = pass->intermediate_size;
    const int64_t x_scales = pass->compute == MOE4_COMPUTE_FP8 ? (int64_t)sizeof(float) : H / SCALE_BLOCK;
    const struct {
        void *host;
        int64_t count;
        size_t bytes;
    } blocks[] = {{pass->x, T * H, dtype_bytes(pass->x_dtype)},
                  {pass->x_scale, T * x_scales, 1},
                  {pass->router_x, T * pass->router_size, dtype_bytes(pass->router_x_dtype)},
                  {pass->token_ids, T, sizeof *pass->token_ids},
                  {pass->given_logits, pass->n_logit_sets * T * E, dtype_bytes(pass->logits_dtype)},
                  {pass->given_ids, R, sizeof *pass->given_ids},
                  {pass->given_weights, R, dtype_bytes(pass->weights_dtype)},
                  {pass->addend, T * O, dtype_bytes(pass->y_dtype)},
                  {pass->y, T * O, dtype_bytes(pass->y_dtype)},
                  {pass->logits, T * E, sizeof *pass->logits},
                  {pass->ids, R, sizeof *pass->ids},
                  {pass->weights, R, sizeof *pass->weights},
                  {pass->intermediate, R * I, pass_intermediate_bytes(pass)},
                  {pass->intermediate_scale, R, pass_scale_bytes(pass)},
                  {pass->gemm2_rows, R * O, sizeof *pass->gemm2_rows},
                  {pass->row_map, R, sizeof *pass->row_map},
                  {&pass->n_rows, 1, sizeof pass->n_rows},
                  {pass->replay, R, sizeof *pass->replay}};
    enum { N_BLOCKS = sizeof blocks / sizeof *blocks, N_INPUTS = 8 };
    int code = EXIT_OK;
    for (int i = 0; !code && i < N_BLOCKS; ++i) {
        code = mirror_add(&pass->mirror, blocks[i].host, (size_t)blocks[i].count * blocks[i].bytes, "a batch");
        if (!code && i < N_INPUTS) code = mirror_upload(&pass->mirror, blocks[i].host);
    }
    return code;
}

int pass_prepare(struct pass *pass, moe4_context *context, const moe4_layer *layer)
{
    struct gpu *gpu = pass->mirror.gpu;
    if (moe4_workspace_bytes(context, layer, pass->compute, pass->n_tokens, pass->top_k, &pass->workspace_bytes) !=
        MOE4_OK)
        return fail_library(context);
    if (!gpu) return allocate(&pass->workspace, (int64_t)pass->workspace_bytes, 1, "workspace");
    int code = gpu->calls->allocate(gpu, &pass->workspace, pass->workspace_bytes, "workspace");
    return code ? code : pass_mirror(pass);
}

/* ---- Calls ------------------------------------------------------------------------------------------------------- */

/* In the command's memory. */
static moe4_result pass_result(struct pass *pass, pass_results results)
{
    moe4_result result = MOE4_RESULT_INIT;
    result.ids = pass->ids;
    result.weights = pass->weights;
    if (results != FORWARD_DEFERRED) {
        result.y = pass->y;
        result.y_dtype = pass->y_dtype;
        result.write = pass->addend ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE;
    }
    if (results != FORWARD_OUTPUT) {
        result.gemm2_rows = pass->gemm2_rows;
        result.row_map = pass->row_map;
        result.n_rows = &pass->n_rows;
    }
    if (results == FORWARD_ALL) {
        result.intermediate = pass->intermediate;
        result.intermediate_scale = pass->intermediate_scale;
        result.replay = pass->replay;
        result.replay_rows = pass->replay ? pass->n_tokens : 0;
        result.logits = pass->routing == PASS_IDS ? NULL : pass->logits;
    }
    return result;
}

/* The same where the layer is. */
static moe4_result result_there(const struct mirror *mirror, moe4_result result)
{
    result.y = mirror_of(mirror, result.y);
    result.logits = mirror_of(mirror, result.logits);
    result.ids = mirror_of(mirror, result.ids);
    result.weights = mirror_of(mirror, result.weights);
    result.replay = mirror_of(mirror, result.replay);
    result.intermediate = mirror_of(mirror, result.intermediate);
    result.intermediate_scale = mirror_of(mirror, result.intermediate_scale);
    result.gemm2_rows = mirror_of(mirror, result.gemm2_rows);
    result.row_map = mirror_of(mirror, result.row_map);
    result.n_rows = mirror_of(mirror, result.n_rows);
    return result;
}

static int result_download(const struct mirror *mirror, const moe4_result *result)
{
    void *const blocks[] = {result->y,          result->logits,
                            result->ids,        result->weights,
                            result->replay,     result->intermediate,
                            result->gemm2_rows, result->row_map,
                            result->n_rows,     result->intermediate_scale};
    int code = EXIT_OK;
    for (size_t i = 0; !code && i < sizeof blocks / sizeof *blocks; ++i) code = mirror_download(mirror, blocks[i]);
    return code;
}

static moe4_batch batch_there(const struct pass *pass)
{
    const struct mirror *mirror = &pass->mirror;
    moe4_batch batch = MOE4_BATCH_INIT;
    batch.n_tokens = pass->n_tokens;
    batch.compute = pass->compute;
    batch.x = mirror_of(mirror, pass->x);
    batch.x_dtype = pass->x_dtype;
    batch.x_scale = mirror_of(mirror, pass->x_scale);
    batch.router_x = mirror_of(mirror, pass->router_x);
    batch.router_x_dtype = pass->router_x_dtype;
    batch.ldrouter_x = pass->router_size;
    batch.token_ids = mirror_of(mirror, pass->token_ids);
    batch.workspace = pass->workspace;
    batch.workspace_bytes = pass->workspace_bytes;
    batch.stream = mirror->gpu ? mirror->gpu->stream : NULL;
    return batch;
}

int pass_enqueue(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results)
{
    const struct mirror *mirror = &pass->mirror;
    const moe4_batch batch = batch_there(pass);
    const moe4_result result = result_there(mirror, pass_result(pass, results));
    moe4_status status;
    if (pass->routing == PASS_IDS) {
        moe4_topk topk = MOE4_TOPK_INIT;
        topk.format = pass->topk_format;
        topk.top_k = pass->top_k;
        topk.ids = mirror_of(mirror, pass->given_ids);
        topk.weights = mirror_of(mirror, pass->given_weights);
        topk.weights_dtype = pass->weights_dtype;
        topk.weight_use = pass->weight_use;
        status = moe4_forward_experts(context, layer, &batch, &topk, &result);
    } else {
        moe4_logits logits = MOE4_LOGITS_INIT;
        logits.logits = mirror_of(mirror, pass->given_logits);
        logits.dtype = pass->logits_dtype;
        status = moe4_forward_router(context, layer, &batch, pass->routing == PASS_LOGITS ? &logits : NULL, &result);
    }
    return status == MOE4_OK ? EXIT_OK : fail_library(context);
}

int pass_refresh(struct pass *pass)
{
    const struct mirror *mirror = &pass->mirror;
    size_t bytes = (size_t)(pass->n_tokens * pass->output_size) * dtype_bytes(pass->y_dtype);
    if (!pass->addend) return EXIT_OK;
    if (mirror->gpu)
        return mirror->gpu->calls->copy(mirror->gpu, mirror_of(mirror, pass->y), mirror_of(mirror, pass->addend),
                                        bytes);
    memcpy(pass->y, pass->addend, bytes);
    return EXIT_OK;
}

int pass_forward(struct pass *pass, moe4_context *context, const moe4_layer *layer, pass_results results)
{
    const moe4_result result = pass_result(pass, results);
    int code = pass_refresh(pass);
    if (!code) code = pass_enqueue(pass, context, layer, results);
    if (!code) code = result_download(&pass->mirror, &result);
    return code || moe4_context_check(context) == MOE4_OK ? code : fail_library(context);
}

/* ---- What the oracle sees ---------------------------------------------------------------------------------------- */

struct pass_choice pass_given(const struct pass *pass, int64_t slot)
{
    int32_t given = pass->given_ids[slot];
    if (pass->topk_format == MOE4_TOPK_PACKED)
        return (struct pass_choice){(int16_t)((uint32_t)given >> 16), (float)ref_bf16((uint16_t)given)};
    return (struct pass_choice){given, (float)ref_load(pass->given_weights, pass->weights_dtype, slot)};
}

void pass_router_input(const struct pass *pass, int64_t token, double *x)
{
    const int64_t n = pass->router_size;
    const void *from = pass->router_x ? pass->router_x : pass->x;
    const moe4_dtype dtype = pass->router_x ? pass->router_x_dtype : pass->x_dtype;
    for (int64_t k = 0; k < n; ++k) x[k] = ref_round_bf16(ref_load(from, dtype, token * n + k));
}

void pass_expert_input(const struct pass *pass, int64_t slot, double *x)
{
    const int64_t H = pass->hidden_size, first = slot / pass->top_k * H;
    if (pass->x_dtype == MOE4_DTYPE_F8_E4M3) {
        const uint8_t *codes = (const uint8_t *)pass->x + first, *scales = pass->x_scale;
        if (pass->compute == MOE4_COMPUTE_FP8)
            ref_dequantize_fp8(codes, (float)ref_load(scales, MOE4_DTYPE_F32, first / H), H, x);
        else
            ref_dequantize_mxfp8(codes, scales + first / SCALE_BLOCK, H, x);
        return;
    }
    for (int64_t h = 0; h < H; ++h) x[h] = ref_round_bf16(ref_load(pass->x, pass->x_dtype, first + h));
    if (pass->weight_use == MOE4_WEIGHT_ON_INPUT) {
        const double weight = pass_given(pass, slot).weight;
        for (int64_t h = 0; h < H; ++h) x[h] = ref_weighted_input(x[h], weight);
    }
    if (pass->compute == MOE4_COMPUTE_FP8) ref_round_fp8(x, H);
    if (pass->compute == MOE4_COMPUTE_INT8) ref_round_int8(x, H);
    for (int64_t h = 0; h < H && pass->compute == MOE4_COMPUTE_MXFP8; h += SCALE_BLOCK) {
        uint8_t codes[SCALE_BLOCK], scale;
        ref_quantize_mxfp8(x + h, SCALE_BLOCK, codes, &scale);
        ref_dequantize_mxfp8(codes, &scale, SCALE_BLOCK, x + h);
    }
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
    void *const blocks[] = {pass->x,
                            pass->x_scale,
                            pass->router_x,
                            pass->token_ids,
                            pass->intermediate_scale,
                            pass->given_logits,
                            pass->given_ids,
                            pass->given_weights,
                            pass->addend,
                            pass->y,
                            pass->logits,
                            pass->ids,
                            pass->weights,
                            pass->intermediate,
                            pass->gemm2_rows,
                            pass->row_map,
                            pass->replay};
    struct gpu *gpu = pass->mirror.gpu;
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) free(blocks[i]);
    mirror_close(&pass->mirror);
    if (gpu && pass->workspace)
        gpu->calls->release(gpu, pass->workspace);
    else
        free(pass->workspace);
}
