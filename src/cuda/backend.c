/* CUDA behind the seam. */
#include "backend.h"

#include <string.h>

#include "base/dims.h"
#include "cuda/device.h"
#include "cuda/forward.h"
#include "cuda/prepared.h"
#include "cuda/upload.h"

static moe4_status cuda_open(struct moe4_context *context, const moe4_context_config *config)
{
    context->cuda = memory_allocate_zeroed(&context->allocator, sizeof *context->cuda);
    if (!context->cuda) return context_fail_memory(context, "a device", sizeof *context->cuda);
    moe4_status status = device_open(context, config->device_index, config->isa, context->cuda);
    if (status) return status;
    context->isa = context->cuda->level->isa;
    memcpy(context->device_name, context->cuda->name, sizeof context->device_name);
    if (config->pool || config->n_threads)
        return context_fail(context, MOE4_EINVAL, "%s is given, which is the cpu's",
                            config->pool ? "pool" : "n_threads");
    return MOE4_OK;
}

static void cuda_close(struct moe4_context *context)
{
    if (!context->cuda) return;
    int32_t previous = device_enter(context->cuda->index);
    upload_close(context->cuda->upload);
    device_close(context->cuda);
    device_leave(previous);
    memory_release(&context->allocator, context->cuda, sizeof *context->cuda);
}

static void cuda_describe_context(const struct moe4_context *context, moe4_context_info *info)
{
    info->device = MOE4_DEVICE_CUDA;
    info->isa = context->isa;
    info->isa_name = context->cuda->level->name;
    info->n_threads = 1;
    info->device_name = context->device_name;
}

static moe4_status cuda_supports(struct moe4_context *context, const moe4_query *query)
{
    if (query->compute == MOE4_COMPUTE_INT8)
        return context_fail(context, MOE4_EUNSUPPORTED, "compute is int8, which only the CPU backend has");
    if (query->config) {
        moe4_status status = cuda_check_compute(context, query->compute, query->config->compute);
        if (status) return status;
    }
    if (query->n_tokens > INT32_MAX)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected up to %d", (long long)query->n_tokens,
                            INT32_MAX);
    return MOE4_OK;
}

static void cuda_describe_layer(const struct moe4_layer *layer, moe4_layer_info *info)
{
    const struct cuda_prepared *prepared = layer->prepared;
    info->kernel = prepared->is_fp8 ? "gemm_sm90_fp8" : prepared->level->kernel;
    info->order = prepared->is_fp8 ? "wgmma_fp8_k32, promoted every 128" : prepared->level->order;
    info->packed_bytes = layer->L * (int64_t)(prepared->gate_up.expert_bytes + prepared->down.expert_bytes);
    info->n_exact_experts = prepared->n_exact;
}

static moe4_status cuda_workspace_bytes(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                                        int32_t top_k, size_t *bytes)
{
    struct cuda_workspace_plan plan;
    moe4_status status = cuda_forward_plan(context, layer, n_tokens, top_k, &plan);
    if (!status) *bytes = plan.total;
    return status;
}

static moe4_status cuda_check_faults(struct moe4_context *context)
{
    static const char *const formats[N_FAULTS] = {
        [FAULT_TOKEN_COUNT] = "*n_tokens_device was %2$d, expected 0 to n_tokens %1$lld",
        [FAULT_TOKEN_ID] = "token_ids[%lld] was %d, which the hash table does not hold",
        [FAULT_ROW_MAP] = "row_map of token %lld had the entry %d, expected -1 or a row of gemm2_rows",
    };
    for (int kind = 0; kind < N_FAULTS; kind++) {
        uint64_t seen = *(volatile uint64_t *)&context->cuda->faults[kind];
        if (seen)
            return context_fail(context, MOE4_EINVAL, formats[kind], (long long)(seen >> 32 & INT32_MAX),
                                (int32_t)(uint32_t)seen);
    }
    return MOE4_OK;
}

static void cuda_clear_faults(struct moe4_context *context)
{
    memset(context->cuda->faults, 0, N_FAULTS * sizeof *context->cuda->faults);
}

/* ---- Tuning ------------------------------------------------------------------------------------------------------ */

static const moe4_tactic cuda_tactics[] = {
    {0, 0}, {STREAM_ROWS, 0}, {16, 0}, {RESIDENT_ROWS, 0}, {NARROW_TOKENS, 0}, {MAX_TOKENS, 0}};

static int cuda_tactic_is_valid(const moe4_tactic *tactic)
{
    const int32_t rows = tactic->tile_tokens;
    return rows >= 0 && rows <= MAX_TOKENS && rows % 8 == 0 && tactic->claim_share == 0;
}

/* So many that what a launch costs counts for little. */
static int32_t cuda_calls_a_sample(int64_t n_tokens)
{
    return n_tokens <= 512 ? 8 : n_tokens <= 2048 ? 2 : 1;
}

static moe4_status cuda_time_calls(struct moe4_context *context, int32_t n,
                                   moe4_status (*run)(void *user, int32_t index, void *stream), void *user, double *ms)
{
    const int32_t previous = device_enter(context->cuda->index);
    cuda_stream stream = NULL;
    cuda_recording recording = NULL;
    moe4_status status = device_stream_create(context, &stream);
    if (!status) status = device_record_begin(context, stream);
    if (!status) {
        for (int32_t i = 0; !status && i < n; i++) status = run(user, i, stream);
        const moe4_status ended = device_record_end(context, stream, &recording); /* however the calls went */
        if (!status) status = ended;
    }
    if (!status) status = device_replay(context, recording, stream, ms);
    if (!status) status = device_replay(context, recording, stream, ms); /* the first uploads the graph */
    *ms /= n;
    device_recording_destroy(recording);
    device_stream_destroy(stream);
    device_leave(previous);
    return status;
}

const struct backend backend_cuda = {.open = cuda_open,
                                     .close = cuda_close,
                                     .describe_context = cuda_describe_context,
                                     .supports = cuda_supports,
                                     .layout = "tiles of 64 rows, steps of 2176 bytes",
                                     .plan = cuda_prepared_plan,
                                     .list_parts = cuda_prepared_list_parts,
                                     .allocate_part = cuda_prepared_allocate_part,
                                     .release_part = cuda_prepared_release_part,
                                     .download_part = cuda_prepared_download_part,
                                     .upload_part = cuda_prepared_upload_part,
                                     .fill = cuda_prepared_fill,
                                     .check_parts = cuda_prepared_check_parts,
                                     .release = cuda_prepared_release,
                                     .describe_layer = cuda_describe_layer,
                                     .workspace_bytes = cuda_workspace_bytes,
                                     .forward = cuda_forward,
                                     .combine = cuda_combine,
                                     .tactics = cuda_tactics,
                                     .n_tactics = sizeof cuda_tactics / sizeof *cuda_tactics,
                                     .tactic_is_valid = cuda_tactic_is_valid,
                                     .calls_a_sample = cuda_calls_a_sample,
                                     .time_calls = cuda_time_calls,
                                     .check_faults = cuda_check_faults,
                                     .clear_faults = cuda_clear_faults};
